"""Streams of predictions."""
