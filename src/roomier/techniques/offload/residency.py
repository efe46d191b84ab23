"""Movement of regions to the device before they are used, and back to the tier afterwards.

[Note: when regions arrive and leave]
A region is copied to the device when it is used. Then all other regions leave the device, with two exceptions: regions
whose forward pass is running, and the region that is expected next, which is copied to the device in the background.
The expected order is the order of the regions in the previous pass. A wrong expectation affects only the duration of
the pass. A region whose parameters did not change leaves the device without a write to the tier.

[Note: parameters that are away]
While a parameter is not on the device, its data is an expanded NaN (0 for an integer dtype) that uses no memory. Code
that reads the parameter gets NaN instead of accessing freed memory, and code that writes to the parameter raises an
error. :func:`absent_watch` finds such code in the first forward pass.

[Note: gradients in the tier]
The gradients of a region leave the device after its backward pass. In later micro-batches, the earlier sum is copied
back to the device, the new gradients are added, and the new sum is moved to the tier. The result equals the sum that
autograd computes if gradients stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from roomier.core import torch_private
from roomier.core.errors import PlanError, TrainingError
from roomier.core.sharded import local_part, with_local_part
from roomier.techniques.offload.memory import Memory, memories_of
from roomier.techniques.offload.regions import Place, Region, Slot
from roomier.techniques.tiers.tier import Tier


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
        """Move the complete gradients of regions in which not all parameters received a gradient. Call this method
        after each backward pass."""
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


FIELD = "offload.parameters"
Regions = tuple[Region, ...]
FORWARD, BACKWARD, UPDATE = range(3)


def record_sizes(regions: Sequence[Region]) -> list[int]:
    """Return the sizes of the records of a tier for ``regions``: first their parameters, then their gradients."""
    return [region.num_bytes for region in regions] * 2


class Residency:
    """Parameters of regions that are on the device only while they are used.

    Args:
        network: model that contains the regions.
        regions: regions that leave the device.
        reads: regions that are used together, in the expected order of their forward passes.
        tier: tier with the records of :func:`record_sizes`.
        device: device on which the model runs.
        values: function that returns the initial value of a parameter on the meta device, or None if the value is
            written later; see :meth:`prepare_to_write`. None if no parameter is on the meta device.

    Attributes:
        regions: the ``regions`` argument.
        gradients: object that moves the gradients of the regions.
        before_use: functions that are called with a region after the region was brought to the device for its forward
            pass. A function that changes parameters must call :meth:`changed`.

    Raises:
        PlanError: the model has no regions.
    """

    def __init__(
        self,
        network: nn.Module,
        regions: Sequence[Region],
        reads: Sequence[Regions],
        tier: Tier,
        device: torch.device,
        values: Callable[[nn.Parameter], Tensor | None] | None = None,
    ) -> None:
        if not regions:
            action = "Define model_blocks() on the model, or keep the parameters on the device"
            raise PlanError(FIELD, None, "requires blocks, but no layer of the model repeats", action)
        self._network, self._tier, self._device = network, tier, device
        self.regions = list(regions)
        memories = memories_of(tier, record_sizes(regions), device)
        self._memory: dict[Region, Memory] = dict(zip(regions, memories, strict=False))
        self.gradients = OffloadedGradients(regions, memories[len(regions) :])
        self.before_use: list[Callable[[Region], object]] = []
        self._home = {parameter: region for region in regions for parameter in region.parameters}
        self._views: dict[Region, list[Tensor]] = {}
        self._placeholders: dict[Region, list[Tensor]] = {}
        self._versions: dict[Region, list[int]] = {}
        self._is_changed: set[Region] = set()
        self._running: list[Regions] = []  # regions whose forward passes are running
        self._leaving: list[Region] = []
        self._follows = _registration_order(reads)
        self._last: tuple[int, Regions] = (FORWARD, ())
        self._is_mapped = False
        for region in self.regions:
            self._move_away(region, values)
        tier.settle()

    @torch.no_grad()
    def _move_away(self, region: Region, values: Callable[[nn.Parameter], Tensor | None] | None) -> None:
        """Move the parameters of ``region`` from ordinary memory to the tier."""
        memory = self._memory[region]
        memory.blank()
        self._placeholders[region] = [_placeholder(each.place, self._device) for each in region.slots]
        views = self._views[region] = [each.place.within(memory.storage) for each in region.slots]
        for slot, view in zip(region.slots, views, strict=True):
            is_meta = slot.parameter.is_meta
            assert values is not None or not is_meta, "a parameter on the meta device has no values"
            content = values(slot.parameter) if values is not None and is_meta else slot.content
            if content is not None:
                view.copy_(content)
            if is_meta:
                slot.leave_meta(view)
            else:
                slot.show(view)
        self._versions[region] = _versions(region)
        self._is_changed.add(region)
        self._leave(region)
        memory.free()

    def use(self, regions: Regions, phase: int | None = None) -> None:
        """Bring ``regions`` to the device. The computation can read these regions until other regions are used.

        Args:
            phase: ``FORWARD``, ``BACKWARD`` or ``UPDATE``. None selects ``BACKWARD`` if a backward pass is running, and
                ``FORWARD`` otherwise.
        """
        if phase is None:
            phase = BACKWARD if torch_private.is_in_backward() else FORWARD
        now = (phase, regions)
        if now == self._last and all(self._memory[each].is_here for each in regions):
            return
        if now != self._last:
            self._follows[self._last] = now
            self._last = now
        if self._is_mapped:
            self._is_mapped = False
            for region in self.regions:
                self._hide(region)
        if phase == BACKWARD:
            self.gradients.leave_complete()
        following = self._follows.get(now, now)[1]
        self._leave_except({*regions, *following, *(each for running in self._running for each in running)})
        with torch.no_grad():
            for region in regions:
                self._arrive(region)
        for region in following:
            self._memory[region].start()
        self._expect(now)

    def changed(self, region: Region) -> None:
        """Mark the parameters of ``region``, which are on the device, as modified."""
        self._is_changed.add(region)

    def region_of(self, parameter: Tensor) -> Region | None:
        """Return the region of ``parameter``; None if the parameter always stays on the device."""
        return self._home.get(parameter)  # type: ignore[call-overload, no-any-return]

    def release(self) -> None:
        """Move all regions away from the device."""
        self._running.clear()  # a forward pass may have ended with an error
        self._leave_except(set())
        for region in self._leaving:
            self._memory[region].free()
        self._leaving.clear()

    def prepare_to_write(self, parameter: Tensor) -> None:
        """Bring the region of ``parameter`` to the device. The caller must write the parameter before the next use."""
        region = self.region_of(parameter)
        if region is not None:
            self.use((region,), UPDATE)
            self.changed(region)

    def settle(self) -> None:
        """Move all regions away from the device, and wait until all records are written."""
        self.release()
        for memory in self._memory.values():
            memory.settle()
        self.gradients.settle()
        self._tier.settle()

    def _contents(self) -> Iterator[tuple[Slot, Tensor]]:
        for number, region in enumerate(self.regions):
            storage = torch.from_numpy(self._tier.mapped(number).numpy()).untyped_storage()
            for slot in region.slots:
                yield slot, slot.place.within(storage)

    def stored(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield each parameter with its content, which is mapped to its record without loading the record.

        For a sharded parameter, the content is this rank's shard. Call :meth:`settle` first. Writes to the content
        modify the parameter. The content is valid until the next use of a region.
        """
        for slot, content in self._contents():
            yield slot.parameter, slot.own(content)

    def show_stored(self) -> None:
        """Set the data of the parameters to the content of the tier, without loading the content. Call :meth:`settle`
        first.

        Code between steps can then read and write the parameters. Even if the device is an accelerator, the data is in
        host memory or on disk. The data is valid until the next use of a region.
        """
        self._is_mapped = True
        for slot, content in self._contents():
            slot.show(content)

    @torch.no_grad()
    def close(self) -> None:
        """Return all parameters to ordinary memory on the device, and remove the hooks. The tier can then be closed."""
        self.settle()
        self.uninstall()
        for slot, content in self._contents():
            slot.show(content.to(self._device, copy=True))

    def uninstall(self) -> None:
        """Remove all hooks."""
        self._uninstall()
        self.gradients.close()

    def detach(self) -> None:
        """Remove all hooks and close the tier. Call :meth:`show_stored` first. The parameters remain readable."""
        self.uninstall()
        self._tier.close()

    def absent(self, tensor: object) -> str | None:
        """Return the name of ``tensor`` if it is a parameter that is not on the device; otherwise, None."""
        region = self._home.get(tensor) if isinstance(tensor, nn.Parameter) else None
        if region is None or self._memory[region].is_here:
            return None
        return next(name for name, each in self._network.named_parameters() if each is tensor)

    def _uninstall(self) -> None:
        """Remove the hooks that use regions."""

    def _arrive(self, region: Region) -> None:
        memory = self._memory[region]
        if memory.is_here:
            return
        for each in self._leaving:
            self._memory[each].free()
        self._leaving.clear()
        memory.arrive()
        for slot, view in zip(region.slots, self._views[region], strict=True):
            slot.show(view)
        self._versions[region] = _versions(region)

    def _leave_except(self, staying: set[Region]) -> None:
        for region, memory in self._memory.items():
            if region not in staying:
                if memory.is_here:
                    self._leave(region)
                else:
                    memory.free()  # the region was expected, but not used

    def _leave(self, region: Region) -> None:
        is_changed = region in self._is_changed or _versions(region) != self._versions[region]
        self._is_changed.discard(region)
        self._hide(region)
        self._memory[region].leave(is_changed=is_changed)
        if is_changed:
            self._leaving.append(region)

    def _hide(self, region: Region) -> None:
        for slot, placeholder in zip(region.slots, self._placeholders[region], strict=True):
            slot.show(placeholder)

    def _expect(self, now: tuple[int, Regions]) -> None:
        """Start reading the next regions from the tier, with the gradients that their update or backward requires."""
        records: dict[int, None] = {}
        for _ in range(self._tier.num_buffers):
            phase, regions = now
            for each in regions:
                if not self._memory[each].is_here:
                    records[each.index] = None
                if self.gradients.are_read(each, is_forward=phase == FORWARD):
                    records[len(self.regions) + each.index] = None
            now = self._follows.get(now, now)
        self._tier.expect(list(records)[: self._tier.num_buffers])


def absent_watch(residency: Residency) -> AbstractContextManager[Any]:
    """Return the context for the first forward pass. It raises an error if code reads a parameter of ``residency`` that
    is not on the device."""

    def on_operation(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        for each in torch_private.iter_leaves((args, kwargs)):
            name = residency.absent(each)
            if name is not None:
                problem = "was read while its module was not running, so it was not on the device"
                action = "Read the parameter in the forward method of its module, or keep the parameters on the device"
                raise TrainingError(FIELD, name, problem, action)
        return func(*args, **kwargs)

    return torch_private.intercept(on_operation, lets_compile=True)


def _registration_order(reads: Sequence[Regions]) -> dict[tuple[int, Regions], tuple[int, Regions]]:
    """Return the order that is expected in the first step: forward and update in the order of the modules, backward in
    the reverse order."""
    passes = [(FORWARD, reads), (BACKWARD, reads[::-1]), (UPDATE, reads)]
    follows: dict[tuple[int, Regions], tuple[int, Regions]] = {}
    for phase, order in passes:
        follows |= {(phase, one): (phase, other) for one, other in pairwise(order)}
    follows[FORWARD, reads[-1]] = (BACKWARD, reads[-1])
    return follows


@torch.no_grad()
def _versions(region: Region) -> list[int]:
    return [torch_private.version_of(local_part(each)) for each in region.parameters]


def _placeholder(place: Place, device: torch.device) -> Tensor:
    """Return a tensor for ``place`` that uses no memory; see [Note: parameters that are away]."""
    is_number = place.dtype.is_floating_point or place.dtype.is_complex
    value = torch.full((), float("nan") if is_number else 0, dtype=place.dtype, device=device)
    return value.expand(place.size)
