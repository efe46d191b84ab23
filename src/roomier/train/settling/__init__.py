"""Resolve a request of the user to the settled facts of a run."""
