"""Options and tables that several benchmarks use."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from rich.table import Table

from roomier.core.errors import RoomierError, did_you_mean


def at_least(minimum: int) -> Callable[[str], int]:
    """Return the type of an option whose value is an integer of at least ``minimum``."""

    def count(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least {minimum}")
        return int(text)

    return count


def known(field: str, name: str, names: Collection[str]) -> str:
    """Return ``name``.

    Raises:
        RoomierError: ``names`` does not contain ``name``.
    """
    if name not in names:
        raise RoomierError(field, name, "is unknown", did_you_mean(name, names))
    return name


def chosen(field: str, text: str, names: Collection[str]) -> list[str]:
    """Return the names in ``text``, which are separated by commas, in the order of ``text``; all of ``names`` if
    ``text`` is empty.

    Raises:
        RoomierError: ``names`` does not contain a name.
    """
    return [known(field, each.strip(), names) for each in text.split(",") if each.strip()] or list(names)


def table_of(
    result: Mapping[str, Any], title: str, caption: str, left: Sequence[str], right: Sequence[str] = ()
) -> Table:
    """Return a table without rows, with the machine of ``result`` in its caption.

    Args:
        result: result of a benchmark.
        title: text above the table.
        caption: text below the table.
        left: headings of the first columns, which contain words.
        right: headings of the other columns, which contain numbers.
    """
    table = Table(title=title, caption=f"{caption}\n{result['machine']['cpu']}, torch {result['torch']}")
    for heading in left:
        table.add_column(heading)
    for heading in right:
        table.add_column(heading, justify="right")
    return table
