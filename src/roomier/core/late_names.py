"""Names of a package that are imported when they are first asked for (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def late_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` for the module ``package``; its files are found as its attributes too.

    Args:
        homes: the file of each name. No file may have the name of something in it: once imported it would be found in
            its place.
    """
    files = set(homes.values())
    assert not files & homes.keys(), "a file would hide what is in it"

    def get(name: str) -> Any:
        if name in files:
            return import_module(f"{package}.{name}")
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(import_module(f"{package}.{homes[name]}"), name)
        setattr(sys.modules[package], name, found)  # asked for once
        return found

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes, *files})

    return get, names
