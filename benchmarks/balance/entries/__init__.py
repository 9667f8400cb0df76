"""Entries of the benchmark, a file each: `TRACK`, `PACKAGE` and `plan(step)`; one without its package is skipped."""
