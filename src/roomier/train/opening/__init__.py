"""Open a run from settled facts, and close it."""
