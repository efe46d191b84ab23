"""Code that all layers share, such as the world, devices, batches, units, random states and errors."""
