"""Kinds of memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum


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


MODEL_STATES = (Kind.PARAMETER, Kind.GATHERED, Kind.GRADIENT, Kind.OPTIMIZER_STATE)
"""Kinds of the model states, whose sizes depend on the strategy but not on the batch."""

BytesByKind = Mapping[Kind, int]


def total_bytes(num_bytes: BytesByKind, kinds: Iterable[Kind] = tuple(Kind)) -> int:
    """Return the total number of bytes of ``kinds``. A missing kind counts as 0."""
    return sum(num_bytes.get(kind, 0) for kind in kinds)
