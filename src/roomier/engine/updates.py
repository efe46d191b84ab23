"""Objects that determine when and how the optimizers of an engine step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roomier.core import torch_private
from roomier.core.sharded import local_part
from roomier.techniques.parallel.parallel import Parallel
from roomier.techniques.precision.scaler import LossScaler

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


class ParametersOnDevice:
    """Parameters that stay on the device. The methods have no effect, because the engine handles the gradients.

    Attributes:
        leaves: whether parameters are offloaded.
        numbers: numbers of the units whose parameters are offloaded.
        norms: norm of each gradient in the tier, by parameter.
        changes: functions, such as clipping, to apply to the gradients in the tier before the update, in this order.
    """

    leaves = False
    numbers: Collection[int] = ()
    norms: Mapping[Tensor, Tensor] = MappingProxyType({})
    changes: tuple[ChangeAll, ...] = ()

    def begin_step(self, pending: Sequence[int]) -> None:
        """Free the gradients of the last step, except the gradients of the units in ``pending``."""

    def watch(self) -> AbstractContextManager[Any] | None:
        """Return a context for the first forward pass, or None. The context raises an error if code reads a parameter
        that is not on the device."""
        return None

    def watch_forwards(self, complete: Callable[[int], object]) -> None:
        """Call ``complete`` with the number of a unit each time its parameters have been brought to the device for a
        forward pass."""

    def end_backward(self) -> None:
        """Move complete gradients to the tier. Call this method after each backward pass."""

    def with_gradients(self) -> list[int]:
        """Return the numbers of the units that have gradients in the tier."""
        return []

    @contextmanager
    def present(
        self, number: int, own: Mapping[Tensor, object], changes: Sequence[ChangeAll]
    ) -> Iterator[list[Tensor]]:
        """Return a context in which the parameters of a unit, and their gradients, are on the device.

        Entering the context returns the parameters whose gradients were in the tier. On exit, the gradients of these
        parameters are freed.

        Args:
            number: number of the unit.
            own: the parameters that are updated.
            changes: functions that change the gradients before the update.
        """
        yield []

    def change_away(self, change: ChangeAll) -> None:
        """Change the gradients in the tier when they are brought to the device for the update."""

    def scale_away(self, factor: float | Tensor) -> None:
        """Multiply the gradients in the tier by ``factor``."""

    def unscale_away(self, optimizer: Optimizer, factor: Tensor) -> Tensor:
        """Multiply the gradients in the tier by ``factor``. Return 1 if a gradient of ``optimizer`` is not finite on
        any rank, otherwise 0."""
        return torch.zeros_like(factor)

    def change(self, change: Change) -> None:
        """Change the gradients in the tier, and measure their norms again."""

    def settle(self) -> None:
        """Make all parameters readable."""

    def close(self) -> None:
        """Remove all hooks, and free the tier. The parameters remain readable."""


def weakly(method: Callable[..., object]) -> Callable[..., None]:
    """Return a function for hooks that calls ``method``, but does not keep the object of ``method`` alive."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        found = reference()
        if found is not None:
            found(*args)

    return call


class Updates:
    """Updates after the backward pass (the default): the optimizers step when all gradients are complete.

    A subclass updates parameters at different times, or moves their states.

    Args:
        parallel: wrapper that distributes the network across ranks.
        parameters: the parameters in a tier, or an object without effect if all parameters stay on the device.

    Attributes:
        parameters: the ``parameters`` argument.
        acts: whether the engine calls the methods of this object during a step.
        away: parameters whose optimizer states are not on the device.
    """

    acts = False
    away: Container[nn.Parameter] = frozenset()

    def __init__(self, parallel: Parallel, parameters: ParametersOnDevice | None = None) -> None:
        self._parallel, self.parameters = parallel, parameters or ParametersOnDevice()

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
                **self.parameters.norms,
                **dict(zip(gradients, torch_private.norms_of([*gradients.values()]), strict=True)),
            }
            norm = self._parallel.join_norms({each: norms[each] for each in parameters if each in norms})
        clip = clipping(limit, norm)
        clip([*gradients.values()])
        self.parameters.change_away(clip)
        return norm

    def end_step(self, closure: object = None) -> None:
        """Prepare the steps of the optimizers."""

    def step(self, optimizer: Optimizer, scaler: LossScaler, closure: Any = None) -> None:
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
