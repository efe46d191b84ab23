"""Import the classes named on the command line or in YAML files before jsonargparse imports them. This makes error
messages simpler.

If a module raises an exception at import, the exception is raised unchanged, with its traceback.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

from roomier.cli.config_files import Option, write_content
from roomier.core.errors import RoomierError, did_you_mean

_CLASS_OPTIONS = ("model", "data", "trainer.callbacks", "trainer.logger", "optimizer", "lr_scheduler")
_UNKNOWN = object()


def remove_unknown_classes(options: list[Option]) -> list[RoomierError]:
    """Import each class that ``options`` names. Return an error for each class that does not exist, and remove its
    option."""
    errors: list[RoomierError] = []
    for option in list(options):
        if option.content is not None:
            known = _known(option.content, "", errors)
            if known != option.content:
                option.content = known
                write_content(option)
        elif option.field in _CLASS_OPTIONS or option.field.endswith(".class_path"):
            try:
                check_class_path(option.field, option.value)
            except RoomierError as error:
                errors.append(error)
                options.remove(option)
    return errors


def _known(node: Any, field: str, errors: list[RoomierError]) -> Any:
    """Return ``node`` without the classes that do not exist, and append their errors to ``errors``."""
    is_class = isinstance(node, dict) and "class_path" in node
    path = node["class_path"] if is_class else node if field in _CLASS_OPTIONS else None
    if isinstance(path, str):
        try:
            check_class_path(f"{field}.class_path" if is_class else field, path)
        except RoomierError as error:
            errors.append(error)
            return _UNKNOWN
    if isinstance(node, dict):
        inner = {key: _known(value, f"{field}.{key}" if field else str(key), errors) for key, value in node.items()}
        return {key: value for key, value in inner.items() if value is not _UNKNOWN}
    if isinstance(node, list):
        values = [_known(value, f"{field}[{index}]", errors) for index, value in enumerate(node)]
        return [value for value in values if value is not _UNKNOWN]
    return node


def check_class_path(field: str, path: str) -> None:
    """Import the class at ``path``, such as ``package.module.Name``. jsonargparse resolves names without dots itself.

    Raises:
        RoomierError: the module or the class does not exist.
    """
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
    """Return the innermost module on the dotted ``path``, and the remaining names."""
    parts = path.split(".")
    module = None
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        try:
            module = import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise  # the module exists, but one of its imports does not exist
            if module is not None:
                return module, parts[count - 1 :]
            action = "Run roomier in the folder of the module, or install its package. The form is package.module.Class"
            raise RoomierError(field, path, f"the module {name!r} does not exist", action) from None
    raise RoomierError(field, path, "is a module", "Pass a class in this module, as package.module.Class")
