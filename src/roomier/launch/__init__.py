"""Ranks: recognise who started this process, start the others of this machine, and let them find each other."""

from roomier.launch.environment import Launch
from roomier.launch.join import exits_together, join
from roomier.launch.place import place, present_launch

__all__ = ["Launch", "exits_together", "join", "place", "present_launch"]
