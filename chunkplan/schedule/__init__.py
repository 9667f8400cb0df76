"""Schedules: the order of chunks on the stages of a rank's pipeline, and its time."""
