"""Gradients that leave the device after the backward pass of their region.

The gradients of later micro-batches are added on the device. The earlier sum is copied to the device, the new gradients
are added, and the new sum is moved to the tier. The result equals the sum that autograd computes if gradients stay on
the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from roomier.core import torch_private
from roomier.core.sharded import local_part, with_local_part
from roomier.techniques.offload.memory import Memory
from roomier.techniques.offload.regions import Region


class OffloadedGradients:
    """The gradients of regions. Between passes, ``grad`` of each parameter of the regions is None.

    Args:
        regions: regions whose gradients leave the device.
        memories: device memory for the gradients of each region.

    Attributes:
        norms: norm of each gradient that was moved to the tier (0-dim, on the device), for the global norm of the
            gradients.
        measures_norms: whether :attr:`norms` is computed.
    """

    def __init__(self, regions: Sequence[Region], memories: Sequence[Memory]) -> None:
        self.norms: dict[Tensor, Tensor] = {}
        self.measures_norms = False
        self._memory = dict(zip(regions, memories, strict=True))
        self._home = {parameter: region for region in regions for parameter in region.parameters}
        self._views: dict[Tensor, Tensor] = {}
        self._stored: dict[Region, dict[nn.Parameter, None]] = {region: {} for region in regions}
        self._complete: dict[Region, dict[nn.Parameter, None]] = {}
        self._handles: dict[Tensor, RemovableHandle] = {}
        self._leaving: list[Memory] = []
        self._awaits_update: set[Region] = set()

    def begin_step(self) -> None:
        """Begin a step, before its first forward pass. Parameters may have been unfrozen since the last step.

        Gradients of earlier steps belong to pending updates, which run when the region of the gradients is used.
        """
        self._awaits_update = {region for region, stored in self._stored.items() if stored}
        for parameter in self._home:
            if parameter.requires_grad and parameter not in self._handles:
                handle = parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]
                self._handles[parameter] = handle

    def _take(self, parameter: nn.Parameter) -> None:
        """Record that the gradient of ``parameter`` is complete. Move the gradients of a region when all of them are
        complete."""
        gradient = parameter.grad
        if gradient is None or gradient.layout is not torch.strided or gradient.dtype != parameter.dtype:
            return  # for example, a sparse gradient of an embedding
        region = self._home[parameter]
        complete = self._complete.setdefault(region, {})
        complete[parameter] = None
        if len(complete) == sum(each.requires_grad for each in region.parameters):
            self._leave(region)

    def leave_complete(self) -> None:
        """Move the complete gradients of regions in which not all parameters received a gradient."""
        for region in list(self._complete):
            self._leave(region)

    @torch.no_grad()
    def _leave(self, region: Region) -> None:
        """Add the complete gradients of ``region`` to the earlier gradients, and move the sums to the tier."""
        complete, stored = self._complete.pop(region), self._stored[region]
        self._bring(region)
        for parameter in complete:
            view, gradient = self._views[parameter], parameter.grad
            assert gradient is not None
            own = local_part(gradient)
            view.add_(own) if parameter in stored else view.copy_(own)
            stored[parameter] = None
            parameter.grad = None
            if self.measures_norms:
                (self.norms[parameter],) = torch_private.norms_of([view])
        self._send(region)

    def has(self, region: Region) -> bool:
        """Return whether gradients of ``region`` are in the tier."""
        return bool(self._stored[region])

    def are_read(self, region: Region, *, is_forward: bool) -> bool:
        """Return whether the next use of ``region`` reads its gradients from the tier."""
        return region in self._awaits_update if is_forward else self.has(region) and not self._memory[region].is_here

    @torch.no_grad()
    def arrive(self, region: Region) -> list[nn.Parameter]:
        """Bring the gradients of ``region`` to the device, and assign them to ``grad`` of the parameters.

        Returns:
            The parameters whose gradients were in the tier. Other gradients, such as sparse gradients, never leave the
            device.
        """
        self._bring(region)
        for parameter in self._stored[region]:
            parameter.grad = with_local_part(parameter, self._views[parameter])
        return list(self._stored[region])

    def leave(self, region: Region) -> None:
        """Move the gradients of ``region`` back to the tier, with their current values. Call this method after
        :meth:`arrive`."""
        for parameter in self._stored[region]:
            parameter.grad = None
        self._send(region)

    def forget(self, region: Region) -> None:
        """Free the gradients of ``region``."""
        memory = self._memory[region]
        for parameter in region.parameters:
            parameter.grad = None
        self._stored[region].clear()
        self._awaits_update.discard(region)
        self._complete.pop(region, None)
        if memory.is_here:
            memory.leave(is_changed=False)

    def settle(self) -> None:
        """Return all buffers to the tier."""
        self._free()
        for memory in self._memory.values():
            memory.settle()

    def close(self) -> None:
        """Remove the hooks of the parameters."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def _bring(self, region: Region) -> None:
        memory = self._memory[region]
        self._free()
        if self._stored[region]:
            memory.arrive()
        else:
            memory.blank()
        for slot in region.slots:
            if slot.parameter not in self._views:
                self._views[slot.parameter] = slot.own(slot.place.within(memory.storage))

    def _send(self, region: Region) -> None:
        self._memory[region].leave(is_changed=True)
        self._leaving.append(self._memory[region])

    def _free(self) -> None:
        for memory in self._leaving:
            memory.free()
        self._leaving.clear()
