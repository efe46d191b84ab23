"""Import paths named on the command line or in YAML are tried first, so that what is wrong with one is told simply.

What a module raises while it is imported reaches the user as it is, with its traceback.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from roomier.cli.config_files import options_in, read_config
from roomier.core.errors import RoomierError, did_you_mean

_CLASS_OPTIONS = ("model", "data", "trainer.callbacks", "trainer.logger")


def check_class_paths(arguments: Sequence[str]) -> None:
    """Import each class that ``arguments`` name.

    Raises:
        RoomierError: there is no such module, or it has no such name.
    """
    for field, value in options_in(arguments):
        if field == "config":
            for inner_field, path in _class_paths(read_config(value)):
                check_class_path(inner_field, path)
        elif field in _CLASS_OPTIONS or field.endswith(".class_path"):
            check_class_path(field, value)


def check_class_path(field: str, path: str) -> None:
    """Import ``package.module.Name``. A bare name is left to jsonargparse, which knows the classes in sight."""
    parts = path.split(".")
    if len(parts) == 1 or not all(map(str.isidentifier, parts)):
        return
    module, names = _import_longest(field, path)
    found: Any = module
    for name in names:
        if not hasattr(found, name):
            public = [each for each in vars(found) if not each.startswith("_")]
            raise RoomierError(field, path, f"{found.__name__} has no {name!r}", did_you_mean(name, public))
        found = getattr(found, name)


def _import_longest(field: str, path: str) -> tuple[ModuleType, list[str]]:
    """The innermost module on ``path``, and the names behind it."""
    parts = path.split(".")
    module = None
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        try:
            module = import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise  # the module is there; what it imports is not
            if module is not None:
                return module, parts[count - 1 :]
            raise RoomierError(
                field,
                path,
                f"there is no module {name!r} here",
                "Run from the folder it is in, or install its package; the form is package.module.Class",
            ) from None
    raise RoomierError(field, path, "is a module", "Name a class in it, as package.module.Class")


def _class_paths(node: Any, field: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(node, dict):
        for key, value in node.items():
            name = f"{field}.{key}" if field else str(key)
            if isinstance(value, str) and (key == "class_path" or name in _CLASS_OPTIONS):
                yield name, value
            else:
                yield from _class_paths(value, name)
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _class_paths(value, f"{field}[{index}]")
