"""What bytes are for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum


class Kind(StrEnum):
    """What a tensor's memory is for. Its value is the name in reports.

    Attributes:
        PARAMETER: what this rank owns between steps: all of the weights, or its part of them; buffers; and averages of
            weights that callbacks keep.
        GATHERED: copies of weights whose parts came from other ranks, in the dtype they compute in.
        GRADIENT: of whole parameters while a backward runs, and of this rank's part of them.
        OPTIMIZER_STATE: as the optimizer keeps it.
        ACTIVATION: batches, and what the forward keeps for the backward; autocast's 16-bit copies of weights as well.
        COMMUNICATION: what is sent to other ranks, or received.
        TEMPORARY: all else.
    """

    PARAMETER = "parameter"
    GATHERED = "gathered_parameter"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer_state"
    ACTIVATION = "activation"
    COMMUNICATION = "communication_buffer"
    TEMPORARY = "temporary"


MODEL_STATES = (Kind.PARAMETER, Kind.GATHERED, Kind.GRADIENT, Kind.OPTIMIZER_STATE)
"""What the strategies divide among ranks. It does not depend on the batch."""

BytesByKind = Mapping[Kind, int]


def total_bytes(num_bytes: BytesByKind, kinds: Iterable[Kind] = tuple(Kind)) -> int:
    """The sum over ``kinds``; a kind that is not there counts as 0."""
    return sum(num_bytes.get(kind, 0) for kind in kinds)
