"""Nested batches: dicts, lists, tuples, named tuples and dataclasses with tensors as leaves."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def map_tensors(
    fn: Callable[[Any], Any], batch: Any, is_leaf: Callable[[Any], bool] | None = None, *, reconstructs: bool = False
) -> Any:
    """Return a copy of ``batch`` in which ``fn`` is applied to each tensor. Other leaves are unchanged.

    Args:
        is_leaf: function that returns True for additional objects to which ``fn`` is applied.
        reconstructs: True if ``fn`` changes shapes. In this case, ``__post_init__`` of dataclasses runs again and
            computes derived fields. Otherwise, ``__post_init__`` is not called, because the fields already contain its
            results.
    """

    def mapped(part: Any) -> Any:
        return map_tensors(fn, part, is_leaf, reconstructs=reconstructs)

    if isinstance(batch, Tensor) or (is_leaf is not None and is_leaf(batch)):
        return fn(batch)
    if isinstance(batch, Mapping):
        items = {key: mapped(value) for key, value in batch.items()}
        return items if type(batch) is dict else _same_mapping(batch, items)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(mapped, batch))
    if isinstance(batch, list) and type(batch) is not list:
        listed = copy.copy(batch)  # the constructor can have parameters that are not fields
        listed[:] = map(mapped, batch)
        return listed
    if isinstance(batch, (list, tuple)):
        return type(batch)(map(mapped, batch))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        values = {each.name: mapped(getattr(batch, each.name)) for each in dataclasses.fields(batch)}
        if reconstructs:
            given = {each.name: values[each.name] for each in dataclasses.fields(batch) if each.init}
            return dataclasses.replace(batch, **given)
        same = copy.copy(batch)
        for name, value in values.items():
            object.__setattr__(same, name, value)  # object.__setattr__ also sets fields of a frozen dataclass
        return same
    return batch


def _same_mapping(batch: Mapping[Any, Any], mapped: dict[Any, Any]) -> Any:
    # Mappings such as Hugging Face's BatchEncoding can be constructed from a dict.
    try:
        return type(batch)(mapped)  # type: ignore[call-arg]
    except TypeError:
        return mapped


def leaves(batch: Any) -> Iterator[Any]:
    """Iterate over the objects in ``batch`` that are not containers, depth first."""
    if isinstance(batch, (list, tuple, Mapping)):
        for each in batch.values() if isinstance(batch, Mapping) else batch:
            yield from leaves(each)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from leaves(getattr(batch, field.name))
    else:
        yield batch


def tensors(batch: Any) -> Iterator[Tensor]:
    """Iterate over the tensors of ``batch``, depth first."""
    return (each for each in leaves(batch) if isinstance(each, Tensor))


def nodes_of(loss: Tensor) -> set[Any]:
    """Return the nodes of the graph that computed ``loss``."""
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting.extend(each for each, _ in node.next_functions)
    return seen


def to_device(batch: Any, device: torch.device) -> Any:
    """Return ``batch`` with its tensors on ``device``. A copy from pinned memory does not block the host.

    An object with a ``to(device)`` method, such as a batch of graphs, is moved by calling this method.
    """
    return map_tensors(lambda leaf: moved(leaf, device), batch, moves_itself)


def moves_itself(batch: Any) -> bool:
    """Return whether ``batch`` is moved by its ``to`` method."""
    if isinstance(batch, (Mapping, list, tuple)):
        return isinstance(batch, PackedSequence)
    return callable(getattr(batch, "to", None))


def moved(leaf: Any, device: torch.device) -> Any:
    """Return ``leaf``, which is a tensor or an object with a ``to`` method, on ``device``."""
    if not isinstance(leaf, Tensor):
        return leaf.to(device)
    return leaf if leaf.device == device else leaf.to(device, non_blocking=leaf.is_pinned())


def batch_size_of(batch: Any) -> int:
    """Return the size of the first dimension of the first tensor in ``batch``; 1 if this tensor is a scalar, or if
    ``batch`` contains no tensor."""
    first = batch if isinstance(batch, Tensor) else next(tensors(batch), None)
    return first.size(0) if first is not None and first.dim() else 1  # a nested tensor supports size(), but not shape
