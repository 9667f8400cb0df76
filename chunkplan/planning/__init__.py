"""Batches -> ranks -> chunks -> order -> predictions: the planner, as pure functions over arrays."""
