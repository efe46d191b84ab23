"""CSVLogger: logger that writes ``metrics.csv``, a table for spreadsheets and pandas."""

from __future__ import annotations

import csv
import time
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from roomier.api.logger import STEP_COLUMN
from roomier.core.log import notice
from roomier.loggers.files import FileLogger, replacing

_FORMULA = ("=", "+", "-", "@")  # spreadsheets evaluate cells that start with one of these characters


class CSVLogger(FileLogger):
    """Logger that appends rows to ``<run folder>/metrics.csv``, with columns for ``step``, ``time`` and each metric.

    - ``step`` counts optimizer steps. ``time`` is the wall-clock time in seconds since 1970 (UTC).
    - A metric named ``step`` or ``time`` has the column ``metric/step`` or ``metric/time``.
    - If a name starts with ``=``, ``+``, ``-`` or ``@``, its column starts with ``'``, so that spreadsheets do not
      interpret the name as a formula.
    - The cell of a metric that was not logged in a row is empty. Non-finite numbers are written as ``nan``, ``inf`` and
      ``-inf``.
    - Columns appear in the order in which the metrics were first logged. If a new column appears, the file is rewritten
      atomically.

    Args:
        save_dir: see :class:`roomier.loggers.files.FileLogger`.
        name: see :class:`roomier.loggers.files.FileLogger`.
        version: see :class:`roomier.loggers.files.FileLogger`.
        prefix: see :class:`roomier.loggers.files.FileLogger`.
        flush_logs_every_n_steps: accepted for compatibility with Lightning, but ignored, because each row is written
            immediately.

    Example:
        >>> trainer = roomier.Trainer(logger=CSVLogger("logs", name="gpt"))
    """

    name = "csv"
    file_name = "metrics.csv"

    def __init__(
        self,
        save_dir: str | Path | None = None,
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 1,
    ) -> None:
        super().__init__(save_dir, name, version, prefix)
        self._columns: list[str] = []

    def _write_metrics(self, row: dict[str, float], step: int) -> None:
        assert self._file is not None, "start() must run first"
        cells: dict[str, Any] = {"step": step, "time": f"{time.time():.3f}"}
        for name, value in row.items():
            cells[f"metric/{name}" if name in ("step", "time") else _column(name)] = value
        new = [name for name in cells if name not in self._columns]
        if new:
            self._add_columns(new)
        csv.writer(self._file, lineterminator="\n").writerow([cells.get(name, "") for name in self._columns])
        self._file.flush()

    def _prepare_file(self, resumed_step: int | None) -> None:
        self._columns = ["step", "time"]
        if not self._path.exists() or not self._path.stat().st_size:
            self._rewrite([])
            return
        with self._path.open(encoding="utf-8", errors="replace", newline="") as file:
            lines = file.readlines()
        # A line without a newline is incomplete, even if it looks complete, because its write was interrupted.
        complete = [line for line in lines if line.endswith("\n")]
        self._columns, *rows = csv.reader(complete or ["step,time"])
        kept = [row for row in rows if len(row) == len(self._columns) and _step_of(row) is not None]
        num_torn = len(rows) - len(kept) + len(lines) - len(complete)
        if resumed_step is not None:
            kept = [row for row in kept if (self._step_of_run(row) or 0) <= resumed_step]
        self._rewrite(kept)
        if num_torn:
            notice(f"{self._path}: dropped {num_torn} incomplete row(s) from an interrupted run")

    def _step_of_run(self, row: list[str]) -> int | None:
        marked = [cell for name, cell in zip(self._columns, row, strict=True) if name.endswith(STEP_COLUMN) and cell]
        return int(float(marked[0])) if marked else _step_of(row)

    def _add_columns(self, names: list[str]) -> None:
        assert self._file is not None
        self._file.close()
        self._columns += names
        with self._path.open(encoding="utf-8", newline="") as file:
            rows = csv.reader(file)
            next(rows)
            self._rewrite(row + [""] * len(names) for row in rows)
        self._file = self._path.open("a", encoding="utf-8", newline="")

    def _rewrite(self, rows: Iterable[list[str]]) -> None:
        with replacing(self._path) as file:
            csv.writer(file, lineterminator="\n").writerows(chain([self._columns], rows))


def _column(name: str) -> str:
    return f"'{name}" if name.startswith(_FORMULA) else name


def _step_of(row: list[str]) -> int | None:
    try:
        return int(row[0])
    except (ValueError, IndexError):
        return None
