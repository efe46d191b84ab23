"""Callbacks that store a copy of the weights. Plans and forecasts take the memory of this copy into account."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@dataclass(frozen=True)
class KeptWeights:
    """A copy of the trained parameters in float32 or higher precision, sharded like the parameters.

    Args:
        with_buffers: True if the copy includes the floating-point buffers that checkpoints contain.
        device: device of the copy; None for the device of the weights.
    """

    with_buffers: bool = False
    device: torch.device | None = None

    def is_on(self, device_type: str) -> bool:
        """Return True if the copy is stored on the device of the model. ``device_type`` is the type of this device."""
        return self.device is None or self.device.type == device_type


@runtime_checkable
class KeepsWeights(Protocol):
    """A callback that stores a copy of the weights during a fit.

    Attributes:
        kept_weights: description of the copy, which is available even before the copy is created.
    """

    kept_weights: KeptWeights

    def held_weights(self) -> Iterable[Tensor]:
        """Return this rank's shards of the copy; no tensors before the copy is created."""
        ...


def kept_by(callbacks: Iterable[object], *, now: bool = False) -> tuple[KeptWeights, ...]:
    """Return descriptions of the copies that ``callbacks`` store.

    Args:
        now: if True, include only copies that already exist.
    """
    found = (each for each in callbacks if isinstance(each, KeepsWeights))
    return tuple(each.kept_weights for each in found if not now or any(True for _ in each.held_weights()))


def held_by(callbacks: Iterable[object]) -> list[Tensor]:
    """Return the existing tensors of the copies that ``callbacks`` store."""
    return [tensor for each in callbacks if isinstance(each, KeepsWeights) for tensor in each.held_weights()]
