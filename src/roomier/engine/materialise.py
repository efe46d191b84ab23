"""Models whose weights are never all in the memory of one rank: models on the meta device, and models that
``configure_model`` builds in shards.

The weights are moved out of the model, which is then sharded on the meta device. Each rank allocates its shards and
copies the values into them. A rank never stores more of a model than its shards and one or two full tensors.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from roomier.core import torch_fake, torch_private
from roomier.core.errors import RoomierError
from roomier.core.ranks import Ranks
from roomier.core.sharded import local_part, with_local_part
from roomier.engine.initial_weights import (
    check_written,
    empty_buffers,
    initialise,
    report_lost_initialization,
    same_random_numbers,
)
from roomier.plan import Plan
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
def built_in_parts(plan: Plan, ranks: Ranks, *, has_weights: bool = False) -> Iterator[None]:
    """Keep only this rank's shard of each parameter that is created inside this context, if the strategy of ``plan``
    shards parameters.

    The values are bit-identical to the values in a single process that starts from the random state of rank 0,
    regardless of the code that initializes the parameters.

    Args:
        has_weights: whether a file provides all values. If True, no values are sampled.
    """
    if ranks.is_alone:
        yield
        return
    in_parts = shards_parameters(plan, ranks)
    paging: AbstractContextManager[object] = nullcontext()
    if in_parts:
        paging = paged_parameters(_shard_of(plan, ranks), discards=has_weights)
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
    def restore(self, root: nn.Module, network: nn.Module, device: torch.device) -> None:
        """Allocate this rank's shards of ``network`` on ``device`` and copy the values into them.

        Args:
            root: the module that wraps ``network``, or ``network`` itself.
            network: the network whose weights were removed.
            device: the device of this rank.
        """
        pages = {id(each): self._pages.pop(name) for name, each in network.named_parameters() if name in self._pages}

        def real(tensor: Tensor) -> Tensor:
            page = pages.pop(id(tensor), None)  # one by one, so that only one weight exists on two devices at a time
            return tensor.to(device) if page is None else self._real(tensor, page, device)

        def whole(parameter: nn.Parameter) -> nn.Parameter:
            is_whole = parameter.is_meta and type(parameter) is nn.Parameter
            return _with_attributes(parameter, real(parameter)) if is_whole else parameter

        _replace_parameters(network, whole)  # preserves tied parameters; convert_tensors preserves sharded ones
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


def take_weights(network: nn.Module, plan: Plan, ranks: Ranks, *, given: set[str] | None = None) -> TakenWeights | None:
    """Replace the parameters of ``network`` with parameters on the meta device.

    Tensors that are already on the meta device are initialized first; see [Note: initial values of a meta model].

    Args:
        given: names of the tensors that will be read from a file, including all parameters; None if no file is read.

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
    cut = _shard_of(plan, ranks) if shards_parameters(plan, ranks) else Cut()
    stores = plan.offload.parameters == "disk" and cut.num_parts == 1 and not torch_fake.makes_fake_tensors()
    scratch = Scratch(plan.offload.folder) if stores else None  # keeps at most one parameter in host memory
    pages = Pages(cut, discards=given is not None, scratch=scratch)
    small = {each for name, each in parameters if is_adapter(name)}  # adapters have values, and no file contains them
    _replace_parameters(network, lambda each: pages.page_of(each) if is_pageable(each) and each not in small else each)
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
    _replace_parameters(network, _on_meta)
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
    """Return whether the strategy of ``plan`` shards parameters across ranks."""
    is_whole = plan.parallel.strategy in ("single", "ddp") or plan.optimizer.name == "onebit_adam"
    return not ranks.is_alone and not is_whole


def _shard_of(plan: Plan, ranks: Ranks) -> Cut:
    num_shards = plan.parallel.num_shards
    return Cut(num_shards, ranks.world.rank % num_shards)  # neighboring ranks share a replica; see make_mesh


def _replace_parameters(network: nn.Module, replace: Callable[[nn.Parameter], nn.Parameter]) -> None:
    replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # keeps the old parameter, so that its id is not reused
    for module in network.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) not in replaced:
                replaced[id(parameter)] = (parameter, replace(parameter))
            _, new = replaced[id(parameter)]
            if new is not parameter:
                setattr(module, name, new)


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    if not isinstance(parameter, PagedTensor):
        return parameter
    return _with_attributes(parameter, torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))


def _with_attributes(parameter: nn.Parameter, data: Tensor) -> nn.Parameter:
    """Return a plain parameter with ``data`` and the attributes that users set on ``parameter``."""
    made = nn.Parameter(data, requires_grad=parameter.requires_grad)
    own = ("page", "pages", "_paged_as")
    made.__dict__.update({key: each for key, each in parameter.__dict__.items() if key not in own})
    return made
