"""Models that come without memory for their weights: on ``meta``, or built part by part in ``configure_model``.

The weights are taken out, the model is cut among the ranks while it is on ``meta``, memory is made for what each rank
keeps of it, and its part of each weight is put in. No rank holds more of a model than its part and a tensor or two.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from roomier.adapters.layers import is_adapter
from roomier.core import torch_private
from roomier.core.errors import RoomierError
from roomier.core.ranks import Ranks
from roomier.engine.initial_weights import (
    check_written,
    empty_buffers,
    initialise,
    same_random_numbers,
    tell_what_is_lost,
)
from roomier.parallel.pages import (
    Cut,
    Page,
    PagedTensor,
    Pages,
    is_pageable,
    local_part,
    paged_parameters,
    with_local_part,
)
from roomier.plan import Plan


@contextmanager
def built_in_parts(plan: Plan, ranks: Ranks, *, has_weights: bool = False) -> Iterator[None]:
    """What is built inside keeps, of each parameter, the part of this rank, where the strategy of ``plan`` cuts it.

    The values are those of one process that starts from the random state of rank 0, bit for bit, whatever the code does
    to initialise them.

    Args:
        has_weights: all of the values will come from a file: none are drawn.
    """
    if ranks.is_alone:
        yield
        return
    in_parts = cuts_parameters(plan, ranks)
    paging: AbstractContextManager[object] = nullcontext()
    if in_parts:
        paging = paged_parameters(_cut_of(plan, ranks), discards=has_weights)
    with same_random_numbers(ranks), paging:
        yield


class TakenWeights:
    """The weights of a network that is on ``meta`` for as long as it is cut.

    Args:
        pages: by name.
        has_weights: they have no values and get none: a file has them all.
    """

    def __init__(self, pages: dict[str, Page], *, has_weights: bool) -> None:
        self._pages = pages
        self._has_weights = has_weights

    @torch.no_grad()
    def put_back(self, root: nn.Module, network: nn.Module, device: torch.device) -> None:
        """Memory on ``device`` for all of ``network`` that this rank keeps, and the values in it.

        Args:
            root: what ``network`` was wrapped in to be cut, or ``network``.
        """
        pages = {id(each): self._pages.pop(name) for name, each in network.named_parameters() if name in self._pages}

        def real(tensor: Tensor) -> Tensor:
            page = pages.pop(id(tensor), None)  # one by one: on another device, each is there twice for a moment only
            return tensor.to(device) if page is None else self._real(tensor, page, device)

        def whole(parameter: nn.Parameter) -> nn.Parameter:
            is_whole = parameter.is_meta and type(parameter) is nn.Parameter
            return _with_attributes(parameter, real(parameter)) if is_whole else parameter

        _replace_parameters(network, whole)  # it keeps tied ones tied, and convert_tensors those that are sharded
        torch_private.convert_tensors(root, real)

    def _real(self, tensor: Tensor, page: Page, device: torch.device) -> Tensor:
        shape = local_part(tensor).shape
        if self._has_weights:
            return with_local_part(tensor, torch.empty(shape, dtype=tensor.dtype, device=device))
        assert page.part is not None
        assert page.part.shape == shape
        return with_local_part(tensor, page.part.to(device, tensor.dtype))


def take_weights(network: nn.Module, plan: Plan, ranks: Ranks, *, given: set[str] | None = None) -> TakenWeights | None:
    """Leave ``network`` with parameters on ``meta``; None where all of it is on a device and nothing is to be done.

    What is on ``meta`` already is initialised first, see [Note: first values of a meta model].

    Args:
        given: names of the tensors that will be read from a file, all parameters among them; None for no file.

    Raises:
        RoomierError: a parameter or buffer gets no values.
    """
    parameters = list(network.named_parameters(remove_duplicate=False))
    meta_tensors = {name for name, each in parameters if each.is_meta}
    meta_tensors |= {name for name, each in network.named_buffers(remove_duplicate=False) if each.is_meta}
    if not meta_tensors and not any(isinstance(each, PagedTensor) for _, each in parameters):
        return None
    cut = _cut_of(plan, ranks) if cuts_parameters(plan, ranks) else Cut()
    pages = Pages(cut, discards=given is not None)
    small = {each for name, each in parameters if is_adapter(name)}  # they have values, which no file holds
    _replace_parameters(network, lambda each: pages.page_of(each) if is_pageable(each) and each not in small else each)
    if meta_tensors:
        if given is None:
            tell_what_is_lost(network)
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
    return TakenWeights(taken, has_weights=given is not None)


def _refuse_strays(network: nn.Module, tables: list[Pages]) -> None:
    # One that is not a part of the model would stay paged, and be gathered by each operation on it.
    known = {each.page for each in network.parameters() if isinstance(each, PagedTensor)}

    def strays() -> list[Page]:
        return [page for table in tables for page in table.in_use() if page not in known]

    if not strays():
        return
    gc.collect()  # what was built and dropped may wait for it
    found = [tuple(page.shape) for page in strays()]
    if found:
        problem = f"made {len(found)} parameters (of these shapes) that are not parameters of the module"
        action = "Assign the module that has them to an attribute of self, or build it in setup()"
        raise RoomierError("configure_model", found, problem, action)


def cuts_parameters(plan: Plan, ranks: Ranks) -> bool:
    """Whether the strategy of ``plan`` leaves each rank a part of each parameter."""
    is_whole = plan.parallel.strategy in ("single", "ddp") or plan.optimizer.name == "onebit_adam"
    return not ranks.is_alone and not is_whole


def _cut_of(plan: Plan, ranks: Ranks) -> Cut:
    num_shards = plan.parallel.num_shards
    return Cut(num_shards, ranks.world.rank % num_shards)  # neighbouring ranks share a copy, see make_mesh


def _replace_parameters(network: nn.Module, replace: Callable[[nn.Parameter], nn.Parameter]) -> None:
    replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # with the old one, so that its id stays its own
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
    """A plain parameter of ``data``, and what users wrote on ``parameter``."""
    made = nn.Parameter(data, requires_grad=parameter.requires_grad)
    own = ("page", "pages", "_paged_as")
    made.__dict__.update({key: each for key, each in parameter.__dict__.items() if key not in own})
    return made
