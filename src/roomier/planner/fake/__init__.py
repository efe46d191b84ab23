"""The environment of a dry run: fake tensors and simulated ranks."""
