"""Save and restore checkpoints of a run, and load the first weights of a model."""
