"""Loss scaling for 16-mixed: torch's GradScaler, and a count of the skipped steps."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from roomier.core import torch_private


class LossScaler:
    """Loss scaler, which multiplies the loss by a factor, divides the gradients by the same factor, and skips steps
    whose gradients are not finite. If ``is_on`` is False, it does not change losses, gradients or steps.

    The factor is adapted as in "Mixed Precision Training" (Micikevicius et al. 2018, section 3.2). A fused optimizer
    skips the step on the device, so the host does not wait. For other optimizers, the host reads one flag per step.

    Args:
        device: device of the losses.
        unscale_away: function for gradients that are not on the device; see
            :class:`roomier.core.torch_private.LossScalerOfParts`.
        is_on: whether losses are scaled, as in 16-mixed.

    Attributes:
        is_on: the argument ``is_on``.
        num_skipped: number of skipped steps (a 0-dim float32 tensor on the device).
    """

    def __init__(
        self,
        device: torch.device,
        unscale_away: Callable[[Optimizer, Tensor], Tensor] | None = None,
        *,
        is_on: bool = True,
    ) -> None:
        self.is_on = is_on
        self._scaler = torch_private.LossScalerOfParts(device.type, enabled=is_on)
        self._scaler.unscale_away = unscale_away
        self.num_skipped = torch.zeros((), dtype=torch.float32, device=device)

    def scale(self, loss: Tensor) -> Tensor:
        """Return ``loss`` times the factor."""
        return self._scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the factor, once per step and optimizer."""
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer, closure: Any = None) -> None:
        """Unscale the gradients if necessary, and update the parameters if the gradients are finite."""
        assert closure is None or not self.is_on, "a closure would compute gradients that the scaler does not check"
        # The step method of some optimizers takes no argument.
        self._scaler.step(optimizer, *([] if closure is None else [closure]))
        if self.is_on:
            torch_private.mark_stepped(optimizer)
            for flag in torch_private.found_inf(self._scaler, optimizer):
                self.num_skipped += flag

    def skips(self, optimizer: Optimizer) -> bool:
        """Return whether any unscaled gradient of ``optimizer`` is not finite, so that :meth:`step` skips the update.

        The host reads one flag from the device.
        """
        return self.is_on and any(bool(flag) for flag in torch_private.found_inf(self._scaler, optimizer))

    def update(self) -> None:
        """Adapt the factor. Call this method once per step, after the steps of all optimizers."""
        self._scaler.update()

    @property
    def factor(self) -> float:
        """Factor as a Python number. Reading this property waits for the device."""
        return float(self._scaler.get_scale())

    def state(self) -> dict[str, Any] | None:
        """Return the state for a checkpoint; None if losses are not scaled."""
        return {**self._scaler.state_dict(), "num_skipped": self.num_skipped.clone()} if self.is_on else None

    def load(self, state: dict[str, Any] | None) -> None:
        """Restore the result of :meth:`state`. If the state is None, as in a checkpoint of a run with another
        precision, or if losses are not scaled, the call has no effect."""
        if state is None or not self.is_on:
            return
        state = dict(state)
        self.num_skipped.copy_(state.pop("num_skipped"))
        self._scaler.load_state_dict(state)
