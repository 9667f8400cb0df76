"""Bin packing of short sequences into chunks, and lower bounds on how few chunks can do."""
