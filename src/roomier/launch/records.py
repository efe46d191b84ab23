"""Values that the heartbeats of the ranks exchange as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Self


class Activity(StrEnum):
    """Kind of the current activity of a rank. The activity determines how long the other ranks wait for this rank.

    Attributes:
        STEP: a step, or loading the data of a step. A late rank is reported. At the time limit, the run ends.
        LONG: an activity that can take a long time on one rank. A late rank is only reported, in one line, unless its
            process is stopped. In this case, the run ends at the time limit.
        OUTSIDE: the rank is not in a run. This activity is treated like ``LONG``, but a silent rank is ignored, because
            its process may have ended.
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
        activity: kind of activity, which determines how long other ranks wait.
        phase: description of the activity, for messages.
        step: number of completed optimizer steps.
        batch: index of the micro-batch in training, or of the batch in an evaluation.
    """

    activity: Activity
    phase: str
    step: int = 0
    batch: int = 0

    def __str__(self) -> str:
        place = "" if self.activity is Activity.OUTSIDE else f", step {self.step}, batch {self.batch}"
        return self.phase + place


@dataclass(frozen=True)
class RankRecord:
    """State that a rank publishes at each tick of its heartbeat.

    Attributes:
        beat: number of the tick, which increases with each record.
        position: position of the rank in its run.
        calls: number of operations that the rank has begun in each process group.
        host: name of the machine on which the rank runs.
        pid: process id of the rank.
        born: start time of the rank's process, in seconds since the Unix epoch.
        has_left: True if this is the last record of the rank.
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
        """Step, micro-batch and number of operations. This value changes when the rank makes progress."""
        return self.position.step, self.position.batch, self.calls

    def to_json(self) -> str:
        """Return the record as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Create a record from parsed JSON."""
        position = Position(**{**values["position"], "activity": Activity(values["position"]["activity"])})
        return cls(**{**values, "position": position})


@dataclass(frozen=True)
class Late:
    """A late rank.

    Attributes:
        rank: number of the late rank.
        record: last record of the rank.
        waited_s: seconds for which other ranks have waited for the rank.
        left_s: seconds until the run ends; None if there is no limit.
        is_silent: True if the rank no longer publishes records.
        process_state: state of the process of a silent rank, as named by psutil; None if the state is unknown, for
            example on another machine.
    """

    rank: int
    record: RankRecord
    waited_s: float
    left_s: float | None
    is_silent: bool = False
    process_state: str | None = None


@dataclass(frozen=True)
class Verdict:
    """Decision of rank 0 about late ranks. Each rank acts on a verdict once.

    Attributes:
        number: sequence number of the verdict.
        ends: True if the run ends; False if all ranks only print their positions.
        end_s: ``hang_timeout`` in seconds.
        late: ranks for which other ranks have waited too long.
    """

    number: int
    ends: bool
    end_s: float
    late: Sequence[Late]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Create a verdict from parsed JSON."""
        late = [Late(**{**each, "record": RankRecord.of(each["record"])}) for each in values["late"]]
        return cls(**{**values, "late": late})
