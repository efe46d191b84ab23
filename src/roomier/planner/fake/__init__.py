"""The environment of a dry run: tensors without memory, and ranks that do not exist."""
