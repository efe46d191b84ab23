"""Activations that are saved for backward: recomputation, offloading, and a memory budget for both."""
