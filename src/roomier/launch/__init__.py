"""Ranks: recognise who started this process, start the others of this machine, and let them find each other."""

from roomier.launch.environment import Launch, export, launch_of
from roomier.launch.join import join

__all__ = ["Launch", "export", "join", "launch_of"]
