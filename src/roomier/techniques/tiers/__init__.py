"""Tiers of memory below the device: host memory and disk, which store records of bytes."""
