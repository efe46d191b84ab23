"""Gives the updates of an engine access to parameters and gradients in a tier."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from roomier.core import torch_private
from roomier.core.sharded import local_part
from roomier.engine.parallel import Parallel
from roomier.engine.updates import Change, ChangeAll
from roomier.techniques.offload.regions import Region
from roomier.techniques.offload.residency import UPDATE, AbsentWatch, Residency
from roomier.techniques.offload.units import Unit


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


class ParameterTier(ParametersOnDevice):
    """Parameters and gradients that are stored in a tier, in regions.

    Args:
        residency: the offloaded parameters, in regions.
        units: the units in which parameters are updated. A unit whose parameters are in a region is updated while the
            region is on the device.
        homes: the parameters that optimizers update, in the order of the optimizers.
        parallel: wrapper that distributes the network across ranks.
    """

    leaves = True

    def __init__(
        self, residency: Residency, units: Sequence[Unit], homes: Mapping[Tensor, object], parallel: Parallel
    ) -> None:
        self._residency, self._homes, self._parallel = residency, homes, parallel
        by_parameter = {parameter: region for region in residency.regions for parameter in region.parameters}
        self.regions: dict[int, Region] = {
            number: by_parameter[unit.parameters[0]]
            for number, unit in enumerate(units)
            if unit.parameters[0] in by_parameter
        }
        self.numbers = self.regions.keys()
        self.norms = residency.gradients.norms
        self._is_unscaled = False
        residency.gradients.measures_norms = True

    def begin_step(self, pending: Sequence[int]) -> None:
        gradients = self._residency.gradients
        self.changes, self._is_unscaled = (), False
        gradients.norms.clear()
        for number, region in self.regions.items():
            if number not in pending:
                gradients.forget(region)
        gradients.begin_step()

    def watch(self) -> AbstractContextManager[Any]:
        return AbsentWatch(self._residency)

    def watch_forwards(self, complete: Callable[[int], object]) -> None:
        numbers = {region: number for number, region in self.regions.items()}
        self._residency.before_use.append(lambda region: complete(numbers[region]) if region in numbers else None)

    def end_backward(self) -> None:
        self._residency.end_backward()

    def with_gradients(self) -> list[int]:
        return [number for number, region in self.regions.items() if self._residency.gradients.has(region)]

    @contextmanager
    def present(
        self, number: int, own: Mapping[Tensor, object], changes: Sequence[ChangeAll]
    ) -> Iterator[list[Tensor]]:
        region = self.regions.get(number)
        if region is None:
            yield []
            return
        residency, gradients = self._residency, self._residency.gradients
        residency.use((region,), UPDATE)
        arrived: list[Tensor] = [each for each in gradients.arrive(region) if each in own]
        for parameter in arrived:
            assert parameter.grad is not None
            for change in changes:
                change([local_part(parameter.grad)])
        left = [each for each in region.parameters if each.grad is not None and each not in own]
        yield arrived
        residency.changed(region)
        if left:  # parameters of a different optimizer
            gradients.leave(region)
        else:
            gradients.forget(region)

    def change(self, change: Change) -> None:
        gradients = self._residency.gradients
        for region in self.regions.values():
            if not gradients.has(region):
                continue
            for parameter in gradients.arrive(region):
                assert parameter.grad is not None
                own = local_part(parameter.grad)
                for earlier in self.changes:
                    earlier([own])
                change(parameter, own)
                (gradients.norms[parameter],) = torch_private.norms_of([own])
            gradients.leave(region)
        self.changes = ()

    def unscale_away(self, optimizer: Optimizer, factor: Tensor) -> Tensor:
        if not self._is_unscaled:
            self.scale_away(factor)
            self._is_unscaled = True
        own = {each for group in optimizer.param_groups for each in group["params"]}
        norms = {each: norm for each, norm in self._residency.gradients.norms.items() if each in own}
        # The norm of a gradient is finite if all its elements are finite, unless the sum of their squares overflows.
        return (~self._parallel.join_norms(norms).isfinite()).to(factor.dtype)

    def scale_away(self, factor: float | Tensor) -> None:
        norms = self._residency.gradients.norms
        norms.update({parameter: norm * factor for parameter, norm in norms.items()})
        self.changes += (lambda gradients: [each.mul_(factor) for each in gradients],)

    def settle(self) -> None:
        self._residency.settle()
        self._residency.show_stored()

    def close(self) -> None:
        self._residency.detach()
