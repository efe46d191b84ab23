"""Callbacks that keep a copy of the weights, so that plans and forecasts can count it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@dataclass(frozen=True)
class KeptWeights:
    """A copy, in float32 at least, of the parameters that are trained; cut among ranks as these are.

    Args:
        with_buffers: and of the floating-point buffers that are saved.
        device: where it is held; None is beside the weights.
    """

    with_buffers: bool = False
    device: torch.device | None = None

    def is_on(self, device_type: str) -> bool:
        """Whether it takes memory of the device that computes, which is of that type."""
        return self.device is None or self.device.type == device_type


@runtime_checkable
class KeepsWeights(Protocol):
    """A callback that keeps such a copy in a fit.

    Attributes:
        kept_weights: the copy, whether it is there already or will be.
    """

    kept_weights: KeptWeights

    def held_weights(self) -> Iterable[Tensor]:
        """What is there of it now: this rank's part."""
        ...


def kept_by(callbacks: Iterable[object], *, now: bool = False) -> tuple[KeptWeights, ...]:
    """The copies that ``callbacks`` keep.

    Args:
        now: those alone that are there already.
    """
    found = (each for each in callbacks if isinstance(each, KeepsWeights))
    return tuple(each.kept_weights for each in found if not now or any(True for _ in each.held_weights()))


def held_by(callbacks: Iterable[object]) -> list[Tensor]:
    """The tensors of these copies that are there now."""
    return [tensor for each in callbacks if isinstance(each, KeepsWeights) for tensor in each.held_weights()]
