"""Optimizer states and parameters that leave the device between their uses."""
