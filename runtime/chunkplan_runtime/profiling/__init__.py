"""When each action ran, and the same step in the planner's simulator."""
