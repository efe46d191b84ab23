"""JSONLLogger: ``metrics.jsonl``, one JSON object a row, readable while the run goes on."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from roomier.core.log import notice
from roomier.loggers.files import FileLogger, replacing


class JSONLLogger(FileLogger):
    """Appends ``{"step": 50, "time": 1767225600.123, "train_loss": 2.5}`` to ``<run folder>/metrics.jsonl``.

    ``step`` counts optimizer steps, ``time`` is the wall clock in seconds since 1970 (UTC). A metric that is
    itself called ``step`` or ``time`` is written as ``metric/step`` or ``metric/time``. JSON has no numbers that
    are not finite; they are written as the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"`` (the mapping
    Protocol Buffers chose), which ``float()`` and JavaScript's ``Number()`` turn back into numbers. Every row
    reaches the operating system before ``log_metrics`` returns, so a killed run loses none.
    """

    name = "jsonl"
    file_name = "metrics.jsonl"

    def _write_metrics(self, row: dict[str, float], step: int) -> None:
        assert self._file is not None, "start() comes first"
        cells: dict[str, Any] = {"step": step, "time": round(time.time(), 3)}
        for name, value in row.items():
            cells[f"metric/{name}" if name in ("step", "time") else name] = json_number(value)
        self._file.write(json.dumps(cells, allow_nan=False) + "\n")
        self._file.flush()

    def _take_over(self, resumed_step: int | None) -> None:
        if self._path.exists():
            drop_rows(self._path, resumed_step)


def json_number(value: float) -> float | str:
    """``value``, or the string that stands for it where JSON has no number."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def drop_rows(path: Path, after_step: int | None) -> None:
    """Rewrite ``path``, in one move, without torn rows and without rows whose step lies after ``after_step``."""
    num_torn = num_dropped = 0
    with path.open("rb") as rows:
        for row in rows:
            kind = _judge(row, after_step)
            num_torn += kind == "torn"
            num_dropped += kind == "dropped"
    if num_torn + num_dropped == 0:
        return
    with path.open("rb") as rows, replacing(path) as kept:
        for row in rows:
            if _judge(row, after_step) == "kept":
                kept.write(row.decode("utf-8"))
    if num_torn:
        notice(f"{path}: {num_torn} half-written row(s) of a run that was cut off left out")


def _judge(row: bytes, after_step: int | None) -> str:
    try:
        step = json.loads(row)["step"]
    except (ValueError, KeyError, TypeError):
        return "torn"
    if not row.endswith(b"\n") or not isinstance(step, int):
        return "torn"
    return "dropped" if after_step is not None and step > after_step else "kept"
