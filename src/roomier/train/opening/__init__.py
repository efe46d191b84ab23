"""From settled facts to a run that is ready for its loop, and the end of a run."""
