"""A plan's steps and their tokens, read ahead of the work."""
