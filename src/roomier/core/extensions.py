"""Installed packages that add optimizers and loggers to roomier.

A package declares an entry point in the group ``roomier.extensions``. It names a function without arguments, which adds
entries to ``roomier.plan.choices.OPTIMIZERS`` and ``roomier.loggers.by_name.LOGGERS``. Each process calls the function
when it first receives a name that roomier does not define.
"""

from functools import cache
from importlib.metadata import entry_points

GROUP = "roomier.extensions"


@cache
def load_extensions() -> None:
    """Call the functions of all installed extensions, once per process."""
    for each in entry_points(group=GROUP):
        each.load()()
