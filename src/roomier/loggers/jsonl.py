"""JSONLLogger: logger that writes ``metrics.jsonl``, which contains one JSON object per row and can be read during the
run."""

from __future__ import annotations

import json
import math
import time
from typing import Any

from roomier.api.logger import STEP_COLUMN
from roomier.core.untrusted import parse_json
from roomier.loggers.files import FileLogger, drop_rows


class JSONLLogger(FileLogger):
    """Logger that appends rows such as ``{"step": 50, "time": 1767225600.123, "train_loss": 2.5}`` to
    ``<run folder>/metrics.jsonl``.

    - ``step`` counts optimizer steps. ``time`` is the wall-clock time in seconds since 1970 (UTC).
    - A metric named ``step`` or ``time`` is written as ``metric/step`` or ``metric/time``.
    - JSON does not support non-finite numbers. Non-finite numbers are written as the strings ``"NaN"``, ``"Infinity"``
      and ``"-Infinity"`` (as in Protocol Buffers), which ``float()`` and JavaScript's ``Number()`` parse.
    - Each row is passed to the operating system before ``log_metrics`` returns, so no row is lost if the run is killed.

    Args:
        save_dir: see :class:`roomier.loggers.files.FileLogger`.
        name: see :class:`roomier.loggers.files.FileLogger`.
        version: see :class:`roomier.loggers.files.FileLogger`.
        prefix: see :class:`roomier.loggers.files.FileLogger`.

    Example:
        >>> trainer = roomier.Trainer(logger=JSONLLogger())
    """

    name = "jsonl"
    file_name = "metrics.jsonl"

    def _write_metrics(self, row: dict[str, float], step: int) -> None:
        assert self._file is not None, "start() must run first"
        cells: dict[str, Any] = {"step": step, "time": round(time.time(), 3)}
        for name, value in row.items():
            cells[f"metric/{name}" if name in ("step", "time") else name] = json_number(value)
        self._file.write(json.dumps(cells, allow_nan=False) + "\n")
        self._file.flush()

    def _prepare_file(self, resumed_step: int | None) -> None:
        if self._path.exists():
            drop_rows(self._path, lambda row: _judge(row, resumed_step))


def json_number(value: float) -> float | str:
    """Return ``value``, or the string that represents a non-finite number in JSON."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _judge(row: bytes, after_step: int | None) -> str:
    try:
        cells = parse_json(row.decode())
        step = cells["step"]
        done = next((int(cells[name]) for name in cells if name.endswith(STEP_COLUMN)), step)
    except (ValueError, KeyError, TypeError, AttributeError):
        return "torn"
    if not row.endswith(b"\n") or not isinstance(step, int):
        return "torn"
    return "dropped" if after_step is not None and done > after_step else "kept"
