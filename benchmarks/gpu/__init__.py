"""``python -m benchmarks gpu``: measurements of an accelerator in several parts."""
