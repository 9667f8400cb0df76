"""Chooses ChunkSize, K and how a model is run, from the lengths of a dataset, without a GPU."""
