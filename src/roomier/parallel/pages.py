"""Parameters of which each rank keeps its part, and that plain code can still fill as if they were whole.

[Note: pages]
Code that gives parameters their first values (constructors, ``reset_parameters``, ``_init_weights``) takes tensors that
are whole: it draws from one generator, slices, copies, decomposes. Here it gets them whole, one at a time. A paged
parameter is opened by the first operation on it: the whole tensor is there, and the operation runs on it as on any
tensor. When the next parameter is opened, this rank's part is kept and the whole is freed. The numbers drawn, and their
order, are those of one process, since the kernels called are; the memory is the parts and the tensors of one operation.

A page that is opened again is gathered from the ranks, unless the operation overwrites it (``normal_``, ``zero_``).
All ranks run the same code, so they gather the same pages in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from roomier.core import torch_private
from roomier.core.host_memory import give_back_freed

_aten = torch.ops.aten
_OVERWRITING = {
    _aten.normal_,
    _aten.uniform_,
    _aten.zero_,
    _aten.fill_,
    _aten.copy_,
    _aten.bernoulli_,
    _aten.exponential_,
    _aten.random_,
    _aten.cauchy_,
    _aten.log_normal_,
    _aten.geometric_,
}
_LARGE_BYTES = 4 * 2**20
_CHECKED_BY_NAN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Cut:
    """How tensors are cut along their first dimension: ``torch.chunk``, as ``fully_shard`` does.

    Args:
        num_parts: ranks that share one copy. index: which part is this rank's.
    """

    num_parts: int = 1
    index: int = 0

    def rows(self, num_rows: int) -> slice:
        """The rows of this rank, of ``num_rows``; none is possible."""
        step = -(-num_rows // self.num_parts)
        return slice(min(self.index * step, num_rows), min((self.index + 1) * step, num_rows))


class Page:
    """One parameter: its part on this rank, and the whole of it while it is open.

    Args:
        discards: no values are kept, and all that is read is zeros.

    Attributes:
        part: rows of this rank ``[rows, ...]``; None while nothing was ever written.
    """

    def __init__(
        self, cut: Cut, shape: torch.Size, dtype: torch.dtype, device: torch.device, *, discards: bool
    ) -> None:
        self.cut, self.shape, self.dtype, self.device, self.discards = cut, shape, dtype, device, discards
        self.part: Tensor | None = None
        self._was_closed = False
        self._whole: Tensor | None = None  # there longer than it is open where somebody holds a view of it

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def adopt(self, whole: Tensor) -> None:
        """``whole``, which may have values and may be written to by its owner, is the open page."""
        self._whole = whole

    def open(self, *, is_overwritten: bool) -> Tensor:
        """The whole tensor. Every rank calls this."""
        if self.discards:
            if self._whole is None:
                self._whole = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
            return self._whole
        if not is_overwritten and self._was_closed and self.cut.num_parts > 1:
            # Also where the whole is still here: whether a view of it lives may differ from rank to rank.
            own = self.part if self._whole is None else self._own_rows()
            assert own is not None
            gathered = self._gather(own)
            if self._whole is None:
                self._whole = gathered
        elif self._whole is None:
            self._whole = self.part if self.cut.num_parts == 1 else None
            if self._whole is None:
                self._whole = torch.empty(self.shape, dtype=self.dtype, device=self.device)
                if not is_overwritten and self.dtype in _CHECKED_BY_NAN:
                    self._whole.fill_(torch.nan)  # so that what is never written is found
        return self._whole

    def close(self, *, is_final: bool = False) -> bool:
        """Keep the part and free the whole, unless it is in use elsewhere. Whether it was freed."""
        assert self._whole is not None
        if self.discards:
            self._whole = None
            return True
        self._was_closed = True
        if torch_private.is_shared(self._whole) and not is_final:
            return False
        if self.cut.num_parts == 1:
            self.part = self._whole
        elif self.part is None:
            self.part = self._own_rows().clone(memory_format=torch.contiguous_format)
        else:
            self.part.copy_(self._own_rows())
        self._whole = None
        return True

    def holds(self, tensor: object) -> bool:
        return tensor is self._whole

    def is_written(self) -> bool:
        """Whether this rank's part has values."""
        if self.part is None:
            return False
        return self.dtype not in _CHECKED_BY_NAN or not bool(self.part.isnan().any())

    def _own_rows(self) -> Tensor:
        assert self._whole is not None
        return self._whole[self.cut.rows(len(self._whole))]

    def _gather(self, part: Tensor) -> Tensor:
        step = -(-self.shape[0] // self.cut.num_parts)
        padded = torch.zeros(step, *self.shape[1:], dtype=self.dtype, device=self.device)
        padded[: len(part)] = part
        together = torch.empty(self.cut.num_parts * step, *self.shape[1:], dtype=self.dtype, device=self.device)
        own_group = range(dist.get_rank() - self.cut.index, dist.get_rank() - self.cut.index + self.cut.num_parts)
        spare = None if len(own_group) == dist.get_world_size() else torch.empty_like(padded)
        targets = [
            together[(rank - own_group.start) * step :][:step] if rank in own_group else spare
            for rank in range(dist.get_world_size())
        ]
        # As bytes: not every backend knows every dtype.
        dist.all_gather([_bytes(each) for each in targets if each is not None], _bytes(padded))
        return together[: self.shape[0]]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


class PagedTensor(torch.Tensor):
    """What stands in the place of a parameter that is paged. See [Note: pages]."""

    page: Page
    pages: Pages

    __torch_function__ = torch_private.disabled_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, page: Page, pages: Pages) -> PagedTensor:
        made = torch_private.make_wrapper(cls, page.shape, page.dtype, page.device)
        made.page, made.pages = page, pages
        return made

    def __init__(self, page: Page, pages: Pages) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func.overloadpacket in (_aten.detach, _aten.alias) and isinstance(args[0], PagedTensor):
            return PagedTensor(args[0].page, args[0].pages)
        paged = [each for each in torch_private.iter_leaves((args, kwargs)) if isinstance(each, PagedTensor)]
        return paged[0].pages.run(func, args, kwargs or {}, paged)

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        with torch.no_grad():
            self.copy_(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            with torch.no_grad():
                copied = self.pages.page_of(nn.Parameter(self.detach().clone(), self.requires_grad))
            copied.__dict__.update({key: each for key, each in self.__dict__.items() if key not in ("page", "pages")})
            memo[id(self)] = copied
        found: Tensor = memo[id(self)]
        return found

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PagedTensor({tuple(self.shape)}, {self.dtype})"


class Pages:
    """The paged parameters of one model.

    Args:
        cut: which part of each this rank keeps; of one without a dimension all.
        discards: the parameters will be overwritten from elsewhere: nothing is written to them, and nothing drawn.
    """

    def __init__(self, cut: Cut, *, discards: bool = False) -> None:
        self.cut, self.discards = cut, discards
        self._made: WeakSet[Page] = WeakSet()
        self._open: list[Page] = []
        self._in_use: list[Page] = []  # closed, but a view of the whole is held by somebody

    def page_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """A paged parameter with the values of ``parameter``, or without any where that is on the meta device."""
        known: nn.Parameter | None = parameter.__dict__.get("_paged_as")
        if known is not None:  # registered in a second place: tied
            return known
        is_meta = parameter.is_meta
        device = torch.device("cpu") if is_meta else parameter.device
        cut = self.cut if parameter.dim() else Cut()
        page = Page(cut, parameter.shape, parameter.dtype, device, discards=self.discards)
        self._made.add(page)
        if not is_meta and not self.discards:
            self._close_others([page])
            page.adopt(parameter.detach())
            self._open = [page]
        paged = nn.Parameter(PagedTensor(page, self), requires_grad=parameter.requires_grad)
        paged.page, paged.pages = page, self  # type: ignore[attr-defined]
        paged.__dict__.update(parameter.__dict__)
        parameter.__dict__["_paged_as"] = paged
        return paged

    def run(self, func: Any, args: Any, kwargs: Any, paged: Sequence[PagedTensor]) -> Any:
        """``func`` on the whole tensors."""
        target = args[0] if args and isinstance(args[0], PagedTensor) else None
        if self.discards and target is not None and torch_private.writes_to_arguments(func):
            return target
        wanted = list({id(each.page): each.page for each in paged}.values())
        self._close_others(wanted)
        is_overwritten = func.overloadpacket in _OVERWRITING and [each.page for each in paged].count(paged[0].page) == 1
        wholes = {
            id(page): page.open(is_overwritten=is_overwritten and target is not None and page is target.page)
            if page not in self._open
            else page.open(is_overwritten=True)  # it is there
            for page in wanted
        }
        self._open = wanted

        def whole(value: Any) -> Any:
            return wholes[id(value.page)] if isinstance(value, PagedTensor) else value

        result = func(*torch_private.map_leaves(whole, args), **torch_private.map_leaves(whole, kwargs))
        for each in paged:
            if each.page.holds(result):  # an operation in place returns what it was given
                return each
        return result

    def in_use(self) -> list[Page]:
        """The pages that somebody holds a parameter of."""
        return list(self._made)

    def close(self) -> None:
        """Nothing is open any more; whoever still holds a view of a parameter holds a copy of its own."""
        for page in dict.fromkeys((*self._open, *self._in_use)):
            page.close(is_final=True)
        self._open, self._in_use = [], []

    def _close_others(self, wanted: list[Page]) -> None:
        closing = [page for page in (*self._open, *self._in_use) if page not in wanted]
        self._in_use = [page for page in self._in_use if page in wanted]
        for page in dict.fromkeys(closing):
            if not page.close():
                self._in_use.append(page)
            elif page.num_bytes >= _LARGE_BYTES:
                give_back_freed()
        self._open = [page for page in self._open if page in wanted]


@contextmanager
def paged_parameters(cut: Cut, *, discards: bool = False) -> Iterator[Pages]:
    """Every parameter that a module is given inside is paged, its values with it."""
    pages = Pages(cut, discards=discards)

    def register(_module: nn.Module, _name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        is_cut = is_pageable(parameter) and parameter.dim() > 0  # what has no dimension is held whole anyway
        return pages.page_of(parameter) if is_cut and not parameter.is_meta else None

    handle = register_module_parameter_registration_hook(register)  # type: ignore[arg-type]
    try:
        yield pages
    finally:
        handle.remove()


def is_pageable(parameter: object) -> bool:
    """Whether it is a parameter of the plain kind."""
    return type(parameter) is nn.Parameter and not isinstance(parameter, PagedTensor)


def local_part(tensor: Tensor) -> Tensor:
    """What this rank has of ``tensor``: all of it, unless it is sharded."""
    if not _may_be_sharded(tensor):
        return tensor
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def with_local_part(tensor: Tensor, part: Tensor) -> Tensor:
    """``part`` as what this rank has of a tensor that is cut as ``tensor`` is."""
    if not _may_be_sharded(tensor):
        return part
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return part
    return DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def local_rows(tensor: Tensor) -> slice:
    """Which rows of ``tensor`` this rank has; it is whole, or sharded along its first dimension."""
    if not _may_be_sharded(tensor):
        return slice(0, tensor.shape[0])
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, DTensor):
        for dimension, placement in enumerate(tensor.placements):
            if placement.is_shard():
                cut = Cut(tensor.device_mesh.size(dimension), tensor.device_mesh.get_local_rank(dimension))
                return cut.rows(tensor.shape[0])
    return slice(0, tensor.shape[0])


def _may_be_sharded(tensor: Tensor) -> bool:
    # DTensor takes half a second to import, which one process does not pay.
    return type(tensor) not in (Tensor, nn.Parameter)
