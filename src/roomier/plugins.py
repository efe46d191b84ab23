"""Errors for imports from ``roomier.plugins``, which does not exist, in scripts that were written for Lightning."""

from __future__ import annotations

from typing import Never

from roomier.core.errors import RoomierError


def __getattr__(name: str) -> Never:
    if name.startswith("__"):  # the import system reads such names
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    action = (
        f"Import it from Lightning, and pass Trainer(strategy={name}(...)) or Trainer(plugins={name}(...)). Without "
        "Lightning, use the arguments strategy, such as 'zero2' or 'ddp', and precision"
    )
    raise RoomierError(f"roomier.plugins.{name}", None, "does not exist, because roomier has no plugins", action)
