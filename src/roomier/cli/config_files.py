"""Functions that read and check the YAML files of ``--config`` and add file names to errors about their values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from roomier.cli.explain import in_file
from roomier.core.errors import RoomierError
from roomier.core.paths import check_path
from roomier.core.yaml_text import ExpansionError, UniqueKeysLoader, check_aliases

_ACTION = "Pass a YAML file. `--print_config` prints a template"
_INIT_ARGS = "init_args"


def read_config(path: str) -> dict[str, Any]:
    """Read a YAML file of options.

    Raises:
        RoomierError: the file cannot be read, is not YAML, or does not contain a mapping of options.
    """
    check_path("config", path)
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=UniqueKeysLoader)
    except OSError as error:
        raise RoomierError("config", path, f"cannot be read: {error.strerror}", _ACTION) from None
    except (ValueError, yaml.YAMLError) as error:  # a ValueError is raised for invalid UTF-8 or an invalid date
        raise RoomierError("config", path, f"is not YAML: {_with_line(error)}", _ACTION) from None
    if not isinstance(content, dict):
        kind = "is empty" if content is None else f"contains a {type(content).__name__}"
        problem = f"must contain a mapping of options, but {kind}"
        raise RoomierError("config", path, problem, "Use sections, such as trainer: {max_steps: 100}")
    trainer = content.get("trainer")
    if trainer is not None and not isinstance(trainer, (dict, str)):  # a string is the path of a separate file
        action = "Pass the options of the section as a mapping, such as trainer: {max_steps: 100}"
        raise RoomierError("trainer", trainer, f"must be a mapping, in {path}", action)
    return content


def options_in(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the field and the value of each option. An option is ``--field value`` or ``--field=value``."""
    for word, following in zip(arguments, [*arguments, ""][1:], strict=True):
        if word.startswith("--"):
            field, is_joined, value = word[2:].partition("=")
            yield field.removesuffix("+"), value if is_joined else following


def check_texts(arguments: Sequence[str]) -> None:
    """Check the YAML in the arguments and in the strings of the ``--config`` files.

    Raises:
        RoomierError: a text has aliases that expand to too many values.
    """
    for field, value in options_in(arguments):
        texts = [(field, value)] if field != "config" else list(_values(read_config(value)))
        for name, text in texts:
            try:
                check_aliases(text if isinstance(text, str) else "")
            except ExpansionError as error:
                raise RoomierError(name, text, error.problem or "", "Write the values without aliases") from None


def naming_file(error: RoomierError, arguments: Sequence[str]) -> RoomierError:
    """Return ``error``. If a ``--config`` file contains the invalid value, the error also names this file."""
    key = error.field.removeprefix("--")
    for field, value in reversed(list(options_in(arguments))):
        if field.replace(f".{_INIT_ARGS}", "") == key:
            return error
        found = [each for name, each in _values(read_config(value)) if name == key] if field == "config" else []
        if found:
            return in_file(error, value, found[-1])
    return error


def _values(node: Any, field: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values below ``node``, with their keys in the format of jsonargparse's error messages."""
    if isinstance(node, list):
        for value in node:
            yield from _values(value, field)
    elif isinstance(node, dict):
        for key, value in node.items():
            name = field if key == _INIT_ARGS else f"{field}.{key}" if field else str(key)
            if key != _INIT_ARGS:
                yield name, value
            yield from _values(value, name)


def _with_line(error: Exception) -> str:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    mark, texts = error.problem_mark, (error.context, error.problem)
    return f"{', '.join(text for text in texts if text)} (line {mark.line + 1}, column {mark.column + 1})"
