"""Functions of higher layers that methods of :class:`roomier.Module` and :class:`roomier.DataModule` call.

``roomier/__init__.py``, the only file above all layers, provides the functions, so ``api`` does not depend on the
folders that define them.
"""

from importlib import import_module
from typing import Any

homes: dict[str, str] = {}
"""Map from the name of each function to the module that defines it. The module is imported on the first call."""


def provided(name: str) -> Any:
    """Return the function ``name``."""
    return getattr(import_module(homes[name]), name)
