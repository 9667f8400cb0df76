"""Proves that chunked execution is exact for a model, by running a small one of its class."""
