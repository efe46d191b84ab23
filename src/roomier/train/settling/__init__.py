"""Resolve a user's request into the settled facts of a run."""
