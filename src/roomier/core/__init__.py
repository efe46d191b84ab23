"""Code that all layers share, such as the world, batches, units and errors."""
