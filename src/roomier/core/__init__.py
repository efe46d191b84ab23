"""Code that all layers share, such as ranks, nested batches, units and errors."""
