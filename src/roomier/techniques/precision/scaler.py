"""Loss scaling for 16-mixed: torch's GradScaler, and a count of the skipped steps."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from roomier.core import torch_private


class LossScaler:
    """Loss scaler, which multiplies the loss by a factor, divides the gradients by the same factor, and skips steps
    whose gradients are not finite.

    The factor is adapted as in "Mixed Precision Training" (Micikevicius et al. 2018, section 3.2). A fused optimizer
    skips the step on the device, so the host does not wait. For other optimizers, the host reads one flag per step.

    Args:
        device: device of the losses.
        unscale_away: function for gradients that are not on the device; see
            :class:`roomier.core.torch_private.LossScalerOfParts`.

    Attributes:
        is_on: whether losses are scaled.
        num_skipped: number of skipped steps (a 0-dim float32 tensor on the device).
    """

    is_on = True

    def __init__(self, device: torch.device, unscale_away: Callable[[Optimizer, Tensor], Tensor] | None = None) -> None:
        self._scaler = torch_private.LossScalerOfParts(device.type)
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
        assert closure is None, "a closure would compute gradients that the scaler does not check"
        self._scaler.step(optimizer)
        torch_private.mark_stepped(optimizer)
        for flag in torch_private.found_inf(self._scaler, optimizer):
            self.num_skipped += flag

    def skips(self, optimizer: Optimizer) -> bool:
        """Return whether any unscaled gradient of ``optimizer`` is not finite, so that :meth:`step` skips the update.

        The host reads one flag from the device.
        """
        return any(bool(flag) for flag in torch_private.found_inf(self._scaler, optimizer))

    def update(self) -> None:
        """Adapt the factor. Call this method once per step, after the steps of all optimizers."""
        self._scaler.update()

    @property
    def factor(self) -> float:
        """Factor as a Python number. Reading this property waits for the device."""
        return float(self._scaler.get_scale())

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {**self._scaler.state_dict(), "num_skipped": self.num_skipped.clone()}

    def load(self, state: dict[str, Any] | None) -> None:
        """Restore the result of :meth:`state`. If the state is None, as in a checkpoint of a run with another
        precision, the call has no effect."""
        if state is None:
            return
        state = dict(state)
        self.num_skipped.copy_(state.pop("num_skipped"))
        self._scaler.load_state_dict(state)


class NoScale:
    """Loss scaler for all precisions except 16-mixed. The methods do not change losses, gradients or steps.

    Attributes:
        is_on: whether losses are scaled.
        factor: factor of the loss, which is always 1.
        num_skipped: number of skipped steps (a 0-dim tensor), which is always zero.
    """

    is_on = False
    factor = 1.0

    def __init__(self, device: torch.device) -> None:
        self.num_skipped = torch.zeros((), device=device)

    def scale(self, loss: Tensor) -> Tensor:
        """Return ``loss``."""
        return loss

    def unscale(self, optimizer: Optimizer) -> None:
        """This method is a no-op, because gradients are not scaled."""

    def step(self, optimizer: Optimizer, closure: Any = None) -> None:
        """Update the parameters."""
        if closure is None:  # the step method of some optimizers takes no argument
            optimizer.step()
        else:
            optimizer.step(closure)

    def skips(self, optimizer: Optimizer) -> bool:
        """Return False."""
        return False

    def update(self) -> None:
        """This method is a no-op, because the factor is constant."""

    def state(self) -> None:
        """Return None, because the factor is constant."""

    def load(self, state: dict[str, Any] | None) -> None:
        """This method is a no-op, even if the state comes from a run in ``"16-mixed"``."""
