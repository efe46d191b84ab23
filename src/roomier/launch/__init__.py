"""Detect the launcher of this process, start the other ranks of this machine, and connect all ranks."""

from roomier.launch.environment import Launch
from roomier.launch.join import exits_together, join
from roomier.launch.place import place, present_launch

__all__ = ["Launch", "exits_together", "join", "place", "present_launch"]
