"""Selections from large tables: ``make test`` runs a few values, and CI and ``make test-full`` run the others."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def covering(rows: Sequence[Any], columns: Sequence[Any], per_row: int = 1) -> list[Any]:
    """Return all pairs of ``rows`` and ``columns`` as parameters, most of which are marked slow.

    Each row is combined with ``per_row`` columns that are not slow. Consecutive rows start at consecutive columns, so
    every column is covered as well if there are at least as many rows as columns.
    """
    stride = max(1, len(columns) // per_row)
    params = []
    for i, row in enumerate(rows):
        chosen = {(i + turn * stride) % len(columns) for turn in range(per_row)}
        for j, column in enumerate(columns):
            marks = () if j in chosen else pytest.mark.slow
            params.append(pytest.param(row, column, marks=marks, id=f"{_name(row)}-{_name(column)}"))
    return params


def few(values: Iterable[Any], count: int = 1) -> list[Any]:
    """Return ``values`` as parameters. All except the first ``count`` values that are not slow are marked ``more``."""
    params = []
    for value in values:
        has_marks = hasattr(value, "marks")
        if has_marks and value.marks:
            params.append(value)
        elif count > 0:
            params.append(value)
            count -= 1
        else:
            unpacked = value.values if has_marks else value if isinstance(value, tuple) else (value,)
            params.append(pytest.param(*unpacked, marks=pytest.mark.more, id=value.id if has_marks else None))
    return params


def chosen(values: Iterable[str], names: Collection[str]) -> list[Any]:
    """Return ``values`` as parameters. All values that are not in ``names`` are marked ``more``."""
    values = list(values)
    assert set(names) <= set(values)
    return [pytest.param(value, marks=() if value in names else pytest.mark.more) for value in values]


def _name(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return " on ".join(str(each) for each in value[:2])
    return str(getattr(value, "__name__", value))
