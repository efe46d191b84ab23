"""Benchmarks: ``python -m benchmarks NAME`` runs one benchmark and prints its results."""
