"""Attention over a chunk: the kernels, one a file, which of them is used, and the function that models call."""
