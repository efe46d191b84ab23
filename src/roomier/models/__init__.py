"""Reference models in plain ``torch.nn`` for the examples and benchmarks."""
