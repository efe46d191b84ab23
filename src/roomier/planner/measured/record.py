"""Record of the forecast and the measured memory of a run, stored as ``forecast.json`` in the run folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from roomier.core.errors import RoomierError
from roomier.core.replacing import replacing
from roomier.core.units import format_bytes
from roomier.core.untrusted import read_json
from roomier.plan import Plan
from roomier.planner.dry_runs.dry_run import intervals_of
from roomier.planner.forecast import Forecast, StepTime, Traffic
from roomier.planner.hardware.machine import Device, Link, Machine
from roomier.planner.memory.kinds import Interval, Kind
from roomier.planner.memory.tracker import MemoryTracker
from roomier.storage.remote_path import StorageError

FILE_NAME = "forecast.json"
_FORMAT = 1
_PLAIN = ("micro_batch", "method", "fixed_bytes", "host_bytes", "pinned_bytes", "disk_bytes", "remark")


def moment_text(phase: str, place: str) -> str:
    """Return a description of a point in a step, for example ``"backward of blocks.3"``."""
    if phase == "rest":
        return "the start of the step"
    return f"{phase} of {place}" if place else phase


@dataclass(frozen=True)
class TrackedRank:
    """The tracked step of one rank.

    Attributes:
        rank: number of the rank.
        timeline: intervals of the step. Only the rank with the highest memory use stores all of them, the others only
            the peak.
        allocator_bytes: peak of the allocated bytes according to CUDA's caching allocator; None on other devices.
    """

    rank: int
    timeline: tuple[Interval, ...]
    allocator_bytes: int | None = None

    @classmethod
    def of(cls, rank: int, tracker: MemoryTracker) -> TrackedRank:
        """Return the step that ``tracker`` recorded."""
        return cls(rank, tuple(intervals_of(tracker.moments())), tracker.allocator_peak_bytes)

    @property
    def peak(self) -> Interval:
        """Interval with the largest total size of tensors."""
        return max(self.timeline, key=lambda each: each.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """Peak of the step according to the allocator if an allocator reports it, otherwise the peak of all tensors."""
        return self.peak.peak_bytes if self.allocator_bytes is None else self.allocator_bytes


@dataclass(frozen=True)
class ForecastRecord:
    """The forecast of a run, and the memory of one of its steps.

    Attributes:
        forecast: forecast for the rank that requires the most memory.
        step: number of the tracked step, starting with 1.
        ranks: measurement of each rank.
        budget_bytes: memory that a device may use; None if no budget is set.
        source: ``"planned"`` if the planner chose the plan of the run, ``"dry run"`` if the plan was given.
        notes: remarks on the measurements.
        num_parameters: number of parameters in the original model; None if it was not stored.
    """

    forecast: Forecast
    step: int
    ranks: tuple[TrackedRank, ...]
    budget_bytes: int | None = None
    source: str = "planned"
    notes: tuple[str, ...] = ()
    num_parameters: int | None = None

    @property
    def worst(self) -> TrackedRank:
        """Measurement of the rank that used the most memory."""
        return max(self.ranks, key=lambda each: each.peak_bytes)

    @property
    def forecast_bytes(self) -> int:
        """Forecast peak that is compared with :attr:`measured_bytes`: the size of the tensors and, if the measurement
        is from CUDA's allocator, the workspaces of cuBLAS. The allocator reports no other memory in addition to
        tensors."""
        is_allocated = self.worst.allocator_bytes is not None
        return self.forecast.tensor_bytes + (self.forecast.fixed_bytes.get("workspace", 0) if is_allocated else 0)

    @property
    def measured_bytes(self) -> int:
        """Measured peak of the rank that used the most memory, in bytes."""
        return self.worst.peak_bytes

    @property
    def error(self) -> float:
        """Forecast minus measurement, as a fraction of the measurement."""
        return self.forecast_bytes / self.measured_bytes - 1 if self.measured_bytes else 0.0

    @property
    def error_text(self) -> str:
        """The error as text, such as ``"+0.6 %"``. An error that rounds to 0 has no sign."""
        rounded = round(self.error, 3)
        return f"{rounded:+.1%}".replace("%", " %") if rounded else "0.0 %"

    def line(self) -> str:
        """Return the forecast and the measurement as one line of text."""
        peak = self.worst.peak
        where = moment_text(peak.phase, peak.place)
        return (
            f"memory: forecast {format_bytes(self.forecast_bytes, 2)}, measured "
            f"{format_bytes(self.measured_bytes, 2)} at {where} ({self.error_text})"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the record as plain data, from which :func:`record_from` restores it."""
        worst = self.worst
        return {
            "format": _FORMAT,
            "strategy": self.forecast.plan.parallel.strategy,
            "forecast_bytes": self.forecast_bytes,
            "measured_bytes": self.measured_bytes,
            "error": self.error,
            "step": self.step,
            "source": self.source,
            "budget_bytes": self.budget_bytes,
            "worst_rank": worst.rank,
            "notes": list(self.notes),
            "num_parameters": self.num_parameters,
            "forecast": {**self.forecast.as_dict(), "timeline": _timeline_dict(self.forecast.timeline)},
            "machine": asdict(self.forecast.machine),
            "measured": [
                {
                    "rank": each.rank,
                    "peak_bytes": each.peak_bytes,
                    "allocator_bytes": each.allocator_bytes,
                    "peak_at": {"phase": each.peak.phase, "place": each.peak.place},
                    "bytes_by_kind": _kinds_dict(each.peak.peak),
                    "timeline": _timeline_dict(each.timeline if each is worst else (each.peak,)),
                }
                for each in self.ranks
            ],
        }

    def write(self, folder: Path) -> Path:
        """Write ``forecast.json`` in ``folder`` atomically, and return its path.

        Raises:
            OSError: the file cannot be written.
        """
        path = folder / FILE_NAME
        with replacing(path) as file:
            json.dump(self.as_dict(), file)
            file.write("\n")
        return path


def read_record(folder: Path) -> ForecastRecord:
    """Read the record that :meth:`Record.write` wrote to ``folder``.

    Raises:
        RoomierError: the file is missing or cannot be read.
    """
    path = folder / FILE_NAME
    action = "Repeat the run with Trainer(callbacks=[roomier.callbacks.MemoryForecast()])"
    if not path.exists():
        problem = f"has no {FILE_NAME}, because the run compared no forecast with a measured step"
        raise RoomierError("run", str(folder), problem, action)
    try:
        return record_from(read_json(path))
    except StorageError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"cannot be read ({type(error).__name__}: {error})"
        raise RoomierError("run", str(path), f"{problem}, so it is damaged or from another version", action) from error


def record_from(data: Mapping[str, Any]) -> ForecastRecord:
    """Restore the record from ``data``, the result of :meth:`Record.as_dict`.

    Raises:
        ValueError: the format version is different, or a value is invalid.
        KeyError: a key is missing.
        TypeError: a value has the wrong type.
    """
    if data["format"] != _FORMAT:
        raise ValueError(f"format {data['format']}, not {_FORMAT}")
    stored = data["forecast"]
    forecast = Forecast(
        plan=Plan.of(stored["plan"]),
        machine=_machine_from(data["machine"]),
        timeline=_timeline_from(stored["timeline"]),
        time=None if stored["time"] is None else StepTime(**stored["time"]),
        traffic=Traffic(**stored.get("traffic", {})),
        **{name: stored[name] for name in _PLAIN if name in stored},
    )
    ranks = tuple(
        TrackedRank(each["rank"], _timeline_from(each["timeline"]), each.get("allocator_bytes"))
        for each in data["measured"]
    )
    if not (ranks and forecast.timeline and all(each.timeline for each in ranks)):
        raise ValueError("contains no measured step")
    return ForecastRecord(
        forecast=forecast,
        step=data["step"],
        ranks=ranks,
        budget_bytes=data["budget_bytes"],
        source=data["source"],
        notes=tuple(data["notes"]),
        num_parameters=data.get("num_parameters"),
    )


def _machine_from(stored: Mapping[str, Any]) -> Machine:
    made: dict[str, Any] = {
        name: Link(**each) if isinstance(each, Mapping) else each for name, each in stored.items() if name != "device"
    }
    return Machine(device=Device(**stored["device"]), **made)


def _kinds_dict(num_bytes: Mapping[Kind, int]) -> dict[str, int]:
    return {kind.value: count for kind, count in num_bytes.items() if count}


def _timeline_dict(timeline: Sequence[Interval]) -> list[dict[str, Any]]:
    """Return ``timeline`` as plain data. ``begin`` is stored only if it differs from the end of the previous
    interval."""
    found, before = [], None
    for each in timeline:
        entry = {"phase": each.phase, "place": each.place, "peak": _kinds_dict(each.peak), "end": _kinds_dict(each.end)}
        begin = _kinds_dict(each.begin)
        found.append(entry if begin == before else {"begin": begin, **entry})
        before = entry["end"]
    return found


def _kinds_from(stored: Mapping[str, int]) -> dict[Kind, int]:
    return {**dict.fromkeys(Kind, 0), **{Kind(name): int(count) for name, count in stored.items()}}


def _timeline_from(stored: Sequence[Mapping[str, Any]]) -> tuple[Interval, ...]:
    found: list[Interval] = []
    end: dict[Kind, int] = {}
    for each in stored:
        begin, peak, end_now = (_kinds_from(each[key]) if key in each else end for key in ("begin", "peak", "end"))
        found.append(Interval(str(each["phase"]), str(each["place"]), begin, peak, end_now))
        end = end_now
    return tuple(found)
