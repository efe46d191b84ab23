"""Which kernel computes attention, and which one did."""
