"""The loop, evaluation, and the state of a run."""
