"""Benchmark of one step: how evenly planners spread sequences over ranks and micro-batches, and how fast they plan."""
