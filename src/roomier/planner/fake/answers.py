"""Results for operations that read values of fake tensors; see [Note: assumed values]."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from roomier.core import torch_fake, torch_private
from roomier.planner.fake import known_values
from roomier.planner.fake.rnn import rnn_answers

aten = torch.ops.aten
Answer = Callable[[Any, Any, Any], Any]
"""Substitute for an operation: a callable that receives the function, its positional arguments and its keyword
arguments, and returns the result."""


class Answers:
    """Handler of each dispatched operation (:func:`roomier.core.torch_private.intercept`), which replaces the results
    of some operations, such as those that read values.

    Args:
        is_cuda: True to allocate memory in the same way as GPU kernels; see [Note: like CUDA].
    """

    def __init__(self, *, is_cuda: bool = False) -> None:
        norms = dict.fromkeys(_NORMS, _norm_on_cuda if is_cuda else _norm)
        self._answers: Mapping[Any, Answer] = {**_ANSWERS, **norms, **rnn_answers()}

    def __call__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        answer = self._answers.get(func)
        if answer is not None:
            return answer(func, args, kwargs)
        result = func(*args, **kwargs)
        known_values.follow(func, args, kwargs, result)
        return result


def _unscale(func: Any, args: Any, kwargs: Any) -> Any:
    result = func(*args, **kwargs)
    with torch_private.without_interception():
        known_values.set_value(args[1], torch.zeros(args[1].shape))  # no gradient is infinite
    return result


def _nonzero(func: Any, args: Any, kwargs: Any) -> Tensor:
    places = _places_of(args[0])
    found: Tensor = args[0].new_empty(places.shape, dtype=torch.int64)
    known_values.set_value(found, places)
    return found


def _masked_select(func: Any, args: Any, kwargs: Any) -> Tensor:
    mask = known_values.value_of(args[1])
    with torch_private.without_interception():
        num = int(mask.expand(_broadcast(args[0], args[1])).sum())
    made: Tensor = args[0].new_empty(num)
    return made


def _broadcast(one: Tensor, other: Tensor) -> torch.Size:
    return torch.Size(torch.broadcast_shapes(one.shape, other.shape))  # type: ignore[no-untyped-call]


def _index(func: Any, args: Any, kwargs: Any) -> Tensor:
    tensor, indices = args
    masks = (torch.bool, torch.uint8)
    if any(each is not None and each.dtype in masks for each in indices):
        chosen: list[Tensor | None] = []
        for each in indices:
            if each is None or each.dtype not in masks:
                chosen.append(each)
                continue
            for places in _places_of(each).unbind(1):
                chosen.append(tensor.new_empty(places.shape, dtype=torch.int64))
                known_values.set_value(chosen[-1], places)  # type: ignore[arg-type]
        args = (tensor, chosen)
    result: Tensor = func(*args, **kwargs)
    known_values.follow(func, args, kwargs, result)
    return result


def _places_of(mask: Tensor) -> Tensor:
    value = known_values.value_of(mask)
    with torch_private.without_interception():
        places: Tensor = value.nonzero()
    return places


def _unique(func: Any, args: Any, kwargs: Any) -> tuple[Tensor, ...]:
    given = args[0]
    values = known_values.value_of(given) if known_values.is_known(given) else None
    with torch_private.without_interception():
        values = torch.arange(given.numel()).view(given.shape) if values is None else values
        real = func(values, *args[1:], **kwargs)
    made = [given.new_empty(each.shape, dtype=given.dtype if i == 0 else each.dtype) for i, each in enumerate(real)]
    for each, value in zip(made[1:], real[1:], strict=True):
        known_values.set_value(each, value)
    return tuple(made)


def _repeat_interleave(func: Any, args: Any, kwargs: Any) -> Tensor:
    value = known_values.value_of(args[0])
    with torch_private.without_interception():
        positions = func(value.contiguous(), **kwargs)
    made: Tensor = args[0].new_empty(positions.shape)
    known_values.set_value(made, positions)
    return made


def _bincount(func: Any, args: Any, kwargs: Any) -> Tensor:
    value = known_values.value_of(args[0])
    with torch_private.without_interception():
        real = func(value, None, *args[2:], **{key: each for key, each in kwargs.items() if key != "weights"})
    weights = args[1] if len(args) > 1 else kwargs.get("weights")
    made: Tensor = args[0].new_empty(real.shape, dtype=torch.int64 if weights is None else weights.dtype)
    if weights is None:
        known_values.set_value(made, real)
    return made


def _loss_in_full_memory(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Return the loss. A reduced loss occupies the memory of all elements, because torch allocates the unreduced loss
    and resizes it."""
    result: Tensor = func(*args, **kwargs)
    reduction = args[2] if len(args) > 2 else kwargs.get("reduction", 1)
    if reduction == 0:
        return result
    return result.new_empty(_broadcast(args[0], args[1]).numel()).as_strided((), ())


def _norm(func: Any, args: Any, kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of a norm. If the weights and the input have different dtypes, the statistics have the dtype
    of the weights."""
    output, *statistics = func(*args, **kwargs)
    weight = args[2 if func is aten.native_layer_norm.default else 1]
    if weight is not None and weight.dtype is not args[0].dtype:
        statistics = [each.new_empty(each.shape, dtype=weight.dtype) for each in statistics]
    return output, statistics[0], statistics[1]


def _norm_on_cuda(func: Any, args: Any, kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    output, *statistics = _norm(func, args, kwargs)
    if func is not aten.native_group_norm.default:
        statistics = [each if each.itemsize > 2 else torch.empty_like(each, dtype=torch.float32) for each in statistics]
    return output, statistics[0], statistics[1]


def _norm_backward(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the gradients of a norm, with the gradient of the input in the dtype of the input."""
    gradient, *others = func(*args, **kwargs)
    if gradient is not None and gradient.dtype is not args[1].dtype:
        gradient = torch.empty_like(gradient, dtype=args[1].dtype)
    return (gradient, *others)


def _ctc_loss(func: Any, args: Any, kwargs: Any) -> tuple[Tensor, Tensor]:
    """Return the results of a CTC loss as tensors without values. Unknown target lengths are assumed to be the maximum
    length."""
    scores, targets, _, lengths = args[:4]
    num_steps, num_sequences = scores.shape[:2] if scores.dim() == 3 else (scores.shape[0], 1)
    longest = targets.shape[-1]
    if known_values.is_known(lengths):
        value = known_values.value_of(lengths)
        with torch_private.without_interception():
            longest = int(value.max())
    return scores.new_empty(num_sequences), scores.new_empty((num_sequences, num_steps, 2 * longest + 1))


def _grouped_mm(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of a grouped matmul, in which each group of rows has its own matrix, as a tensor without
    values. On a GPU, torch supports this operation only in bfloat16."""
    one, other = args[0], args[1]
    out_dtype = kwargs.get("out_dtype") or one.dtype
    if one.dim() == 2 and other.dim() == 2:
        offsets = args[2] if len(args) > 2 else kwargs["offs"]
        made: Tensor = one.new_empty((len(offsets), one.shape[0], other.shape[1]), dtype=out_dtype)
        return made
    rows = one.shape[:-1]
    if one.dim() == 3 and other.dim() == 2:
        rows = one.shape[1:-1]
    return one.new_empty((*rows, other.shape[-1]), dtype=out_dtype)


_NORMS = (aten.native_layer_norm.default, aten.native_group_norm.default, aten.native_batch_norm.default)
_ANSWERS: dict[Any, Answer] = {
    torch_fake.READS_VALUE: lambda func, args, kwargs: known_values.number_of(args[0]),
    torch_fake.UNSCALES: _unscale,
    aten.equal.default: lambda func, args, kwargs: bool(args[0].shape == args[1].shape),
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten.index.Tensor: _index,
    aten._unique2.default: _unique,
    aten.unique_consecutive.default: _unique,
    aten.repeat_interleave.Tensor: _repeat_interleave,
    aten.bincount.default: _bincount,
    aten._grouped_mm.default: _grouped_mm,
    aten.mse_loss.default: _loss_in_full_memory,
    aten.smooth_l1_loss.default: _loss_in_full_memory,
    aten.native_group_norm_backward.default: _norm_backward,
    aten._ctc_loss.Tensor: _ctc_loss,
}
