"""Parameters that each rank stores as a shard. Initialization code can fill these parameters like full tensors.

[Note: pages]
Initialization code (constructors, ``reset_parameters``, ``_init_weights``) requires full tensors: it fills them from
one random number generator, and slices, copies and decomposes them. This module provides full tensors one at a time.
The first operation on a paged parameter opens its page, which creates the full tensor, and all operations run on this
tensor. When the page of the next parameter is opened, the rank retains its shard of the previous parameter and frees
the full tensor. At any time, a rank therefore stores only its shards and the full tensors of one operation. The same
kernels run as in a single process, so the ranks sample the same random numbers in the same order.

A page that is opened again is all-gathered from the ranks, unless the operation overwrites it (``normal_``, ``zero_``).
All ranks run the same code, so they all-gather the same pages in the same order.
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
from roomier.techniques.tiers.scratch import Scratch

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
    """Sharding of tensors along the first dimension into the chunks of ``torch.chunk``, as in ``fully_shard``.

    Args:
        num_parts: number of ranks that share a replica.
        index: index of this rank's shard.
    """

    num_parts: int = 1
    index: int = 0

    def rows(self, num_rows: int) -> slice:
        """Return the slice of ``num_rows`` rows that belongs to this rank. The slice may be empty."""
        step = -(-num_rows // self.num_parts)
        return slice(min(self.index * step, num_rows), min((self.index + 1) * step, num_rows))


class Page:
    """One parameter: the shard of this rank, and the full tensor while the page is open.

    Args:
        cut: sharding of the parameter.
        shape: shape of the full tensor.
        dtype: dtype of the parameter.
        device: device of the parameter.
        discards: if True, keep no values, and return zeros when the parameter is read.

    Attributes:
        part: rows of this rank ``[rows, ...]``; None before the first write.
    """

    def __init__(
        self, cut: Cut, shape: torch.Size, dtype: torch.dtype, device: torch.device, *, discards: bool
    ) -> None:
        self.cut, self.shape, self.dtype, self.device, self.discards = cut, shape, dtype, device, discards
        self.part: Tensor | None = None
        self._was_closed = False
        self._whole: Tensor | None = None  # stays set after the page is closed if other code has a view of the tensor

    @property
    def num_bytes(self) -> int:
        """Size of the full tensor in bytes."""
        return self.shape.numel() * self.dtype.itemsize

    def adopt(self, whole: Tensor) -> None:
        """Use ``whole`` as the open page. The owner of ``whole`` may have written values, and may write more values."""
        self._whole = whole

    def open(self, *, is_overwritten: bool) -> Tensor:
        """Return the full tensor. Every rank must call this method."""
        if self.discards:
            if self._whole is None:
                self._whole = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
            return self._whole
        if not is_overwritten and self._was_closed and self.cut.num_parts > 1:
            # All-gather even if the full tensor still exists, because other ranks may have freed the tensor already.
            own = self.part if self._whole is None else self._own_rows()
            assert own is not None
            gathered = self._gather(own)
            if self._whole is None:
                self._whole = gathered
        elif self._whole is None:
            self._whole = self.stored() if self.cut.num_parts == 1 else None
            if self._whole is None:
                self._whole = self._memory()
                if not is_overwritten and self.dtype in _CHECKED_BY_NAN:
                    self._whole.fill_(torch.nan)  # NaN marks elements that are never written
        return self._whole

    def close(self, *, is_final: bool = False) -> bool:
        """Store the shard of this rank and free the full tensor. Return False if other code has a reference to the full
        tensor."""
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

    def gather(self, *, is_kept: bool) -> None:
        """Replace the shard of this rank with the full tensor, or delete it. Every rank must call this method."""
        whole = None if self.discards else self.open(is_overwritten=False)
        self.part = self._whole = None
        if is_kept and whole is not None:
            self.part = whole.clone()  # without the padding
        self.cut = Cut()
        del whole
        if self.num_bytes >= _LARGE_BYTES:
            give_back_freed()

    def stored(self) -> Tensor | None:
        """Return the rows of this rank; None before the first write."""
        return self.part

    def is_written(self) -> bool:
        """Return whether all elements of this rank's shard were written."""
        part = self.stored()
        return part is not None and (self.dtype not in _CHECKED_BY_NAN or not bool(part.isnan().any()))

    def _memory(self) -> Tensor:
        """Return memory for the full tensor, with undefined content."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

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
        # The tensors are gathered as bytes, because not every backend supports every dtype.
        dist.all_gather([_bytes(each) for each in targets if each is not None], _bytes(padded))
        return together[: self.shape[0]]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


class StoredPage(Page):
    """A page whose values are in a file while the page is closed. The parameter is not sharded.

    Args:
        scratch: file in which the values are stored.
        shape: shape of the parameter.
        dtype: dtype of the parameter.
    """

    def __init__(self, scratch: Scratch, shape: torch.Size, dtype: torch.dtype) -> None:
        super().__init__(Cut(), shape, dtype, torch.device("cpu"), discards=False)
        self._scratch = scratch
        self._position = scratch.reserve(max(1, self.num_bytes))

    def close(self, *, is_final: bool = False) -> bool:
        """Unmap the file. Return False if other code has a reference to the tensor."""
        is_closed = super().close(is_final=is_final)
        self.part = None  # the file contains the values
        return is_closed

    def stored(self) -> Tensor | None:
        """Return the values, mapped to the file; None before the first write."""
        return self._memory() if self._was_closed else None

    def _memory(self) -> Tensor:
        content, _ = self._scratch.mapped(self._position, self.num_bytes)
        return content.view(self.dtype).view(self.shape)


class PagedTensor(torch.Tensor):
    """Tensor subclass that replaces the data of a paged parameter. See [Note: pages].

    Attributes:
        page: page of the parameter.
        pages: all pages of the model.
    """

    page: Page
    pages: Pages

    __torch_function__ = torch_private.disabled_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, page: Page, pages: Pages) -> PagedTensor:
        made = torch_private.make_wrapper(cls, page.shape, page.dtype, page.device)
        made.page, made.pages = page, pages
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func.overloadpacket in (_aten.detach, _aten.alias) and isinstance(args[0], PagedTensor):
            return PagedTensor(args[0].page, args[0].pages)
        paged = [each for each in torch_private.iter_leaves((args, kwargs)) if isinstance(each, PagedTensor)]
        return paged[0].pages.run(func, args, kwargs or {}, paged)

    @property
    def data(self) -> Tensor:
        """The paged tensor without autograd history. An assignment to this attribute copies the values."""
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
        cut: sharding of the parameters. Parameters without a dimension are stored in full.
        discards: if True, skip initialization, because the parameters will be loaded later. In this case,
            initialization code writes no values and samples no random numbers.
        scratch: file for the values of parameters that were on the meta device; None to store these values in host
            memory.
    """

    def __init__(self, cut: Cut, *, discards: bool = False, scratch: Scratch | None = None) -> None:
        self.cut, self.discards = cut, discards
        self._scratch = scratch
        self._made: WeakSet[Page] = WeakSet()
        self._open: list[Page] = []
        self._in_use: list[Page] = []  # pages that are closed while other code has a view of the full tensor

    def page_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return a paged parameter that has the values of ``parameter``, or no values if ``parameter`` is on the meta
        device."""
        known: nn.Parameter | None = parameter.__dict__.get("_paged_as")
        if known is not None:  # the parameter is tied
            return known
        is_meta = parameter.is_meta
        device = torch.device("cpu") if is_meta else parameter.device
        cut = self.cut if parameter.dim() else Cut()
        if self._scratch is not None and is_meta and cut.num_parts == 1 and not self.discards:
            page: Page = StoredPage(self._scratch, parameter.shape, parameter.dtype)
        else:
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
        """Run ``func`` with the full tensors instead of the paged tensors."""
        target = args[0] if args and isinstance(args[0], PagedTensor) else None
        if self.discards and target is not None and torch_private.writes_to_arguments(func):
            return target
        wanted = list({id(each.page): each.page for each in paged}.values())
        self._close_others(wanted)
        is_overwritten = func.overloadpacket in _OVERWRITING and [each.page for each in paged].count(paged[0].page) == 1
        wholes = {
            id(page): page.open(
                is_overwritten=page in self._open or (is_overwritten and target is not None and page is target.page)
            )
            for page in wanted
        }
        self._open = wanted

        def whole(value: Any) -> Any:
            return wholes[id(value.page)] if isinstance(value, PagedTensor) else value

        result = func(*torch_private.map_leaves(whole, args), **torch_private.map_leaves(whole, kwargs))
        for each in paged:
            if result is wholes[id(each.page)]:  # an in-place operation returns its argument
                return each
        return result

    def in_use(self) -> list[Page]:
        """Return the pages whose parameters are still referenced."""
        return list(self._made)

    def close(self) -> None:
        """Close all pages. Remaining views of a parameter become independent copies."""
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
    """Replace every parameter that a module registers inside this context with a paged parameter that has the same
    values.

    Args:
        cut: sharding of the parameters.
        discards: see :class:`Pages`.
    """
    pages = Pages(cut, discards=discards)

    def register(_module: nn.Module, _name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        is_sharded = is_pageable(parameter) and parameter.dim() > 0  # parameters without a dimension are not sharded
        return pages.page_of(parameter) if is_sharded and not parameter.is_meta else None

    handle = register_module_parameter_registration_hook(register)  # type: ignore[arg-type]
    try:
        yield pages
    finally:
        handle.remove()


def is_pageable(parameter: object) -> bool:
    """Return whether ``parameter`` is an ordinary ``nn.Parameter``."""
    return type(parameter) is nn.Parameter and not isinstance(parameter, PagedTensor)
