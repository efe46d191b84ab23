"""Values that the heartbeats of the ranks exchange, as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Self


class Activity(StrEnum):
    """Kind of the present activity of a rank; it decides how long the other ranks wait.

    Attributes:
        STEP: a step, or the data of one. A late rank is reported, and then the run ends.
        LONG: an activity that may take long on one rank. A late rank is noted in one line.
        OUTSIDE: the rank is outside of a run. As ``LONG``, but a silent rank is ignored: its process may have ended.
        DEBUGGED: a debugger is attached. A late rank is ignored.
    """

    STEP = "step"
    LONG = "long"
    OUTSIDE = "outside"
    DEBUGGED = "debugged"


@dataclass(frozen=True)
class Position:
    """Position of a rank in its run.

    Attributes:
        phase: name of the activity, for messages.
        step: optimizer steps done.
        batch: index of the micro-batch, or of the batch of an evaluation.
    """

    activity: Activity
    phase: str
    step: int = 0
    batch: int = 0

    def __str__(self) -> str:
        return (
            self.phase if self.activity is Activity.OUTSIDE else f"{self.phase}, step {self.step}, batch {self.batch}"
        )


@dataclass(frozen=True)
class Record:
    """State that a rank publishes at each tick of its heartbeat.

    Attributes:
        beat: number of the tick.
        calls: operations that the rank has begun, by process group.
        host, pid, born: machine, id and start time of the process.
        has_left: the rank publishes no further record.
    """

    beat: int
    position: Position
    calls: Mapping[str, int] = field(default_factory=dict)
    host: str = ""
    pid: int = 0
    born: float = 0.0
    has_left: bool = False

    @property
    def place(self) -> tuple[int, int, Mapping[str, int]]:
        """Value that changes when the rank moves."""
        return self.position.step, self.position.batch, self.calls

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        position = Position(**{**values["position"], "activity": Activity(values["position"]["activity"])})
        return cls(**{**values, "position": position})


@dataclass(frozen=True)
class Late:
    """A late rank.

    Attributes:
        waited_s: how long other ranks have waited for it.
        left_s: seconds until the run ends; None if there is no limit.
        is_silent: it publishes no records.
        process_state: of a silent rank on the machine of the judge, as psutil names it; None if it is not known.
    """

    rank: int
    record: Record
    waited_s: float
    left_s: float | None
    is_silent: bool = False
    process_state: str | None = None


@dataclass(frozen=True)
class Verdict:
    """Decision of rank 0 that all ranks act on, once for each number.

    Attributes:
        ends: the run ends; otherwise all ranks print their positions.
        end_s: ``hang_timeout``.
    """

    number: int
    ends: bool
    end_s: float
    late: Sequence[Late]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        late = [Late(**{**each, "record": Record.of(each["record"])}) for each in values["late"]]
        return cls(**{**values, "late": late})
