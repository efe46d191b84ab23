"""Custom training loops: the objects of Accelerate over roomier's engine."""
