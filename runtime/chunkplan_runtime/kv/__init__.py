"""Keys, values and their gradients of split sequences: what outlives a chunk."""
