"""A world in which tensors have no memory, and what it answers."""
