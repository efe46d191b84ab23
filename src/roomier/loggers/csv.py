"""CSVLogger: logger that writes ``metrics.csv``, a table for spreadsheets and pandas."""

from __future__ import annotations

import csv
import time
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from roomier.api.logger import STEP_COLUMN
from roomier.core.replacing import replacing
from roomier.core.untrusted import lines_of, open_to_append
from roomier.loggers.files import FileLogger, drop_rows

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
        self._columns = []
        if self._path.exists():
            drop_rows(self._path, lambda line: self._judge(line, resumed_step))
        if not self._columns:
            self._columns = ["step", "time"]
            self._rewrite([])

    def _judge(self, line: bytes, resumed_step: int | None) -> str:
        try:
            # A line without a newline is incomplete, even if it looks complete, because its write was interrupted.
            row = next(csv.reader([line.decode()])) if line.endswith(b"\n") else []
            if not self._columns:
                self._columns = row
                return "kept" if row else "torn"
            marked = [cell for name, cell in zip(self._columns, row, strict=True) if name.endswith(STEP_COLUMN)]
            step = int(row[0])
            done = next((int(float(cell)) for cell in marked if cell), step)
        except (ValueError, OverflowError, csv.Error):
            return "torn"
        return "dropped" if resumed_step is not None and done > resumed_step else "kept"

    def _add_columns(self, names: list[str]) -> None:
        assert self._file is not None
        self._file.close()
        self._columns += names
        rows = csv.reader(line.decode() for line in lines_of(self._path))
        next(rows)
        self._rewrite(row + [""] * len(names) for row in rows)
        self._file = open_to_append(self._path)

    def _rewrite(self, rows: Iterable[list[str]]) -> None:
        with replacing(self._path) as file:
            csv.writer(file, lineterminator="\n").writerows(chain([self._columns], rows))


def _column(name: str) -> str:
    return f"'{name}" if name.startswith(_FORMULA) else name
