"""Resolution of a user's request to the settled facts of a run."""
