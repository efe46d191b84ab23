"""Values of integer and boolean tensors in a dry run.

[Note: assumed values]
Shapes can depend on values, such as sequence lengths or the number of tokens that a mask selects, but fake tensors have
no values. Small integer and boolean tensors therefore carry a real tensor, and the real tensor of a result is computed
from the real tensors of the inputs. Unknown values are assumed to be those of a typical step:

- An unknown number is 1 and an unknown boolean is True, so no value is infinite and a mask selects all elements. If a
  mask is computed from numbers in the batch, their actual values are used.
- The indices of the largest values (``topk``, ``argmax``) cycle through all positions, so experts have equal load,
  which is the goal of a balancing loss.
- The input of ``unique`` has no duplicates, so the result has the maximum size.

If all elements have the same value, the real tensor stores only one element.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from roomier.core import torch_fake, torch_private

_VALUE = "_roomier_value"  # attribute of a fake tensor: a real tensor of its shape
_MAX_ELEMENTS = 2**20  # values of larger tensors are not computed
_WHOLE = frozenset((torch.bool, torch.int64, torch.int32, torch.uint8, torch.int16, torch.int8))
_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_CREATED = "arange zeros ones full new_zeros new_ones new_full zeros_like ones_like full_like"
_SUMMED = "sum any all max min amax amin prod cumsum sort argsort count_nonzero diff"
_MOVED = "cat stack index gather index_select flip repeat roll unfold constant_pad_nd"
_WRITTEN = "scatter scatter_ scatter_add scatter_add_ masked_fill masked_fill_ copy_ fill_ zero_ index_put index_put_"
_OTHERS = "lift_fresh lift_fresh_copy _to_copy clone where tril triu"
_SEARCHED = "floor_divide searchsorted bucketize isin argmax argmin _unsafe_view"
_FOLLOWED = frozenset(" ".join((_CREATED, _SUMMED, _MOVED, _WRITTEN, _OTHERS, _SEARCHED)).split())
# Operators that require contiguous inputs, or warn otherwise. Assumed values are expanded from one element and not
# contiguous.
_ATEN = torch.ops.aten
_CONTIGUOUS = (_ATEN.as_strided.default, _ATEN.bucketize.Tensor, _ATEN.searchsorted.Tensor, _ATEN.view.dtype)
_LARGEST = ("topk", "argmax", "argmin", "max", "min", "sort", "argsort")


def set_value(tensor: Tensor, value: Tensor) -> None:
    """Attach ``value``, a real tensor of the same shape, to the fake tensor ``tensor``."""
    setattr(tensor, _VALUE, value)


def is_known(tensor: Tensor) -> bool:
    """Return whether ``tensor`` carries a value."""
    return hasattr(tensor, _VALUE)


def is_kept(tensor: Tensor) -> bool:
    """Return whether a fake copy of the real tensor ``tensor`` must carry its value."""
    is_real = type(tensor) in (Tensor, torch.nn.Parameter, torch.nn.Buffer) and not tensor.is_meta
    return is_real and tensor.dtype in _WHOLE and tensor.numel() <= _MAX_ELEMENTS


def value_of(tensor: Tensor) -> Tensor:
    """Return the known or assumed value of ``tensor`` as a real tensor, which must not be modified."""
    found: Tensor | None = getattr(tensor, _VALUE, None)
    if found is not None:
        return found
    if is_kept(tensor):  # a real tensor, such as the ranks of a mesh
        return tensor
    constant = torch_fake.fake_constant(tensor)
    with torch_private.without_interception():
        return torch.ones((), dtype=tensor.dtype).expand(tensor.shape) if constant is None else constant


def number_of(tensor: Tensor) -> bool | int | float:
    """Return the result of ``tensor.item()``."""
    value = value_of(tensor)
    with torch_private.without_interception():
        return value.reshape(()).item()


def follow(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Compute the values of ``result``, which is integer or boolean, if ``func`` is supported."""
    if type(result) is tuple or type(result) is list:
        if not any(isinstance(each, Tensor) and each.dtype in _WHOLE for each in result):
            return
    elif not isinstance(result, Tensor) or result.dtype not in _WHOLE:
        return
    way = _way_of(func)
    if way is not None:
        way(func, args, kwargs, result)


@cache
def _way_of(func: Any) -> Callable[[Any, Any, Any, Any], None] | None:
    if not isinstance(func, torch_private.OpOverload) or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    name = func.overloadpacket.__name__
    if name in _EMPTY:
        return _begin
    if torch_private.writes_to_arguments(func):
        return _write if torch.Tag.pointwise in func.tags or name in _FOLLOWED else None
    if name in _LARGEST:
        return _take_turns
    if torch.Tag.pointwise in func.tags:
        return _each
    is_followed = name in _FOLLOWED or torch_private.is_view_operation(func)
    return _run if is_followed else None


def _begin(func: Any, args: Any, kwargs: Any, result: Tensor) -> None:
    if result.numel() <= _MAX_ELEMENTS:
        with torch_private.without_interception():
            set_value(result, torch.ones(result.shape, dtype=result.dtype))


def _run(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    if _is_small(args, result):
        with torch_private.without_interception():
            values = _real(args)
            if func in _CONTIGUOUS:
                values = torch_private.map_leaves(_in_memory, values)
            _note(result, func(*values, **_real(kwargs)))


def _each(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Compute an elementwise operation. If each input consists of equal elements, only one element is computed."""
    values = _real(args)
    if isinstance(result, Tensor) and all(_is_uniform(each) for each in torch_private.iter_tensors(values)):
        with torch_private.without_interception():
            one = func(*torch_private.map_leaves(_first, values), **_real(kwargs))
            set_value(result, one.expand(result.shape))
    else:
        _run(func, args, kwargs, result)


def _write(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    written = args[0] if args and isinstance(args[0], Tensor) else None
    if written is not result or not _is_small(args, result):
        return
    value = getattr(written, _VALUE, None)
    if value is None or (_is_uniform(value) and value.dim()):
        with torch_private.without_interception():
            value = value_of(written).clone(memory_format=torch.contiguous_format)
        set_value(written, value)
    with torch_private.without_interception():
        func(value, *_real(args[1:]), **_real(kwargs))


def _take_turns(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Set the indices of the largest values. They are computed for known integers; otherwise, they cycle through all
    positions."""
    if is_known(args[0]) and args[0].dtype in _WHOLE:
        _run(func, args, kwargs, result)
        return
    positions = result if isinstance(result, Tensor) else result[-1]
    if positions.dtype is not torch.int64 or positions.numel() > _MAX_ELEMENTS:
        return
    given = args[0].shape
    is_whole = (len(args) < 2 and "dim" not in kwargs) or not given
    dim = _dim_of(func, args, kwargs, len(given))
    num_choices = args[0].numel() if is_whole else given[dim]
    with torch_private.without_interception():
        turns = torch.arange(positions.numel())
        if positions.dim() == len(given) and given and not is_whole:  # several indices along the dimension
            moved = positions.shape[:dim] + positions.shape[dim + 1 :]
            turns = turns.view(*moved, positions.shape[dim]).movedim(-1, dim)
        set_value(positions, (turns % max(num_choices, 1)).reshape(positions.shape).clone())


def _dim_of(func: Any, args: Any, kwargs: Any, num_dims: int) -> int:
    names = [each.name for each in func._schema.arguments]
    if "dim" not in names:
        return 0
    index = names.index("dim")
    dim = kwargs.get("dim", args[index] if len(args) > index else func._schema.arguments[index].default_value)
    return int(dim if dim is not None else -1) % max(num_dims, 1)


def _is_small(args: Any, result: Any) -> bool:
    return all(each.numel() <= _MAX_ELEMENTS for each in torch_private.iter_tensors([args, result]))


def _note(result: Any, values: Any) -> None:
    for tensor, value in zip(torch_private.iter_tensors(result), torch_private.iter_tensors(values), strict=True):
        if tensor.dtype in _WHOLE:
            set_value(tensor, value)


def _real(value: Any) -> Any:
    return torch_private.map_leaves(lambda each: value_of(each) if isinstance(each, Tensor) else each, value)


def _is_uniform(value: Tensor) -> bool:
    return not any(value.stride())


def _first(value: Any) -> Any:
    return value.as_strided((), (), value.storage_offset()) if isinstance(value, Tensor) else value


def _in_memory(value: Any) -> Any:
    return value.contiguous() if isinstance(value, Tensor) else value
