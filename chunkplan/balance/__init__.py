"""Spreads the sequences of a step over data-parallel ranks, by cost."""
