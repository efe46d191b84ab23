"""Conversion of docstrings and values to Markdown."""

import json
import re
from collections.abc import Iterable, Sequence

_ROLE = re.compile(r":\w+:`~?([^`]+)`")


def markdown(text: str) -> str:
    """Return the text of a docstring as Markdown: roles of Sphinx and double backticks become code."""
    return _ROLE.sub(r"`\1`", text).replace("``", "`").strip()


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. The cells are Markdown."""
    lines = [header, ["---"] * len(header), *([_cell(each) for each in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def code(value: object) -> str:
    """Return a Python value as code, in which text has double quotes."""
    return f"`{json.dumps(value) if isinstance(value, str) else repr(value)}`"


def sentence(text: str) -> str:
    """Return ``text`` with an uppercase first letter, unless it begins with code."""
    return text[:1].upper() + text[1:]
