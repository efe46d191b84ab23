"""Export of checkpoints and models to files for other programs."""
