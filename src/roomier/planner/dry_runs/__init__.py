"""Dry runs, which execute a training step on fake tensors with the code that a run uses."""
