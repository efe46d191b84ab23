"""Devices and machines: how much they hold, how fast they are."""
