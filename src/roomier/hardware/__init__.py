"""Devices and machines as values: memory, speed and links."""
