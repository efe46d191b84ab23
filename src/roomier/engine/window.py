"""State of one optimizer step while its micro-batches run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from roomier.api.engine import Step


@dataclass(slots=True)
class Window:
    """State of one optimizer step while its micro-batches run.

    Attributes:
        weights: for each micro-batch, its fraction of the loss terms in the global batch. Empty if losses are summed
            without weights.
        loss: sum of the weighted losses so far (0-dim, detached).
        left_out: weights of the micro-batches whose step returned None.
    """

    step: Step
    size: int
    weights: tuple[float | Tensor, ...]
    loss: Tensor | None = None
    left_out: tuple[float | Tensor, ...] = ()


class Closure:
    """Closure for the optimizer, created after all micro-batches except the last have run.

    Each call computes the loss and the gradients of the last micro-batch.

    Args:
        window: the state of the step.
        run_last: function that runs forward and backward for the last micro-batch and returns its loss.
        weigh_again: function that corrects the gradients if the step returned None for some micro-batches.
    """

    def __init__(
        self, window: Window, run_last: Callable[[], Tensor | None], weigh_again: Callable[[Window], None]
    ) -> None:
        self._window, self._run_last, self._weigh_again = window, run_last, weigh_again
        self._loss, self._left_out = window.loss, window.left_out  # loss and weights of the earlier micro-batches

    @torch.enable_grad()
    def __call__(self) -> Tensor | None:
        window = self._window
        window.loss, window.left_out = self._loss, self._left_out
        loss = self._run_last()
        if window.left_out:  # the optimizer may update the parameters after this call
            self._weigh_again(window)
        return loss
