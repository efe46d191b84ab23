"""Models whose weights are never all in the memory of one rank: models on the meta device, and models that
``configure_model`` builds in shards.

The weights are moved out of the model, which is then sharded on the meta device, and each rank allocates its shards and
copies the values into them. A rank never stores more of a model than its shards and one or two full tensors.

[Note: initial values of a meta model]
A constructor that runs on the meta device samples no values. To sample them afterwards, roomier calls each module's
``reset_parameters()`` (Hugging Face: ``initialize_weights()``), on submodules before their parents, as in constructors.
All other initialization in a constructor is lost. A model that is built in ``configure_model`` without the meta device
keeps all initialization.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from roomier.api.module import Module
from roomier.api.overrides import overrides
from roomier.core import torch_fake, torch_private
from roomier.core.device.rng import of_devices, rng_state, set_rng_state
from roomier.core.errors import RoomierError
from roomier.core.log import notice
from roomier.core.ranks import Ranks
from roomier.core.sharded import local_part, with_local_part
from roomier.plan import Plan
from roomier.plan.choices import averages_itself
from roomier.techniques.adapters.layers import is_adapter
from roomier.techniques.parallel.pages import (
    Cut,
    Page,
    PagedTensor,
    Pages,
    StoredPage,
    is_pageable,
    paged_parameters,
)
from roomier.techniques.tiers.scratch import Scratch


@contextmanager
def same_random_numbers(ranks: Ranks) -> Iterator[None]:
    """Use the random state of rank 0 on every rank, and restore the state of each rank afterwards."""
    own = rng_state()
    of_zero = ranks.from_zero(own["torch"])
    differs = ranks.any(not torch.equal(own["torch"], of_zero))
    if differs:
        set_rng_state({**ranks.from_zero(own), **of_devices(own)})
    yield
    if differs and not ranks.is_zero:
        set_rng_state(own)


@dataclass(frozen=True)
class EmptyBuffer:
    """Buffer that was on the meta device and is now on the CPU. A floating-point buffer is filled with NaN.

    Attributes:
        name: fully qualified name of the buffer.
        owner: module that registered the buffer.
        attribute: name of the buffer in ``owner``.
        tensor: allocated tensor on the CPU.
        version: value of autograd's version counter for ``tensor`` when the tensor was created.
    """

    name: str
    owner: nn.Module
    attribute: str
    tensor: Tensor
    version: int

    def is_written(self) -> bool:
        """Return whether the buffer was replaced or written, and contains no NaN."""
        now = getattr(self.owner, self.attribute)
        if now is self.tensor and torch_private.version_of(now) == self.version:
            return False
        return not (now.is_floating_point() and bool(now.isnan().any()))


def empty_buffers(network: nn.Module) -> list[EmptyBuffer]:
    """Allocate memory on the CPU for each buffer that is on the meta device."""
    made: list[EmptyBuffer] = []
    real: dict[int, Tensor] = {}
    for prefix, module in network.named_modules():
        for attribute, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if not buffer.is_meta:
                continue
            if id(buffer) not in real:
                empty = torch.empty_like(buffer, device="cpu")
                real[id(buffer)] = empty.fill_(torch.nan) if empty.is_floating_point() else empty
            tensor = real[id(buffer)]
            setattr(module, attribute, tensor)
            name = f"{prefix}.{attribute}" if prefix else attribute
            made.append(EmptyBuffer(name, module, attribute, tensor, torch_private.version_of(tensor)))
    return made


@torch.no_grad()
def initialise(network: nn.Module, meta_tensors: set[str]) -> None:
    """Call the initializer of each module that was on the meta device; see [Note: initial values of a meta model].

    Args:
        network: model with paged parameters and allocated buffers.
        meta_tensors: names of the parameters and buffers that were on the meta device. A module is initialized if all
            of its parameters were on the meta device. A module without parameters is initialized if all of its buffers
            were on the meta device.
    """
    done: set[nn.Module] = set()
    for name, module in _children_first(network, ""):
        if module in done:  # registered in two places
            continue
        done.add(module)
        first_values = _initializer_of(module)
        if first_values is not None and _is_new(name, module, meta_tensors):
            first_values()


def initialise_buffers(network: nn.Module) -> None:
    """Allocate and initialize the buffers that are on the meta device, without writing to parameters."""
    buffers = {name for name, each in network.named_buffers(remove_duplicate=False) if each.is_meta}
    if not buffers:
        return
    pages, replaced = Pages(Cut(), discards=True), dict[nn.Parameter, nn.Parameter]()

    def paged(parameter: nn.Parameter) -> nn.Parameter:
        made = pages.page_of(parameter)
        replaced[made] = parameter
        return made

    replace_parameters(network, paged)
    empty_buffers(network)
    initialise(network, {*buffers, *(name for name, _ in network.named_parameters(remove_duplicate=False))})
    replace_parameters(network, replaced.__getitem__)


def report_lost_initialization(network: nn.Module, meta_tensors: set[str]) -> None:
    """Print a notice if a constructor may have initialized the parameters of its module on the meta device, because
    this initialization is lost.

    If ``network`` creates its submodules on the meta device in ``configure_model``, its own constructor did not run on
    the meta device, so only the submodules are checked.

    Args:
        network: model with paged parameters.
        meta_tensors: names of the parameters and buffers that were on the meta device.
    """
    configures = overrides(network, "configure_model", Module)
    own = next(network.parameters(recurse=False), None)
    lost = _first_lost(network, "", meta_tensors, is_configured=configures and own is None)
    if lost is None:
        return
    action = f"build {lost} in configure_model"
    if configures:
        action = f"build {lost} on a real device in configure_model, without torch.device('meta')"
    notice(
        f"{lost} was built on the meta device, so its submodules are initialized by their own reset_parameters(). "
        f"Other initialization in its __init__ is lost. To keep this initialization, {action}, or define "
        f"reset_parameters() in {lost}"
    )


def check_written(network: nn.Module, buffers: list[EmptyBuffer], given: set[str], ranks: Ranks) -> None:
    """Check, on all ranks together, that every parameter and buffer has values.

    Args:
        buffers: the result of :func:`empty_buffers`.
        given: names of the tensors that will be read from a file.

    Raises:
        RoomierError: a tensor has no values. The error names the tensor and the class of its module.
    """
    missing = [
        name
        for name, parameter in network.named_parameters()
        if name not in given and isinstance(parameter, PagedTensor) and not parameter.page.is_written()
    ]
    missing += [each.name for each in buffers if each.name not in given and not each.is_written()]
    missing = list(dict.fromkeys(name for names in ranks.gather(missing) for name in names))
    if not missing:
        return
    owner = type(network.get_submodule(missing[0].rpartition(".")[0])).__name__
    more = f". {len(missing) - 1} other parameters and buffers have no values either" if len(missing) > 1 else ""
    raise RoomierError(
        "model",
        missing[0],
        f"was built on the meta device, and no reset_parameters() method of {owner} or of an enclosing module "
        f"initializes it{more}",
        f"Define reset_parameters() in {owner}, build the model in configure_model or on a real device, or pass the "
        "values with fit(weights=...)",
    )


def _children_first(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        yield from _children_first(child, f"{name}.{child_name}" if name else child_name)
    yield name, module


def _initializer_of(module: nn.Module) -> Callable[[], object] | None:
    found = torch_private.initializer_of_transformers(module) or getattr(module, "reset_parameters", None)
    found = found or torch_private.reset_of_torch(module)
    return found if callable(found) else None


def _is_new(name: str, module: nn.Module, meta_tensors: set[str]) -> bool:
    names = [each for each, _ in module.named_parameters(name) if not is_adapter(each)]
    names = names or [each for each, _ in module.named_buffers(name)]
    return bool(names) and meta_tensors.issuperset(names)


def _first_lost(module: nn.Module, name: str, meta_tensors: set[str], *, is_configured: bool = False) -> str | None:
    """Return the class name of the first module on the meta device that has no initializer; None if all have one.
    Parents are checked before children."""
    if next(module.parameters(), None) is None:
        return None
    # Constructors of torch's classes initialize parameters in the same way as their reset_parameters method.
    # Constructors of other classes may initialize parameters differently.
    is_of_torch = type(module).__module__.split(".")[0] == "torch"
    if is_of_torch or is_configured or not _is_new(name, module, meta_tensors):
        children = ((each, f"{name}.{key}" if name else key) for key, each in module.named_children())
        found = (_first_lost(child, path, meta_tensors) for child, path in children)
        return next((each for each in found if each is not None), None)
    return None if _initializer_of(module) is not None else type(module).__name__


@contextmanager
def built_in_parts(plan: Plan, ranks: Ranks, *, has_weights: bool = False, in_stages: bool = False) -> Iterator[None]:
    """Keep only this rank's shard of each parameter that is created inside this context, if the strategy of ``plan``
    shards parameters, or if ``in_stages``.

    The values are bit-identical to the values in a single process that starts from the random state of rank 0,
    regardless of the code that initializes the parameters.

    Args:
        has_weights: whether a file provides all values. If True, no values are sampled.
        in_stages: whether the parameters will be moved to the stages of a pipeline.
    """
    if ranks.is_alone:
        yield
        return
    paging: AbstractContextManager[object] = nullcontext()
    if in_stages or shards_parameters(plan, ranks):
        paging = paged_parameters(_cut_of(plan, ranks, in_stages), discards=has_weights)
    with same_random_numbers(ranks), paging:
        yield


class TakenWeights:
    """Weights that were moved out of a network, so that the network can be sharded on the meta device.

    Args:
        pages: the weights by name.
        has_weights: whether a file provides the values. If True, the pages contain no values.
        scratch: file that stores the pages; None if they are in host memory.
    """

    def __init__(self, pages: dict[str, Page], *, has_weights: bool, scratch: Scratch | None) -> None:
        self._pages = pages
        self._has_weights = has_weights
        self._scratch = scratch

    def values_of(self, network: nn.Module) -> Callable[[nn.Parameter], Tensor | None]:
        """Return a function that maps a parameter of ``network`` to its values, or to None if a file provides them.

        The returned function can be called only once for each parameter.
        """
        names = {id(each): name for name, each in network.named_parameters()}

        def values(parameter: nn.Parameter) -> Tensor | None:
            page = self._pages.pop(names[id(parameter)])
            return None if self._has_weights else page.stored()

        return values

    @torch.no_grad()
    def move_to_stages(self, owners: Mapping[str, tuple[int, ...]], stage: int) -> None:
        """Replace the shards of the weights that ``stage`` stores with full tensors, and delete all other shards. Every
        rank must call this method.

        Args:
            owners: for each parameter, the numbers of the stages that store it.
            stage: number of this rank's stage.
        """
        counts: Counter[tuple[int, ...]] = Counter()

        def turn(name: str) -> int:
            counts[owners[name]] += 1
            return counts[owners[name]]

        # The stages take turns, so the memory of each rank hardly grows: it frees shards of all stages.
        for name in sorted(self._pages, key=turn):
            self._pages[name].gather(is_kept=stage in owners[name])
            if stage not in owners[name]:
                del self._pages[name]

    @torch.no_grad()
    def restore(self, root: nn.Module, network: nn.Module, device: torch.device) -> None:
        """Allocate this rank's shards of ``network`` on ``device`` and copy the values into them. The weights of other
        stages of a pipeline remain on the meta device.

        Args:
            root: the module that wraps ``network``, or ``network`` itself.
            network: the network whose weights were removed.
            device: the device of this rank.
        """
        pages = {id(each): self._pages.pop(name) for name, each in network.named_parameters() if name in self._pages}

        def real(tensor: Tensor) -> Tensor:
            page = pages.pop(id(tensor), None)  # one by one, so that only one weight exists on two devices at a time
            if page is not None:
                return self._real(tensor, page, device)
            return tensor if tensor.is_meta else tensor.to(device)

        def whole(parameter: nn.Parameter) -> nn.Parameter:
            is_whole = parameter.is_meta and type(parameter) is nn.Parameter
            return _with_attributes(parameter, real(parameter)) if is_whole else parameter

        replace_parameters(network, whole)  # preserves tied parameters; convert_tensors preserves sharded ones
        torch_private.convert_tensors(root, real)
        if self._scratch is not None:
            self._scratch.close()

    def _real(self, tensor: Tensor, page: Page, device: torch.device) -> Tensor:
        shape = local_part(tensor).shape
        if self._has_weights:
            return with_local_part(tensor, torch.empty(shape, dtype=tensor.dtype, device=device))
        part = page.stored()
        assert part is not None
        assert part.shape == shape
        return with_local_part(tensor, part.to(device, tensor.dtype, copy=isinstance(page, StoredPage)))


def take_weights(
    network: nn.Module, plan: Plan, ranks: Ranks, *, given: set[str] | None = None, in_stages: bool = False
) -> TakenWeights | None:
    """Replace the parameters of ``network`` with parameters on the meta device.

    Tensors that are already on the meta device are initialized first; see [Note: initial values of a meta model].

    Args:
        given: names of the tensors that will be read from a file, including all parameters; None if no file is read.
        in_stages: whether the weights will be moved to the stages of a pipeline.

    Returns:
        The weights; None if no tensor is on the meta device or sharded, in which case ``network`` is not changed.

    Raises:
        RoomierError: a parameter or buffer receives no values.
    """
    parameters = list(network.named_parameters(remove_duplicate=False))
    meta_tensors = {name for name, each in parameters if each.is_meta}
    meta_tensors |= {name for name, each in network.named_buffers(remove_duplicate=False) if each.is_meta}
    if not meta_tensors and not any(isinstance(each, PagedTensor) for _, each in parameters):
        return None
    cut = _cut_of(plan, ranks, in_stages)
    stores = plan.offload.parameters == "disk" and cut.num_parts == 1 and not torch_fake.makes_fake_tensors()
    scratch = Scratch(plan.offload.folder) if stores else None  # keeps at most one parameter in host memory
    pages = Pages(cut, discards=given is not None, scratch=scratch)
    small = {each for name, each in parameters if is_adapter(name)}  # adapters have values, and no file contains them
    replace_parameters(network, lambda each: pages.page_of(each) if is_pageable(each) and each not in small else each)
    if meta_tensors:
        if given is None:
            report_lost_initialization(network, meta_tensors)
        buffers = empty_buffers(network)
        with same_random_numbers(ranks):
            initialise(network, meta_tensors)
    tables = {each.pages: None for each in network.parameters() if isinstance(each, PagedTensor)}
    for table in tables:
        table.close()
    _refuse_strays(network, list(tables))
    if meta_tensors:
        check_written(network, buffers, given or set(), ranks)
    taken = {name: each.page for name, each in network.named_parameters() if isinstance(each, PagedTensor)}
    replace_parameters(network, lambda each: on_meta(each) if isinstance(each, PagedTensor) else each)
    return TakenWeights(taken, has_weights=given is not None, scratch=scratch)


def _refuse_strays(network: nn.Module, tables: list[Pages]) -> None:
    # Parameters that do not belong to the network would remain paged, and each operation would all-gather them.
    known = {each.page for each in network.parameters() if isinstance(each, PagedTensor)}

    def strays() -> list[Page]:
        return [page for table in tables for page in table.in_use() if page not in known]

    if not strays():
        return
    gc.collect()  # parameters that were created and dropped may be waiting for the garbage collector
    found = [tuple(page.shape) for page in strays()]
    if found:
        problem = f"created {len(found)} parameters (with these shapes) that are not parameters of the module"
        action = "Assign the module that owns these parameters to an attribute of self, or build that module in setup()"
        raise RoomierError("configure_model", found, problem, action)


def shards_parameters(plan: Plan, ranks: Ranks) -> bool:
    """Return whether the strategy of ``plan`` shards parameters across ranks. In a pipeline, only the parameters of a
    stage are sharded, after they were moved to it."""
    parallel = plan.parallel
    is_whole = parallel.strategy in ("single", "ddp") or averages_itself(plan.optimizer.name)
    return not (ranks.is_alone or is_whole or parallel.pipeline_parallel_size > 1)


def _cut_of(plan: Plan, ranks: Ranks, in_stages: bool) -> Cut:
    if in_stages:  # the stages are not known while the values are sampled, so each rank stores an equal part
        return Cut(ranks.world.size, ranks.world.rank)
    shards = plan.parallel.mesh_on(ranks.world).shards
    return Cut(shards.size, shards.rank) if shards_parameters(plan, ranks) else Cut()


def replace_parameters(network: nn.Module, replace: Callable[[nn.Parameter], nn.Parameter]) -> None:
    """Replace each parameter of ``network`` with the result of ``replace``. Shared parameters remain shared."""
    replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # keeps the old parameter, so that its id is not reused
    for module in network.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) not in replaced:
                replaced[id(parameter)] = (parameter, replace(parameter))
            _, new = replaced[id(parameter)]
            if new is not parameter:
                setattr(module, name, new)


def on_meta(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter on the meta device with the shape and the attributes of ``parameter``."""
    return _with_attributes(parameter, torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))


def _with_attributes(parameter: nn.Parameter, data: Tensor) -> nn.Parameter:
    """Return a plain parameter with ``data`` and the attributes that users set on ``parameter``."""
    made = nn.Parameter(data, requires_grad=parameter.requires_grad)
    own = {"page", "pages", "_paged_as", *made.__dict__}  # a fake tensor has its device in its ``__dict__``
    made.__dict__.update({key: each for key, each in parameter.__dict__.items() if key not in own})
    return made
