"""Kinds of memory, and the memory of an interval of a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property


class Kind(StrEnum):
    """Purpose of a tensor's memory. The value of a kind is its name in reports.

    Attributes:
        PARAMETER: parameters that this rank stores between steps (all weights, or the shard of this rank), buffers, and
            the weight averages of callbacks.
        GATHERED: unsharded copies of weights, in the dtype of the computation.
        GRADIENT: gradients of unsharded parameters during a backward pass, and gradients of this rank's shard.
        OPTIMIZER_STATE: states of the optimizer.
        ACTIVATION: batches, tensors saved for backward, and autocast's 16-bit copies of weights.
        COMMUNICATION: buffers that are sent to or received from other ranks.
        TEMPORARY: all other tensors.
    """

    PARAMETER = "parameter"
    GATHERED = "gathered_parameter"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer_state"
    ACTIVATION = "activation"
    COMMUNICATION = "communication_buffer"
    TEMPORARY = "temporary"


NAMES = {
    Kind.PARAMETER: "weights",
    Kind.OPTIMIZER_STATE: "optimizer states",
    Kind.GRADIENT: "gradients",
    Kind.GATHERED: "gathered weights",
    Kind.ACTIVATION: "activations",
    Kind.COMMUNICATION: "communication",
    Kind.TEMPORARY: "temporaries",
}
"""Names of the kinds of memory for users."""

MODEL_STATES = (Kind.PARAMETER, Kind.GATHERED, Kind.GRADIENT, Kind.OPTIMIZER_STATE)
"""Kinds of the model states, whose sizes depend on the strategy but not on the batch."""

BytesByKind = Mapping[Kind, int]


def total_bytes(num_bytes: BytesByKind, kinds: Iterable[Kind] = tuple(Kind)) -> int:
    """Return the total number of bytes of ``kinds``. A missing kind counts as 0."""
    return sum(num_bytes.get(kind, 0) for kind in kinds)


NumBytes = dict[Kind, int]


def added(one: BytesByKind, other: BytesByKind, factor: int = 1) -> NumBytes:
    """Return the sum of ``one`` and ``factor`` times ``other``, by kind."""
    return {kind: one.get(kind, 0) + factor * other.get(kind, 0) for kind in Kind}


@dataclass(frozen=True)
class Interval:
    """Memory during an interval of a step in which one part of the model runs.

    Attributes:
        phase: ``"forward"``, ``"backward"`` or ``"update"``.
        place: name of the part of the model; empty between parts.
        begin: bytes by kind at the start.
        peak: bytes by kind at the moment when their total is highest.
        end: bytes by kind at the end.
    """

    phase: str
    place: str
    begin: NumBytes
    peak: NumBytes
    end: NumBytes

    @property
    def moments(self) -> tuple[NumBytes, NumBytes, NumBytes]:
        """Bytes by kind at the start, at the peak and at the end."""
        return self.begin, self.peak, self.end

    @cached_property
    def peak_bytes(self) -> int:
        """Total bytes at the peak."""
        return total_bytes(self.peak)

    def plus(self, begin: BytesByKind, peak: BytesByKind, end: BytesByKind) -> Interval:
        """Return this interval with additional bytes at its start, at its peak and at its end."""
        return Interval(self.phase, self.place, *map(added, self.moments, (begin, peak, end)))

    def grown(self, more: Interval, less: Interval, times: int) -> Interval:
        """Return this interval plus ``times`` times the difference between ``more`` and ``less``."""
        changes = (added(one, other, -1) for one, other in zip(more.moments, less.moments, strict=True))
        moments = (added(own, change, times) for own, change in zip(self.moments, changes, strict=True))
        return Interval(self.phase, self.place, *moments)
