"""Dry runs: a training step on fake tensors, with the code that a run uses."""
