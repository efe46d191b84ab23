"""Parameters that are on the device only during the computation of their region.

The parameters of a region are copied to the device before its forward and before its backward pass. The backward pass
begins when autograd reaches an output of the region or reads one of its saved tensors, whichever happens first. See
[Note: when regions arrive and leave] in ``residency.py``.

Under autocast, the first operation that reads a parameter creates a copy in lower precision, which autocast's cache and
the graph keep until the backward pass. While a parameter is not on the device, the memory of its copy is freed. When
the parameter returns, the copy is recomputed in the same tensor object, so the graph is unchanged.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from roomier.core import torch_offload, torch_private
from roomier.core.wrapped_forward import WrappedForward, install
from roomier.techniques.offload.regions import Place, Region, modules_with
from roomier.techniques.offload.residency import Regions, Residency
from roomier.techniques.tiers.tier import Tier


class OffloadedParameters(Residency):
    """Parameters of regions that leave the device for a tier. The parameters are not sharded.

    Args:
        network: model that contains the blocks.
        blocks: blocks of the model.
        regions: result of :func:`roomier.techniques.offload.regions.regions_of`.
        tier: tier with the records of :func:`roomier.techniques.offload.residency.record_sizes`.
        device: device on which the model runs.
        values: function that returns the initial value of a parameter on the meta device; see :class:`Residency`.

    The attributes are described in :class:`Residency`.

    Raises:
        PlanError: the model has no blocks.
    """

    def __init__(
        self,
        network: nn.Module,
        blocks: Sequence[nn.Module],
        regions: Sequence[Region],
        tier: Tier,
        device: torch.device,
        values: Callable[[nn.Parameter], Tensor | None] | None = None,
    ) -> None:
        self._reads = modules_with(network, blocks, regions)
        self._casts = {region: Casts() for region in regions}
        self._handles: list[RemovableHandle] = []
        super().__init__(network, regions, list(dict.fromkeys(self._reads.values())), tier, device, values)
        self._region_of_memory = {
            torch_private.memory_of(view): region for region, views in self._views.items() for view in views
        }

    def install(self) -> None:
        """Wrap the forward methods of the modules that read the regions. :func:`roomier.core.wrapped_forward.unwrap`
        removes the wrappers.

        Call this method before other wrappers are installed, so that activations are recomputed inside this wrapper.
        """
        for module, regions in self._reads.items():
            install(module, RegionForward(module, self, regions))
            # Hooks of the user can read parameters before the forward pass.
            hook = partial(_before_forward, self, regions)  # unlike a lambda, it is copied with the module
            self._handles.append(module.register_forward_pre_hook(hook, prepend=True))

    @contextmanager
    def running(self, regions: Regions) -> Iterator[None]:
        """Keep ``regions`` on the device while a forward pass inside the context reads them."""
        self._running.append(regions)
        try:
            self.use(regions)
            for region in regions:
                for each in self.before_use:
                    each(region)
            yield
        finally:
            if self._running:
                self._running.pop()

    def saved(self, regions: Regions) -> saved_tensors_hooks:
        """Return a context for saved tensors. When autograd reads a saved tensor that uses the memory of ``regions``,
        these regions are brought to the device."""
        pack, unpack = torch_offload.saving_hooks() or (_OtherSaved, _OtherSaved.checked)

        def save(tensor: Tensor) -> Any:
            return _SavedWeight(tensor) if self._belongs(tensor, regions) else pack(tensor)

        def load(packed: Any) -> Tensor:
            if not isinstance(packed, _SavedWeight):
                return unpack(packed)
            self.use(regions)
            return packed.tensor

        return saved_tensors_hooks(save, load)

    def _belongs(self, tensor: Tensor, regions: Regions) -> bool:
        if self._region_of_memory.get(torch_private.memory_of(tensor)) in regions:
            return True
        whole = torch_private.viewed(tensor)
        parameter = torch_private.cast_parameter(whole)
        region = None if parameter is None else self._home.get(parameter)
        if region not in regions:
            return False
        assert parameter is not None
        self._casts[region].add(parameter, whole)
        return True

    def _arrive(self, region: Region) -> None:
        super()._arrive(region)
        self._casts[region].arrive()

    def _leave(self, region: Region) -> None:
        self._casts[region].leave()
        super()._leave(region)

    def _uninstall(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _before_forward(parameters: OffloadedParameters, regions: Regions, *_: Any) -> None:
    parameters.use(regions)


class RegionForward(WrappedForward):
    """Wrapper of the ``forward`` method of a module that reads regions.

    Args:
        module: module whose ``forward`` is wrapped.
        parameters: object that brings the regions to the device.
        regions: regions that the module reads.
    """

    def __init__(self, module: nn.Module, parameters: OffloadedParameters, regions: Regions) -> None:
        super().__init__(module)
        self._parameters, self._regions = parameters, regions

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        parameters, regions = self._parameters, self._regions
        if not torch.is_grad_enabled():
            with parameters.running(regions):
                output = self.forward(*args, **kwargs)
            if torch.is_autocast_enabled(parameters._device.type):
                torch.clear_autocast_cache()  # contains copies of all parameters
            return output
        with parameters.running(regions), parameters.saved(regions):
            output = self.forward(*args, **kwargs)
        for each in torch_private.iter_tensors(output):
            if each.requires_grad:
                each.register_hook(lambda gradient: parameters.use(regions))  # type: ignore[no-untyped-call]
        return output


@dataclass(slots=True, eq=False)
class _SavedWeight:
    """A saved tensor that uses the memory of a region, or of a copy that autocast created from a parameter of a
    region."""

    tensor: Tensor


class _OtherSaved:
    """A saved tensor of any other kind. Autograd does not check the versions of tensors that hooks save, so this class
    checks them."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor, torch_private.version_of(tensor)

    def checked(self) -> Tensor:
        """Check that the tensor was not modified after it was saved, and return it."""
        if torch_private.version_of(self.tensor) != self.version:  # same message as in torch
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tensor of shape {tuple(self.tensor.shape)} that a block saved"
            )
        return self.tensor


@dataclass(frozen=True)
class _Cast:
    """A copy of a parameter.

    Attributes:
        parameter: parameter from which the copy was created.
        storage: weak reference to the storage of the copy.
        place: position of the copy within its storage.
        num_bytes: size of the storage.
    """

    parameter: nn.Parameter
    storage: weakref.ref[torch.UntypedStorage]
    place: Place
    num_bytes: int


class Casts:
    """The copies of the parameters of one region."""

    def __init__(self) -> None:
        self._casts: dict[int, _Cast] = {}

    def add(self, parameter: nn.Parameter, cast: Tensor) -> None:
        """Add ``cast``, a copy of ``parameter``. A copy that was added before is ignored."""
        storage = cast.untyped_storage()
        key = torch_private.memory_of(cast)
        known = self._casts.get(key)
        if known is None or known.storage() is not storage:
            first = int(cast.storage_offset()) * cast.itemsize
            place = Place(first, cast.dtype, cast.shape, cast.stride())
            self._casts[key] = _Cast(parameter, weakref.ref(storage), place, storage.nbytes())

    def leave(self) -> None:
        """Free the memory of the copies."""
        for storage, _ in self._living():
            storage.resize_(0)

    def arrive(self) -> None:
        """Recompute the copies. The parameters must be on the device."""
        for storage, cast in self._living():
            if not storage.nbytes():
                storage.resize_(cast.num_bytes)
                cast.place.within(storage).copy_(cast.parameter.detach())

    def _living(self) -> list[tuple[torch.UntypedStorage, _Cast]]:
        found = [(key, cast.storage(), cast) for key, cast in self._casts.items()]
        self._casts = {key: cast for key, storage, cast in found if storage is not None}
        return [(storage, cast) for _, storage, cast in found if storage is not None]
