"""The planner's page: one file of HTML."""
