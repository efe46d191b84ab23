"""Copies of modules and batches that have shapes but no values.

[Note: copies for a dry run]
Every tensor of a module (parameters, buffers, and tensors in plain attributes) is recreated as a fake tensor, and
tensors that share memory in the module also share memory in the copy. Small integer tensors retain their values (see
[Note: assumed values]). Parameters on ``meta`` and paged parameters have their full shape in the copy. All other
attributes are copied with ``copy.deepcopy``, except datasets, loaders and large arrays, which are shared with the copy.
If a module creates its layers in ``configure_model``, this method of the copy is called.
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

from roomier.api.lightning_module import lend_to_lightning
from roomier.api.module import Module
from roomier.api.overrides import overrides
from roomier.core import torch_fake, torch_private
from roomier.core.errors import NoForecastError, RoomierError
from roomier.core.tree import map_tensors, tensors
from roomier.core.wrapped_forward import unwrap
from roomier.planner.fake import known_values


def shapes_of(module: Module, weight_dtype: torch.dtype | None = None) -> Module:
    """Return a copy of ``module`` without values; see [Note: copies for a dry run]. Call this function inside
    :func:`fake_world`.

    Args:
        module: module to copy.
        weight_dtype: dtype of the floating-point weights of the copy; None retains the dtype of each weight.

    Raises:
        RoomierError: a layer is lazy, the module was sharded by an earlier run, or it cannot be copied
            (NoForecastError).
    """
    _refuse(module)
    makers = _Makers(module, weight_dtype)
    copied = copied_module(module, {id(each): makers.make(each) for each in _tensors_of(module)})
    if next(copied.parameters(), None) is None and overrides(copied, "configure_model", Module):
        copied.configure_model()
        return shapes_of(copied, weight_dtype) if weight_dtype is not None else copied
    return copied


def copied_module(module: Module, memo: dict[int, Any]) -> Module:
    """Return a copy of ``module`` that logs and prints nothing, and whose ``forward`` methods are the original ones.

    Args:
        module: module to copy.
        memo: replacements of objects by id, as in ``copy.deepcopy``.

    Raises:
        NoForecastError: an object cannot be copied.
    """
    memo |= {id(each): each for part in module.modules() for each in part.__dict__.values() if _is_data(each)}
    for each in _tensors_of(module):
        if not each.is_leaf and id(each) not in memo:  # a result of an earlier step, which deepcopy rejects
            memo[id(each)] = each.detach().clone()
    trainer = module.trainer if module.is_attached else None  # training_step can read its attributes, such as the epoch
    if trainer is not None:
        memo[id(trainer)] = trainer
    try:
        torch_private.add_plain_copies(module, memo)
        copied = copy.deepcopy(module, memo)
    except RoomierError:
        raise
    except Exception as error:
        problem = f"cannot be copied, so a dry run of its step is not possible: {type(error).__name__}: {error}"
        action = "Move the objects that cannot be copied out of the module, or set a strategy and measure a step"
        raise NoForecastError("model", type(module).__name__, problem, action) from error
    of_lightning = lend_to_lightning(copied, trainer)
    for part in (*of_lightning, *(each for each in copied.modules() if isinstance(each, Module))):
        part.__dict__.update(log=_ignore, log_dict=_ignore, print=_ignore, _trainer=trainer)
    unwrap(copied)  # removes wrappers that an earlier run installed
    return copied


def shapes_of_batch(batch: Any) -> Any:
    """Return a copy of ``batch`` that retains only the values of small integer tensors. Call this function inside
    :func:`fake_world`."""

    def fake(tensor: Tensor) -> Tensor:
        made = torch.empty(tensor.shape, dtype=tensor.dtype)
        _keep_value(tensor, made)
        return made

    return map_tensors(fake, batch)


class _Makers:
    """Factory of fake tensors, which share memory if the original tensors do."""

    def __init__(self, module: nn.Module, weight_dtype: torch.dtype | None) -> None:
        self._weight_dtype = weight_dtype
        self._weights = {id(each) for each in (*module.parameters(), *module.buffers())}
        self._bases: dict[tuple[int, torch.dtype], Tensor] = {}

    def make(self, tensor: Tensor) -> Tensor:
        """Return a fake tensor or parameter with the shape and dtype of ``tensor``."""
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


_LARGE_BYTES = 2**20  # minimum size of an array that is shared with the copy
_OF_PAGES = ("page", "pages", "_paged_as")  # attributes of paged parameters


def _refuse(module: Module) -> None:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            action = "Call the model on one batch first, so that its lazy layers have shapes"
            raise RoomierError("model", name, "is lazy and has no shape yet", action)
    if any("_roomier_shards" in each.__dict__ for each in module.modules()):
        problem = "was sharded by an earlier run, so no other plan can be evaluated on it"
        action = "Use the same strategy as that run, or load its checkpoint into a new model"
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
                # A dataclass can have unset fields or a reference to itself.
                yield from tensors(value) if isinstance(value, (Tensor, Mapping, list, tuple)) else ()


def _is_data(value: Any) -> bool:
    """Return whether ``value`` is too large to copy."""
    return isinstance(value, (Dataset, DataLoader)) or (isinstance(value, np.ndarray) and value.nbytes >= _LARGE_BYTES)


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Replacement for methods that log or print values."""
