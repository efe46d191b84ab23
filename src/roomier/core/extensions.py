"""Installed packages that add optimizers, loggers, memory techniques, compressions of gradients and rules to roomier.

A package declares an entry point in the group ``roomier.extensions``. It names a function without arguments, which adds
entries to the tables that ``CONTRIBUTING.md`` lists. Each process calls the function when it first receives a name that
roomier does not define.
"""

from functools import cache
from importlib.metadata import entry_points

from roomier.core.log import notice

GROUP = "roomier.extensions"


@cache
def load_extensions() -> None:
    """Call the functions of all installed extensions, once per process. A notice reports an extension that fails."""
    for each in entry_points(group=GROUP):
        try:
            each.load()()
        except Exception as error:
            notice(f"the extension {each.name!r} ({each.value}) failed: {type(error).__name__}: {error}")
