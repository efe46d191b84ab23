"""Loss scaling for 16-mixed: torch's GradScaler, with the skipped steps counted where they happen."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from roomier.core import torch_private


class LossScaler:
    """Scales the loss up, gradients down, and leaves out a step whose gradients are not finite.

    Dynamic loss scaling as in "Mixed Precision Training" (Micikevicius et al. 2018, section 3.2). With a fused
    optimizer the step is left out on the device and the host never waits; with any other, torch reads one flag
    on the host at each step. Skipped steps are counted on the device in ``num_skipped``.
    """

    is_on = True

    def __init__(self, device: torch.device) -> None:
        self._scaler = torch_private.LossScalerOfParts(device.type)
        self.num_skipped = torch.zeros((), dtype=torch.float32, device=device)

    def scale(self, loss: Tensor) -> Tensor:
        return self._scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Bring the gradients back to their size; once per step and optimizer."""
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer, closure: Any = None) -> None:
        assert closure is None, "a closure computes gradients anew, behind the scaler's back"
        self._scaler.step(optimizer)
        torch_private.tell_stepped(optimizer)
        for flag in torch_private.found_inf(self._scaler, optimizer):
            self.num_skipped += flag

    def update(self) -> None:
        """Adapt the scale; once per step, after all optimizers."""
        self._scaler.update()

    @property
    def factor(self) -> float:
        """The scale as a number; reading it waits for the device."""
        return float(self._scaler.get_scale())

    def state(self) -> dict[str, Any]:
        return {**self._scaler.state_dict(), "num_skipped": self.num_skipped.clone()}

    def load(self, state: dict[str, Any] | None) -> None:
        if state is None:  # the run that saved it used another precision
            return
        state = dict(state)
        self.num_skipped.copy_(state.pop("num_skipped"))
        self._scaler.load_state_dict(state)


class NoScale:
    """The loss scale of all other precisions: losses, gradients and steps do not change."""

    is_on = False
    factor = 1.0

    def __init__(self, device: torch.device) -> None:
        self.num_skipped = torch.zeros((), device=device)

    def scale(self, loss: Tensor) -> Tensor:
        return loss

    def unscale(self, optimizer: Optimizer) -> None:
        """Do nothing: gradients are not scaled."""

    def step(self, optimizer: Optimizer, closure: Any = None) -> None:
        if closure is None:  # the step of some optimizers takes no argument
            optimizer.step()
        else:
            optimizer.step(closure)

    def update(self) -> None:
        """Do nothing: the scale is constant."""

    def state(self) -> None:
        """Return None: there is nothing to store."""

    def load(self, state: dict[str, Any] | None) -> None:
        """Do nothing, also with the state of a run in ``"16-mixed"``."""
