"""Updates: when the optimizers of an engine step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Updates:
    """Updates after backward (the default): the optimizers step when all gradients are complete.

    A subclass updates parameters at different times.

    Attributes:
        acts: whether the engine calls the methods of this object during a step, and delegates clipping to them.
    """

    acts = False

    def begin_step(self, optimizers: Sequence[Optimizer], batches: Sequence[Any]) -> None:
        """Prepare the forward of a step."""

    def backward(self, run: Callable[..., None]) -> None:
        """Compute the gradients of a step.

        Args:
            run: runs backward. It takes ``retain_graph``.
        """
        run()

    def end_step(self, closure: object = None) -> None:
        """End a step, before the optimizers step."""

    def clipped(self, max_norm: float | None, algorithm: str | None) -> Tensor | None:
        """Return the norm of the gradients before clipping, if this object clips the gradients."""
        return None

    def state(self) -> dict[str, Any]:
        """Return the state that the next step requires in addition to weights and optimizer states."""
        return {}

    def load(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Restore the result of :meth:`state`."""

    def close(self) -> None:
        """Remove all hooks from the parameters."""
