"""The tables of ``docs/seeds.md``, whose columns ``forecast`` and ``fits`` are generated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_NUM_COLUMNS = 5  # columns: configuration, published, forecast, fits, difference


def generated_cells(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return the cells ``forecast`` and ``fits`` for a row of ``roomier bench seeds``."""
    if row["answer"]:
        return "", "rejected"
    return f"{row['forecast_mib']:,.0f}", "yes" if row["fits"] else "no"


def documented_cells(text: str) -> dict[str, tuple[str, str]]:
    """Return the cells ``forecast`` and ``fits`` of each configuration in the tables of ``text``."""
    return {cells[0]: (cells[2], cells[3]) for cells in map(_cells, text.splitlines()) if len(cells) == _NUM_COLUMNS}


def with_current_cells(text: str, rows: Iterable[Mapping[str, Any]]) -> str:
    """Return ``text`` with the generated cells of ``rows``. Other lines and cells do not change."""
    found = {row["what"]: generated_cells(row) for row in rows}
    lines = []
    for line in text.splitlines():
        cells = _cells(line)
        if len(cells) == _NUM_COLUMNS and cells[0] in found:
            line = "| " + " | ".join([*cells[:2], *found[cells[0]], cells[4]]).rstrip() + " |"
        lines.append(line)
    return "\n".join(lines) + "\n"


def _cells(line: str) -> list[str]:
    if not line.startswith("|"):
        return []
    return [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]
