"""Copies of modules and batches that have shapes and no values.

[Note: what is copied]
Every tensor a module holds (parameters, buffers, and those in plain attributes) is made anew as a fake one, and the
rest is copied as ``copy.deepcopy`` does. Tensors that share memory share it in the copy. Small whole numbers keep their
values (see [Note: made-up values]). Data sets, loaders and large arrays in attributes are not copied: the copy has the
same. Parameters on ``meta``, or of which this rank holds a page, count with their whole shape. A module without
parameters that builds itself in ``configure_model`` does so in its copy.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset

from roomier.api.lightning import lend_to_lightning
from roomier.api.module import Module
from roomier.api.overrides import overrides
from roomier.core import torch_fake, torch_private
from roomier.core.errors import RoomierError
from roomier.core.tree import map_tensors
from roomier.core.wrapped_forward import unwrap
from roomier.planner.fake import known_values


def shapes_of(module: Module, weight_dtype: torch.dtype | None = None) -> Module:
    """A copy of ``module`` without values, inside :func:`fake_world`; see [Note: what is copied].

    Args:
        weight_dtype: of its floating-point weights; None leaves them.

    Raises:
        RoomierError: a layer is lazy, an earlier run divided the module among ranks, or it cannot be copied.
    """
    _refuse(module)
    makers = _Makers(module, weight_dtype)
    memo: dict[int, Any] = {id(each): makers.make(each) for each in _tensors_of(module)}
    memo |= {id(each): each for part in module.modules() for each in part.__dict__.values() if _is_data(each)}
    trainer = module.trainer if module.is_attached else None  # the step may ask it for the epoch, say
    if trainer is not None:
        memo[id(trainer)] = trainer
    try:
        copied = copy.deepcopy(module, memo)
    except RoomierError:
        raise
    except Exception as error:
        problem = f"cannot be copied, so its step cannot be tried without memory: {type(error).__name__}: {error}"
        action = "Hold what cannot be copied outside the module, or name a strategy and measure a step"
        raise RoomierError("model", type(module).__name__, problem, action) from error
    of_lightning = lend_to_lightning(copied, trainer)
    for part in (*of_lightning, *(each for each in copied.modules() if isinstance(each, Module))):
        for name in ("log", "log_dict", "print"):
            part.__dict__[name] = _say_nothing
    unwrap(copied)  # what an earlier run put around its forward
    if next(copied.parameters(), None) is None and overrides(copied, "configure_model", Module):
        copied.configure_model()
        return shapes_of(copied, weight_dtype) if weight_dtype is not None else copied
    return copied


def shapes_of_batch(batch: Any) -> Any:
    """A copy of ``batch`` without values, inside :func:`fake_world`, but for small whole numbers that are known."""

    def fake(tensor: Tensor) -> Tensor:
        made = torch.empty(tensor.shape, dtype=tensor.dtype)
        _keep_value(tensor, made)
        return made

    return map_tensors(fake, batch)


class _Makers:
    """Makes fake tensors; those that share memory share it again."""

    def __init__(self, module: nn.Module, weight_dtype: torch.dtype | None) -> None:
        self._weight_dtype = weight_dtype
        self._weights = {id(each) for each in (*module.parameters(), *module.buffers())}
        self._bases: dict[tuple[int, torch.dtype], Tensor] = {}

    def make(self, tensor: Tensor) -> Tensor:
        dtype = self._weight_dtype
        if dtype is None or dtype is tensor.dtype or not tensor.is_floating_point() or id(tensor) not in self._weights:
            made = self._alike(tensor)
        else:
            made = torch.empty(tensor.shape, dtype=dtype)
        _keep_value(tensor, made)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            made.__dict__.update({key: each for key, each in tensor.__dict__.items() if key not in _OF_PAGES})
        return made

    def _alike(self, tensor: Tensor) -> Tensor:
        is_plain = type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and tensor.layout is torch.strided
        if not is_plain or tensor.is_meta or torch_fake.is_fake([tensor]):
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        storage = tensor.untyped_storage()
        if storage.nbytes() == tensor.nbytes and not torch_private.is_shared(tensor):
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        key = (torch_private.memory_of(tensor), tensor.dtype)
        if key not in self._bases:
            self._bases[key] = torch.empty(storage.nbytes() // tensor.itemsize, dtype=tensor.dtype)
        return self._bases[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


_LARGE_BYTES = 2**20  # of an array
_OF_PAGES = ("page", "pages", "_paged_as")  # of parameters of which each rank makes a part


def _refuse(module: Module) -> None:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            action = "Call the model on one batch before: that gives its lazy layers their shapes"
            raise RoomierError("model", name, "is lazy and has no shape yet", action)
    if any("_roomier_shards" in each.__dict__ for each in module.modules()):
        problem = "was divided among the ranks by an earlier run, so another way cannot be tried on it"
        action = "Name the strategy of that run, or load its checkpoint into a new model"
        raise RoomierError("model", type(module).__name__, problem, action)


def _keep_value(tensor: Tensor, made: Tensor) -> None:
    if known_values.is_kept(tensor):
        with torch_private.without_interception():
            known_values.set_value(made, tensor.detach().cpu().clone())
    elif known_values.is_known(tensor):
        known_values.set_value(made, known_values.value_of(tensor))


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()
    for part in module.modules():
        for name, value in part.__dict__.items():
            if name not in ("_parameters", "_buffers", "_modules", "_trainer"):
                yield from _tensors_in(value)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors_in(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors_in(each)


def _is_data(value: Any) -> bool:
    """Whether it is not to be there twice."""
    return isinstance(value, (Dataset, DataLoader)) or (isinstance(value, np.ndarray) and value.nbytes >= _LARGE_BYTES)


def _say_nothing(*args: Any, **kwargs: Any) -> None:
    """In the place of what writes values down."""
