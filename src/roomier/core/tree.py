"""Batches are nested: dicts, lists, tuples, named tuples and dataclasses with tensors at the leaves."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def map_tensors(fn: Callable[[Any], Any], batch: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """A copy of ``batch`` of the same form with ``fn`` applied to each tensor; other leaves stay.

    Args:
        is_leaf: says of what it stands for as a whole; ``fn`` is applied to that too.
    """
    if isinstance(batch, Tensor) or (is_leaf is not None and is_leaf(batch)):
        return fn(batch)
    if isinstance(batch, Mapping):
        mapped = {key: map_tensors(fn, value, is_leaf) for key, value in batch.items()}
        return mapped if type(batch) is dict else _same_mapping(batch, mapped)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(fn, value, is_leaf) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map_tensors(fn, value, is_leaf) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        values = {f.name: map_tensors(fn, getattr(batch, f.name), is_leaf) for f in dataclasses.fields(batch) if f.init}
        return dataclasses.replace(batch, **values)
    return batch


def _same_mapping(batch: Mapping[Any, Any], mapped: dict[Any, Any]) -> Any:
    # Hugging Face's BatchEncoding and the like are mappings that can be built from a dict.
    try:
        return type(batch)(mapped)  # type: ignore[call-arg]
    except TypeError:
        return mapped


def tensors(batch: Any) -> Iterator[Tensor]:
    """The tensors of ``batch``, depth first, in the order they stand."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from tensors(value)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from tensors(getattr(batch, field.name))


def to_device(batch: Any, device: torch.device) -> Any:
    """``batch`` with its tensors on ``device``. From pinned memory the copy does not block the host.

    An object with its own ``to(device)`` (a graph batch, say) is asked to move itself.
    """
    return map_tensors(lambda leaf: moved(leaf, device), batch, moves_itself)


def moves_itself(batch: Any) -> bool:
    """Whether ``batch`` knows best how it is moved: its form is its own, or one of its tensors must stay."""
    if isinstance(batch, (Mapping, list, tuple)):
        return isinstance(batch, PackedSequence)
    return callable(getattr(batch, "to", None))


def moved(leaf: Any, device: torch.device) -> Any:
    """A tensor, or what moves itself, on ``device``."""
    if not isinstance(leaf, Tensor):
        return leaf.to(device)
    return leaf if leaf.device == device else leaf.to(device, non_blocking=leaf.is_pinned())


def batch_size_of(batch: Any) -> int:
    """The first dimension of the first tensor of ``batch``; 1 where there is none."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else 1
    for tensor in tensors(batch):
        return tensor.shape[0] if tensor.dim() else 1
    return 1
