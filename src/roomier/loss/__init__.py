"""Losses of language models that are computed in chunks of logits."""
