"""File loggers, which append rows to ``metrics.jsonl`` and ``metrics.csv``, and write the hyperparameter file."""

from __future__ import annotations

import csv
import json
import math
import re
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, TextIO

from roomier.api.logger import STEP_COLUMN
from roomier.core.log import notice
from roomier.core.replacing import replacing, replacing_path
from roomier.core.untrusted import lines_of, open_to_append, parse_json, read_text
from roomier.loggers.guarded import FolderLogger
from roomier.loggers.histogram import Histogram
from roomier.loggers.pixels import Pixels, png_of
from roomier.loggers.visuals import Visuals


def drop_rows(path: Path, judge: Callable[[bytes], str]) -> None:
    """Rewrite ``path`` atomically without the lines for which ``judge`` returns ``"dropped"`` or ``"torn"``. Print a
    notice if a line is torn, because its write was interrupted.

    Raises:
        OSError: see :func:`roomier.core.untrusted.lines_of`.
    """
    kinds = [judge(line) for line in lines_of(path)]
    if kinds.count("kept") < len(kinds):
        with replacing(path) as kept:
            kept.writelines(line.decode() for line, kind in zip(lines_of(path), kinds, strict=True) if kind == "kept")
    if num_torn := kinds.count("torn"):
        notice(f"{path}: dropped {num_torn} incomplete row(s) from an interrupted run")


def write_hyperparams(run_dir: Path, params: Mapping[str, Any], resumed_step: int | None = None) -> None:
    """Write ``hparams.json``. Values that JSON cannot represent are written as their ``repr``.

    A resumed run does not replace the file of the first run, because it does not use all new values. For example, the
    learning rate comes from the checkpoint. If the new values differ, they are written to ``hparams-from-step=N.json``,
    and a notice is printed.
    """
    text = json.dumps(with_names(dict(params)), indent=2, default=repr) + "\n"
    path = run_dir / "hparams.json"
    if resumed_step is not None and path.exists():
        if _contains(path, text):
            return
        path = run_dir / f"hparams-from-step={resumed_step}.json"
        if _contains(path, text):  # written by another logger of this run
            return
        notice(
            "the hyperparameters differ from the first run; hparams.json is unchanged, and the new values are in "
            f"{path.name}"
        )
    with replacing(path) as file:
        file.write(text)


def _contains(path: Path, text: str) -> bool:
    with suppress(OSError, ValueError):  # an unreadable file has another content
        return read_text(path) == text
    return False


def with_names(value: Any) -> Any:
    """Return ``value`` with dict keys that JSON cannot represent converted to strings."""
    if isinstance(value, dict):
        return {
            key if key is None or isinstance(key, (str, int, float)) else str(key): with_names(item)
            for key, item in value.items()
        }
    return [with_names(item) for item in value] if isinstance(value, (list, tuple)) else value


_NOT_IN_A_PATH = re.compile(r"[^\w.= -]")


class FileVisuals(Visuals):
    """Images as PNG files, listed in ``images.jsonl``, and histograms as rows of ``histograms.jsonl``.

    Args:
        folder: folder of these files.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__("files")
        self._folder = folder

    def images(self, key: str, images: Sequence[Pixels], captions: Sequence[str], step: int) -> None:
        place = "/".join(_NOT_IN_A_PATH.sub("_", part).lstrip(".") or "_" for part in key.split("/"))
        folder = self._folder / "images" / place
        folder.mkdir(parents=True, exist_ok=True)
        files = [f"step={step}{f'-{i}' * (len(images) > 1)}.png" for i in range(len(images))]
        for file, image in zip(files, images, strict=True):
            with replacing_path(folder / file) as aside:
                aside.write_bytes(png_of(image))
        row = {"files": [f"images/{place}/{file}" for file in files], "captions": list(captions)}
        self._append("images.jsonl", key, step, row)

    def histogram(self, key: str, histogram: Histogram, step: int) -> None:
        self._append("histograms.jsonl", key, step, asdict(histogram))

    def drop_after(self, step: int) -> None:
        """Remove the rows after ``step``, and incomplete rows."""
        for name in ("images.jsonl", "histograms.jsonl"):
            if (self._folder / name).exists():
                drop_rows(self._folder / name, lambda row: _judge(row, step))

    def _append(self, file_name: str, key: str, step: int, row: Mapping[str, Any]) -> None:
        with open_to_append(self._folder / file_name) as file:
            file.write(json.dumps({"step": step, "time": round(time.time(), 3), "name": key, **row}) + "\n")


class FileLogger(FolderLogger):
    """Base class of loggers that append rows to one file. A subclass defines the file name and the format of a row.

    Images are written to ``images/<name>/step=N.png`` and listed in ``images.jsonl``. Histograms are written to
    ``histograms.jsonl``, with their counts and edges.

    Args:
        save_dir: write to ``<save_dir>/<name>/<version>``, like Lightning's loggers; None writes to the run folder.
        name: folder within ``save_dir``.
        version: folder within ``name``; None creates a new ``version_N`` for each run. A resumed run uses the folder of
            the saved run.
        prefix: prefix of each metric's name. A ``-`` separates the prefix from the name.
    """

    file_name: ClassVar[str]
    is_added: bool = False
    """True if roomier added this logger to the loggers that the user passed."""
    _resumed_step: int | None = None
    _file: TextIO | None = None

    def start(self, run_dir: Path, resumed_step: int | None = None) -> None:
        """Open the file for appending. Incomplete rows and rows after ``resumed_step`` are removed atomically."""
        self._folder = self._find_folder(run_dir) or run_dir
        self._folder.mkdir(parents=True, exist_ok=True)
        self._resumed_step = resumed_step
        self._prepare_file(resumed_step)
        if resumed_step is not None:
            FileVisuals(self._folder).drop_after(resumed_step)
        self._file = open_to_append(self._path)

    def finalize(self, status: str) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write_hyperparams(self, params: dict[str, Any]) -> None:
        """Write ``hparams.json`` next to the rows. See :func:`write_hyperparams`."""
        write_hyperparams(self._path.parent, params, self._resumed_step)

    def _visuals(self) -> Visuals:
        return FileVisuals(self._path.parent)

    @property
    def _path(self) -> Path:
        assert self._folder is not None, "start() must run first"
        return self._folder / self.file_name

    @abstractmethod
    def _prepare_file(self, resumed_step: int | None) -> None:
        """Remove incomplete rows and rows after ``resumed_step`` from an existing file."""


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
    return value if math.isfinite(value) else json.dumps(value)


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
