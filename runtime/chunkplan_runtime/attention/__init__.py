"""Attention over a chunk: the kernel interface, its implementations, and the function that models call."""
