"""Save and restore checkpoints of a run, and load the initial weights of a model."""
