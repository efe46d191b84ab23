"""From the request of a user to the settled facts of a run."""
