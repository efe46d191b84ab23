"""Metrics, settings and memory of a finished, killed or active run, read from its run folder."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roomier.core.errors import RoomierError
from roomier.core.untrusted import lines_of, parse_json, read_json
from roomier.plan.text import read_file
from roomier.planner.measured.record import FILE_NAME, ForecastRecord, read_record

METRICS, _HYPERPARAMETERS, _PLAN = "metrics.jsonl", "hparams.json", "plan.yaml"
RATES = ("samples_per_s", "tokens_per_s", "model_flops_per_s", "mfu")
"""Metrics that the callback Throughput logs."""
MEMORY = ("bytes", "anatomy/", "DeviceStatsMonitor")
"""Substrings that identify metrics of memory and devices."""
_LARGEST = 1e100  # larger values are drawn as gaps, because their differences could overflow
_NO_CURVE = ("step", "time", "epoch")


@dataclass(frozen=True)
class RunLog:
    """Content of a run folder. If a file is missing, its attributes are empty.

    Attributes:
        folder: run folder.
        name: path of the folder without the part that all compared runs share.
        curves: values by metric and step, including non-finite values.
        settings: values as text, by file and name. Missing files have no key.
        logged_s: time between the first and the last row in seconds.
        record: forecast and measured memory; None if the run has no readable ``forecast.json``.
    """

    folder: Path
    name: str
    curves: Mapping[str, Mapping[int, float]]
    settings: Mapping[str, Mapping[str, str]]
    logged_s: float
    record: ForecastRecord | None

    @property
    def num_steps(self) -> int:
        """The last step in the log; 0 if no row exists."""
        return max((max(curve) for curve in self.curves.values()), default=0)

    def last(self, metric: str) -> float | None:
        """Return the last value of ``metric``; None if the metric was not logged."""
        curve = self.curves.get(metric)
        return curve[max(curve)] if curve else None

    @property
    def rates(self) -> dict[str, float]:
        """The last throughput that the run logged, by metric."""
        return {name: value for name in RATES if (value := self.last(name)) is not None and math.isfinite(value)}

    @property
    def peak_bytes(self) -> float | None:
        """Measured peak memory of a device; None if no callback measured it."""
        if self.record is not None:
            return self.record.measured_bytes
        peaks = [self.curves[name].values() for name in self.curves if name.endswith("allocated_bytes.all.peak")]
        return max((value for values in peaks for value in values if math.isfinite(value)), default=None)


def read_logs(folders: Sequence[Path]) -> list[RunLog]:
    """Return the logs of ``folders``. The names of the runs are relative to the common parent of the folders.

    Raises:
        RoomierError: a file with metrics cannot be read.
    """
    paths = [folder.resolve().parts for folder in folders]
    num_shared = 0
    while all(len(path) > num_shared + 1 and path[num_shared] == paths[0][num_shared] for path in paths):
        num_shared += 1
    return [_read(folder, "/".join(path[num_shared:])) for folder, path in zip(folders, paths, strict=True)]


def differences(logs: Sequence[RunLog]) -> dict[str, dict[str, list[str]]]:
    """Return the settings whose values differ between runs, with the names of the runs for each value. Runs without the
    file of a setting are omitted."""
    found: dict[str, dict[str, list[str]]] = {}
    for file in (_HYPERPARAMETERS, _PLAN):
        known = [log for log in logs if file in log.settings]
        for name in dict.fromkeys(name for log in known for name in log.settings[file]):
            values: dict[str, list[str]] = {}
            for log in known:
                values.setdefault(log.settings[file].get(name, "not set"), []).append(log.name)
            if len(values) > 1:
                found[f"plan.{name}" if file == _PLAN else name] = values
    return found


def metrics_of(logs: Sequence[RunLog]) -> list[str]:
    """Return the metrics of all runs in display order: the loss, validation metrics, other losses, other metrics,
    throughput, memory and devices."""
    return sorted(dict.fromkeys(name for log in logs for name in log.curves), key=lambda name: (group_of(name), name))


def group_of(metric: str) -> int:
    """Return the position of a metric's group in :func:`metrics_of`: 4 is throughput, 5 is memory and devices."""
    if metric in RATES:
        return 4
    if any(part in metric for part in MEMORY):
        return 5
    return 0 if metric == "loss" else 1 if metric.startswith("val") else 2 if "loss" in metric else 3


def drawable(value: float) -> bool:
    """Return whether ``value`` can be drawn. All other values appear as gaps."""
    return abs(value) <= _LARGEST  # False for NaN


def _read(folder: Path, name: str) -> RunLog:
    curves: dict[str, dict[int, float]] = {}
    times: list[float] = []
    path = folder / METRICS
    if path.exists():
        try:
            for row in _rows(path):
                step = row.get("step")
                if isinstance(step, int) and 0 <= step < 2**53:
                    if isinstance(row.get("time"), float):
                        times = [*times[:1], row["time"]]
                    for metric, value in row.items():
                        if metric not in _NO_CURVE and (number := _number(value)) is not None:
                            curves.setdefault(metric, {})[step] = number
        except OSError as error:
            raise RoomierError("run", str(path), f"cannot be read: {error.strerror}", "Move the file") from None
    settings: dict[str, dict[str, str]] = {}
    for file, load in ((_HYPERPARAMETERS, read_json), (_PLAN, read_file)):
        with suppress(OSError, ValueError):  # missing or corrupt
            settings[file] = dict(_flat(load(folder / file)))
    record = None
    if (folder / FILE_NAME).is_file():
        with suppress(RoomierError):
            record = read_record(folder)
    return RunLog(folder, name, curves, settings, times[-1] - times[0] if times else 0.0, record)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    for line in lines_of(path):
        with suppress(ValueError):  # the last row of an active or killed run can be incomplete
            row = parse_json(line)
            if isinstance(row, dict):
                yield row


def _number(value: object) -> float | None:
    """Return a logged value as a number; None if it is not a number. Non-finite numbers are strings in JSON."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    if isinstance(value, str) and value not in ("NaN", "Infinity", "-Infinity"):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _flat(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, element in value.items():
            yield from _flat(element, f"{name}.{key}" if name else str(key))
    elif name:
        yield name, "none" if value is None else str(value)
