"""Benchmarks: ``roomier bench NAME`` runs one benchmark and prints its results."""
