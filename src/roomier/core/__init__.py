"""Facts and small tools every layer stands on: world, device, batches, units, random state, errors."""
