"""The cost model: time and memory of chunks."""
