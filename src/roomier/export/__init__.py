"""From a checkpoint to files that other programs read."""
