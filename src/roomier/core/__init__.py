"""Shared foundations of all layers: world, device, batches, units, random state, errors."""
