"""Reference models in plain ``torch.nn``: what the examples and benchmarks train."""
