"""Benchmarks: ``roomier bench NAME`` runs one and prints its results."""
