"""Functions that read and check the YAML files of ``--config`` and add file names to errors about their values."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from roomier.cli.explain import in_file
from roomier.core.errors import RoomierError
from roomier.core.paths import check_path
from roomier.core.untrusted import MAX_YAML_BYTES, read_text
from roomier.core.yaml_text import ExpansionError, UniqueKeysLoader, check_aliases

_ACTION = "Pass a YAML file. `--print_config` prints a template"
_INIT_ARGS = "init_args"
_SECTIONS = ("trainer", "model", "data")


def read_config(path: str) -> dict[str, Any]:
    """Read a YAML file of options.

    Raises:
        RoomierError: the file cannot be read, is not YAML, or does not contain a mapping of options.
    """
    content = _read_yaml("config", path)
    if not isinstance(content, dict):
        kind = "is empty" if content is None else f"contains a {type(content).__name__}"
        problem = f"must contain a mapping of options, but {kind}"
        raise RoomierError("config", path, problem, "Use sections, such as trainer: {max_steps: 100}")
    trainer = content.get("trainer")
    if trainer is not None and not isinstance(trainer, (dict, str)):  # a string is the path of a separate file
        action = "Pass the options of the section as a mapping, such as trainer: {max_steps: 100}"
        raise RoomierError("trainer", trainer, f"must be a mapping, in {path}", action)
    return content


def _read_yaml(field: str, path: str) -> Any:
    check_path(field, path)
    try:
        return yaml.load(read_text(path, MAX_YAML_BYTES), Loader=UniqueKeysLoader)
    except OSError as error:
        raise RoomierError(field, path, f"cannot be read: {error.strerror}", _ACTION) from None
    except (ValueError, yaml.YAMLError) as error:  # a ValueError is raised for invalid UTF-8 or an invalid date
        raise RoomierError(field, path, f"is not YAML: {_with_line(error)}", _ACTION) from None


@dataclass
class Option:
    """One option of the command line.

    Attributes:
        words: the words of the command line.
        field: name of the option, without ``--``.
        value: value of the option; empty if there is none.
        content: for ``--config``, the content of the file.
    """

    words: list[str]
    field: str
    value: str
    content: dict[str, Any] | None = None


def options_in(arguments: Sequence[str]) -> list[Option]:
    """Return the options in ``arguments``. An option is ``--field value`` or ``--field=value``.

    Raises:
        RoomierError: a ``--config`` file cannot be read.
    """
    found: list[Option] = []
    for word in arguments:
        if word.startswith("--"):
            field, _, value = word[2:].partition("=")
            found.append(Option([word], field.removesuffix("+"), value))
        elif found and len(found[-1].words) == 1 and "=" not in found[-1].words[0]:
            found[-1].words.append(word)
            found[-1].value = word
        else:
            found.append(Option([word], "", word))
    for option in found:
        if option.field == "config":
            option.content = read_config(option.value)
    return found


def check_texts(options: Sequence[Option]) -> None:
    """Check the YAML in the options and in the strings of the ``--config`` files.

    Raises:
        RoomierError: a text has aliases that expand to too many values, or names a file that cannot be read.
    """
    for option in options:
        texts = [(option.field, option.value)] if option.content is None else []
        texts += [(name, values[own]) for name, values, own in _values(option.content)]
        for name, text in texts:
            try:
                check_aliases(text if isinstance(text, str) else "")
            except ExpansionError as error:
                raise RoomierError(name, text, error.problem or "", "Write the values without aliases") from None
            # jsonargparse opens the file of a section, and tries to open the file of any other option.
            if isinstance(text, str) and os.path.exists(text):
                if name in _SECTIONS and not os.path.isdir(text):
                    _read_yaml(name, text)
                elif Path(text).is_fifo():
                    raise RoomierError(name, text, "is a pipe", "Pass a regular file")


def naming_file(error: RoomierError, options: Sequence[Option]) -> RoomierError:
    """Return ``error``. If a ``--config`` file contains the invalid value, the error also names this file."""
    key = error.field.removeprefix("--")
    for option in reversed(options):
        if option.field.replace(f".{_INIT_ARGS}", "") == key:
            return error
        found = [values[own] for name, values, own in _values(option.content) if name == key]
        if found:
            return in_file(error, option.value, found[-1])
    return error


def remove(options: list[Option], error: RoomierError) -> bool:
    """Remove the invalid value that ``error`` names from ``options``, so that the other options can be checked.

    Returns:
        False if no option contains the value.
    """
    key = error.field.removeprefix("--")
    for name in (f"{key}.{error.received}", key):
        for option in reversed(options):
            for full, values, own in _values(option.content):
                if full == name:
                    del values[own]
                    write_content(option)
                    return True
            if option.field.replace(f".{_INIT_ARGS}", "") == name:
                options.remove(option)
                return True
    return False


def write_content(option: Option) -> None:
    """Replace the file of a ``--config`` option with the text of ``option.content``."""
    option.words = ["--config", yaml.safe_dump(option.content)]


def _values(node: Any, field: str = "") -> Iterator[tuple[str, dict[Any, Any], Any]]:
    """Yield the values below ``node``: the key of each value in the format of jsonargparse's error messages, the dict
    that contains the value, and its key there."""
    if isinstance(node, list):
        for value in node:
            yield from _values(value, field)
    elif isinstance(node, dict):
        for key, value in node.items():
            name = field if key == _INIT_ARGS else f"{field}.{key}" if field else str(key)
            if key != _INIT_ARGS:
                yield name, node, key
            yield from _values(value, name)


def _with_line(error: Exception) -> str:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    mark, texts = error.problem_mark, (error.context, error.problem)
    return f"{', '.join(text for text in texts if text)} (line {mark.line + 1}, column {mark.column + 1})"
