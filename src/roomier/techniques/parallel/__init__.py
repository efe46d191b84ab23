"""Strategies that train one model on several ranks, and their communication."""
