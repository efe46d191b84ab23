"""Amounts of computation: launched kernels, floating-point operations, bytes read and written, and bytes that ranks
with slices of the same sequence exchange."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from functools import cache
from operator import add, attrgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from roomier.core import torch_fake, torch_private
from roomier.core.tree import tensors

WorkKey = tuple[str, str]
"""Phase of a step, and part of the model to which the work belongs."""

# Operations that are not counted: queries of tensors, profiler marks, and communication including the packing of its
# data. step_time.py computes the time of communication. The exchange between ranks that share a sequence is counted,
# because it depends on the operations of a block.
_NOT_COMPUTED_IN = ("prim", "profiler", "c10d", "fsdp")
_EXCHANGES = "c10d.alltoall_base_"
# Allocations and views do not read or write data.
_NOT_COMPUTED = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view")
# Operations that read only some rows of a table.
_READS_ROWS = ("embedding", "index_select", "gather", "index", "_embedding_bag")


@dataclass(frozen=True)
class Work:
    """An amount of computation.

    Attributes:
        flops: floating-point operations of matrix products, convolutions and attention, by the dtype of their inputs. A
            multiply-add counts as two operations.
        product_bytes: bytes that the operations in ``flops`` read and write.
        other_bytes: bytes that all other operations read and write. These operations are limited by memory bandwidth,
            not by arithmetic.
        num_operations: number of launched kernels.
        exchanged_bytes: size of the inputs of the all-to-alls between the ranks that share sequences, including the
            shard that stays on this rank.
        num_exchanges: number of these all-to-alls.
    """

    flops: Mapping[torch.dtype, float] = field(default_factory=lambda: MappingProxyType({}))
    product_bytes: float = 0
    other_bytes: float = 0
    num_operations: float = 0
    exchanged_bytes: float = 0
    num_exchanges: float = 0

    def __add__(self, other: Work) -> Work:
        flops = {dtype: self.flops.get(dtype, 0) + other.flops.get(dtype, 0) for dtype in {*self.flops, *other.flops}}
        return Work(flops, *map(add, _AMOUNTS(self), _AMOUNTS(other)))

    def __mul__(self, factor: float) -> Work:
        flops = {dtype: flops * factor for dtype, flops in self.flops.items()}
        return Work(flops, *(amount * factor for amount in _AMOUNTS(self)))


_AMOUNTS = attrgetter(*(each.name for each in fields(Work)[1:]))


class WorkCounter:
    """Counter of the operations that torch dispatches.

    Attributes:
        by_part: work of each part of a step.
    """

    def __init__(self) -> None:
        self.by_part: dict[WorkKey, Work] = defaultdict(Work)
        self._part: Callable[[], WorkKey] = lambda: ("", "")

    def counting(self, part: Callable[[], WorkKey]) -> AbstractContextManager[Any]:
        """Return a context that attributes each operation to the part that ``part`` returns when the operation runs."""
        self._part = part
        return torch_private.intercept(self._on_operation)

    def _on_operation(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if str(func).startswith(_EXCHANGES):
            self.by_part[self._part()] += Work(exchanged_bytes=args[1].nbytes, num_exchanges=1)
        elif _is_computed(func):
            work, num_runs = work_of(func, args, kwargs, result), torch_fake.num_runs()
            self.by_part[self._part()] += work if num_runs == 1 else work * num_runs
        return result


@cache
def _is_computed(func: Any) -> bool:
    if str(func).partition(".")[0] in _NOT_COMPUTED_IN or _name_of(func) in _NOT_COMPUTED:
        return False
    return not torch_private.is_view_operation(func)


@cache
def _name_of(func: Any) -> str:
    """Return the name of an operation, for example ``"addmm"`` for ``aten.addmm.default``."""
    _, _, name = str(func).partition(".")
    return name.partition(".")[0]


def work_of(func: Any, args: Any, kwargs: Any, result: Any) -> Work:
    """Return the work of one operation, as dispatched below autograd."""
    moved_bytes = sum(_bytes_of(each) for each in tensors([args, kwargs, result]))
    if _name_of(func) in _READS_ROWS:
        # The operation reads the indices, and as many bytes of the table as it writes to the result.
        table, *_ = tensors(args)
        moved_bytes += sum(_bytes_of(each) for each in tensors(result)) - _bytes_of(table)
    count = flop_registry.get(func.overloadpacket if hasattr(func, "overloadpacket") else func)
    if count is None:
        return Work(other_bytes=moved_bytes, num_operations=1)
    flops = float(count(*args, **kwargs, out_val=result))
    dtype = next(each.dtype for each in tensors([args]) if each.is_floating_point())
    return Work({dtype: flops}, product_bytes=moved_bytes, num_operations=1)


def _bytes_of(tensor: Tensor) -> int:
    num_bytes = tensor.itemsize
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride:  # expanded dimensions add no memory
            num_bytes *= size
    return num_bytes
