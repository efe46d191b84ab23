"""Custom training loops: the objects of Accelerate, implemented with roomier's engine."""
