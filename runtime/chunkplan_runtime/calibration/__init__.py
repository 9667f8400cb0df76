"""Times chunks on the device at hand, for a hardware profile of the planner's cost model."""
