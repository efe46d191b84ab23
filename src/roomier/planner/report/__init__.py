"""Reports of the planner's result: tables for a terminal and an HTML page."""
