"""Lazy imports of the names of a package: each name is imported on its first access (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any


def late_names(
    module: str, homes: Mapping[str, str], package: str | None = None, files: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for the module named ``module``.

    These functions also make files and folders of the package available as attributes.

    Args:
        package: package that contains the files, if it is not ``module``.
        files: names of these files and folders, in addition to the files in ``homes``.
        homes: mapping from each name to the file that defines the name. A file must not have the name of an object in
            ``homes``, because the imported file would replace the object as an attribute of the package.
    """
    package = package or module
    files = {*files, *(home for home in homes.values() if "." not in home)}
    assert not files & homes.keys(), "a file has the same name as an object"

    def get(name: str) -> Any:
        if name in files:
            return import_module(f"{package}.{name}")
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        found = getattr(import_module(f"{package}.{homes[name]}"), name)
        setattr(sys.modules[module], name, found)  # The next access then does not call this function.
        return found

    def names() -> list[str]:
        return sorted({*vars(sys.modules[module]), *homes, *files})

    return get, names
