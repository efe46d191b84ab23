"""Objects that determine when and how the optimizers of an engine step."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Scale(Protocol):
    """Loss scale; see :mod:`roomier.techniques.precision.scaler`."""

    def step(self, optimizer: Optimizer, closure: Any = None) -> None:
        """Update the parameters if the gradients are finite."""
        ...

    def skips(self, optimizer: Optimizer) -> bool:
        """Return whether the step is skipped because unscaled gradients are not finite. The host waits until one flag
        has been copied from the device."""
        ...


class Updates:
    """Updates after backward (the default): the optimizers step when all gradients are complete.

    A subclass updates parameters at different times, or moves their states.

    Attributes:
        acts: whether the engine calls the methods of this object during a step.
        clips: whether this object clips the gradients instead of the engine.
        away: parameters whose optimizer states are not on the device.
    """

    acts = False
    clips = False
    away: Container[nn.Parameter] = frozenset()

    def begin_step(self, optimizers: Sequence[Optimizer], batches: Sequence[Any]) -> None:
        """Prepare the forward pass of a step."""

    def begin_micro_batch(self, *, is_first: bool, is_last: bool) -> None:
        """Prepare the forward pass of a micro-batch."""

    def backward(self, run: Callable[..., None]) -> None:
        """Compute the gradients of a step.

        Args:
            run: function that runs backward and accepts the ``retain_graph`` argument.
        """
        run()

    def begin_clip(self) -> None:
        """Prepare for the clipping of gradients by the engine."""

    def end_clip(self, norm: Tensor | None, limit: float) -> None:
        """Process gradients that the engine has clipped.

        Args:
            norm: norm of the gradients before clipping; None if elements were clipped.
            limit: maximum of the norm, or of the absolute value of each element.
        """

    def scale_away(self, factor: float | Tensor) -> None:
        """Multiply the gradients that are not on the device by ``factor``."""

    def unscale_away(self, optimizer: Optimizer, factor: Tensor) -> Tensor:
        """Multiply the gradients of ``optimizer`` that are not on the device by ``factor``, once per step.

        Returns:
            1 if one of these gradients is not finite on any rank, otherwise 0 (0-dim, on the device).
        """
        return torch.zeros(())

    def end_step(self, closure: object = None) -> None:
        """Prepare the steps of the optimizers."""

    def step(self, optimizer: Optimizer, scaler: Scale, closure: Any = None) -> None:
        """Update the parameters of ``optimizer``. The engine has unscaled the gradients if ``acts`` is True."""
        scaler.step(optimizer, closure)

    def settle(self) -> None:
        """Complete pending updates."""

    def watch(self) -> AbstractContextManager[Any] | None:
        """Return a context for the first forward pass of training; None if no context is required."""
        return None

    def clipped(self, max_norm: float | None, algorithm: str | None) -> Tensor | None:
        """Return the norm of the gradients before clipping; None if this object does not clip them."""
        return None

    def state(self) -> dict[str, Any]:
        """Return the state that the next step requires in addition to weights and optimizer states."""
        return {}

    def place(self, states: Mapping[nn.Parameter, dict[str, Any]]) -> None:
        """Replace tensors on the meta device with memory into which the states of ``away`` are read before
        :meth:`load`."""

    def load(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Restore the result of :meth:`state`."""

    def close(self) -> None:
        """Remove all hooks from the parameters."""
