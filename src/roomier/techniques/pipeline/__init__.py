"""Pipelines: consecutive parts of a model on different ranks."""
