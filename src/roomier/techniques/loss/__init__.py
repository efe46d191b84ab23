"""Language-model losses that are computed in chunks of logits."""
