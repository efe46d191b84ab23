"""Descriptions of devices and machines: memory, speed and links."""
