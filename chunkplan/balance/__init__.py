"""Assigns the sequences of a step to data-parallel ranks, by cost."""
