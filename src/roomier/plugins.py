"""Errors for imports from ``roomier.plugins`` and ``roomier.strategies``, which contain no classes, for scripts of
Lightning."""

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
    raise RoomierError("import", name, "does not exist, because plugins and strategies are arguments here", action)
