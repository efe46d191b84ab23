"""Objects that determine when and how the optimizers of an engine step."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roomier.core import torch_private
from roomier.core.sharded import local_part
from roomier.engine.parallel import Parallel


class Scale(Protocol):
    """Loss scale; see :mod:`roomier.techniques.precision.scaler`."""

    def step(self, optimizer: Optimizer, closure: Any = None) -> None:
        """Update the parameters if the gradients are finite."""
        ...

    def skips(self, optimizer: Optimizer) -> bool:
        """Return whether the step is skipped because unscaled gradients are not finite. The host waits until one flag
        has been copied from the device."""
        ...


Change = Callable[[Tensor, Tensor], object]
"""Function that changes a gradient in place. The arguments are the parameter, and this rank's shard of its gradient."""
ChangeAll = Callable[[Sequence[Tensor]], object]
"""Function that changes several gradients, or this rank's shards of them, in place."""


def clipping(limit: float, norm: Tensor | None) -> ChangeAll:
    """Return the function that clips gradients with the total norm ``norm``; None clips each element instead."""
    if norm is None:
        return lambda gradients: [each.clamp_(-limit, limit) for each in gradients]
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)  # as in torch.nn.utils.clip_grad_norm_
    return lambda gradients: torch_private.scale_each(gradients, factor)


class Updates:
    """Updates after backward (the default): the optimizers step when all gradients are complete.

    A subclass updates parameters at different times, or moves their states.

    Args:
        parallel: wrapper that distributes the network across ranks.

    Attributes:
        acts: whether the engine calls the methods of this object during a step.
        away: parameters whose optimizer states are not on the device.
        norms_away: norm of each gradient that is not on the device, by parameter.
    """

    acts = False
    away: Container[nn.Parameter] = frozenset()
    norms_away: Mapping[Tensor, Tensor] = MappingProxyType({})

    def __init__(self, parallel: Parallel) -> None:
        self._parallel = parallel

    def begin_step(self, optimizers: Sequence[Optimizer], batches: Sequence[Any]) -> None:
        """Prepare the forward pass of a step."""

    def begin_micro_batch(self, *, is_first: bool, is_last: bool) -> None:
        """Prepare the forward pass of a micro-batch."""

    def backward(self, run: Callable[..., None], change: Change | None) -> None:
        """Compute the gradients of a step.

        Args:
            run: function that runs backward and accepts the ``retain_graph`` argument.
            change: function that will change the gradients of this step; see :meth:`change`.
        """
        run()

    def change(self, parameters: Iterable[Tensor], change: Change) -> None:
        """Change the complete, unscaled gradients of ``parameters``, before they are clipped."""
        self._parallel.check_reduced("on_gradient", change)
        for parameter in parameters:
            if parameter.grad is not None:
                change(parameter, local_part(parameter.grad))

    def clip(self, parameters: Sequence[Tensor], limit: float, algorithm: str) -> Tensor | None:
        """Clip the gradients of ``parameters``. If ``algorithm`` is ``"norm"``, return the norm before clipping."""
        self._parallel.check_reduced("gradient_clip_val", limit)
        gradients = {each: local_part(each.grad) for each in parameters if each.grad is not None}
        norm = None
        if algorithm == "norm":
            norms = {
                **self.norms_away,
                **dict(zip(gradients, torch_private.norms_of([*gradients.values()]), strict=True)),
            }
            norm = self._parallel.join_norms({each: norms[each] for each in parameters if each in norms})
        clip = clipping(limit, norm)
        clip([*gradients.values()])
        self.change_away(clip)
        return norm

    def change_away(self, change: ChangeAll) -> None:
        """Change the gradients that are not on the device, before their parameters are updated."""

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
