"""Checkpoints of a run: written, restored, and weights that a model begins with."""
