"""Forecast and truth of a run as one value, kept in its folder as ``forecast.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from roomier.core.errors import RoomierError
from roomier.core.units import format_bytes
from roomier.hardware.machine import Device, Link, Machine
from roomier.loggers.files import replacing
from roomier.memory.kinds import Kind
from roomier.memory.tracker import MemoryTracker
from roomier.plan import Plan
from roomier.planner.dry_runs.dry_run import Stretch, stretches_of
from roomier.planner.forecast import Forecast, StepTime

FILE_NAME = "forecast.json"
_FORMAT = 1


def moment_text(phase: str, place: str) -> str:
    """Where in a step, in words: ``"backward of blocks.3"``."""
    if phase == "rest":
        return "the start of the step"
    return f"{phase} of {place}" if place else phase


@dataclass(frozen=True)
class Measured:
    """A step of one rank that was tracked.

    Attributes:
        timeline: of the step; of ranks that hold less than the fullest, its peak alone.
        allocator_bytes: the most that CUDA's allocator had given out in it; None on other devices.
        reserved_bytes: the most that it had from the device.
        beside_bytes: what else of the device was in use, other programs' among it.
    """

    rank: int
    timeline: tuple[Stretch, ...]
    allocator_bytes: int | None = None
    reserved_bytes: int | None = None
    beside_bytes: int | None = None

    @classmethod
    def of(cls, rank: int, tracker: MemoryTracker) -> Measured:
        """What ``tracker`` saw of a step."""
        timeline = tuple(stretches_of(tracker.moments()))
        allocator = (tracker.allocator_peak_bytes, tracker.reserved_peak_bytes, tracker.beside_bytes)
        return cls(rank, timeline, *allocator)

    @property
    def peak(self) -> Stretch:
        return max(self.timeline, key=lambda each: each.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """What the step took: by the allocator where there is one, else all tensors together."""
        return self.peak.peak_bytes if self.allocator_bytes is None else self.allocator_bytes


@dataclass(frozen=True)
class Record:
    """What was forecast for a run, and what a step of it took.

    Attributes:
        forecast: of the rank that needs the most.
        step: which one was tracked, from 1.
        ranks: by rank.
        budget_bytes: what a device was to hold; None where nobody said.
        source: ``"planned"``: forecast when the run chose its plan; ``"dry run"``: for the plan it had.
        notes: what to know of the figures.
        num_parameters: of the model as it was given; None where it was not kept.
    """

    forecast: Forecast
    step: int
    ranks: tuple[Measured, ...]
    budget_bytes: int | None = None
    source: str = "planned"
    notes: tuple[str, ...] = ()
    num_parameters: int | None = None

    @property
    def worst(self) -> Measured:
        """The rank that held the most."""
        return max(self.ranks, key=lambda each: each.peak_bytes)

    @property
    def forecast_bytes(self) -> int:
        """What is held against :attr:`measured_bytes`: tensors. A device's context, say, is in no allocator's count."""
        return self.forecast.tensor_bytes

    @property
    def measured_bytes(self) -> int:
        return self.worst.peak_bytes

    @property
    def error(self) -> float:
        """How much the forecast was too high, as a share of what was measured."""
        return self.forecast_bytes / self.measured_bytes - 1 if self.measured_bytes else 0.0

    @property
    def error_text(self) -> str:
        """``"+0.6 %"``; what is below half a tenth of a percent has no sign."""
        rounded = round(self.error, 3)
        return f"{rounded:+.1%}".replace("%", " %") if rounded else "0.0 %"

    def line(self) -> str:
        """Forecast and truth in one line."""
        peak = self.worst.peak
        where = moment_text(peak.phase, peak.place)
        return (
            f"memory: forecast {format_bytes(self.forecast_bytes, 2)}, measured "
            f"{format_bytes(self.measured_bytes, 2)} at {where} ({self.error_text})"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain data, from which :func:`record_from` makes this value again."""
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
                    "reserved_bytes": each.reserved_bytes,
                    "beside_bytes": each.beside_bytes,
                    "peak_at": {"phase": each.peak.phase, "place": each.peak.place},
                    "bytes_by_kind": _kinds_dict(each.peak.peak),
                    "timeline": _timeline_dict(each.timeline if each is worst else (each.peak,)),
                }
                for each in self.ranks
            ],
        }

    def write(self, folder: Path) -> Path:
        """Into ``forecast.json`` in ``folder``, in one move.

        Raises:
            OSError: it cannot be written.
        """
        path = folder / FILE_NAME
        with replacing(path) as file:
            json.dump(self.as_dict(), file)
            file.write("\n")
        return path


def read_record(folder: Path) -> Record:
    """What :meth:`Record.write` wrote into ``folder``.

    Raises:
        RoomierError: there is nothing, or it cannot be read.
    """
    path = folder / FILE_NAME
    action = "Run it again with Trainer(callbacks=[roomier.callbacks.MemoryForecast()])"
    if not path.is_file():
        problem = f"has no {FILE_NAME}: no forecast was held against a measured step in this run"
        raise RoomierError("run", str(folder), problem, action)
    try:
        return record_from(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"cannot be read ({type(error).__name__}: {error})"
        raise RoomierError("run", str(path), problem, f"{action}: it is damaged, or another version's") from error


def record_from(data: Mapping[str, Any]) -> Record:
    """The record of which ``data`` is :meth:`Record.as_dict`.

    Raises:
        ValueError, KeyError, TypeError: it is something else.
    """
    if data["format"] != _FORMAT:
        raise ValueError(f"format {data['format']}, not {_FORMAT}")
    told, machine = data["forecast"], data["machine"]
    forecast = Forecast(
        plan=Plan.of(told["plan"]),
        machine=_machine_from(machine),
        micro_batch=told["micro_batch"],
        method=told["method"],
        timeline=_timeline_from(told["timeline"]),
        fixed_bytes=told["fixed_bytes"],
        host_bytes=told["host_bytes"],
        time=_time_from(told["time"]),
    )
    ranks = tuple(
        Measured(
            each["rank"],
            _timeline_from(each["timeline"]),
            each["allocator_bytes"],
            each.get("reserved_bytes"),
            each.get("beside_bytes"),
        )
        for each in data["measured"]
    )
    if not (ranks and forecast.timeline and all(each.timeline for each in ranks)):
        raise ValueError("no step was measured")
    return Record(
        forecast=forecast,
        step=data["step"],
        ranks=ranks,
        budget_bytes=data["budget_bytes"],
        source=data["source"],
        notes=tuple(data["notes"]),
        num_parameters=data.get("num_parameters"),
    )


def _machine_from(told: Mapping[str, Any]) -> Machine:
    kinds: dict[str, Any] = {"Device": Device, "Link": Link}
    types = {field.name: str(field.type) for field in fields(Machine)}
    return Machine(
        **{name: kinds[types[name]](**value) if types[name] in kinds else value for name, value in told.items()}
    )


def _time_from(told: Mapping[str, Any] | None) -> StepTime | None:
    return None if told is None else StepTime(**told)


def _kinds_dict(num_bytes: Mapping[Kind, int]) -> dict[str, int]:
    return {kind.value: count for kind, count in num_bytes.items() if count}


def _timeline_dict(timeline: Sequence[Stretch]) -> list[dict[str, Any]]:
    """A stretch begins as the one before ended, so its beginning is written where it does not only."""
    found, before = [], None
    for each in timeline:
        told = {"phase": each.phase, "place": each.place, "peak": _kinds_dict(each.peak), "end": _kinds_dict(each.end)}
        begin = _kinds_dict(each.begin)
        found.append(told if begin == before else {"begin": begin, **told})
        before = told["end"]
    return found


def _kinds_from(told: Mapping[str, int]) -> dict[Kind, int]:
    return {**dict.fromkeys(Kind, 0), **{Kind(name): int(count) for name, count in told.items()}}


def _timeline_from(told: Sequence[Mapping[str, Any]]) -> tuple[Stretch, ...]:
    found: list[Stretch] = []
    end: dict[Kind, int] = {}
    for each in told:
        begin, peak, end_now = (_kinds_from(each[key]) if key in each else end for key in ("begin", "peak", "end"))
        found.append(Stretch(str(each["phase"]), str(each["place"]), begin, peak, end_now))
        end = end_now
    return tuple(found)
