"""Prediction of the size of optimizer states before the first step."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roomier.core import torch_fake
from roomier.core.device.rng import preserved_rng
from roomier.core.errors import RoomierError
from roomier.techniques.optim.adamw import BlockwiseAdamW, blockwise_adamw_bytes
from roomier.techniques.optim.muon import Muon

_COUNTER_BYTES = 4  # a float32 step counter
_PRIMES = (3, 5, 7, 11, 13, 17, 19)
_known: dict[Hashable, list[tuple[torch.Size, int]]] = {}  # by optimizer, shape, dtype and settings


def state_bytes(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    whole_shape: tuple[int, ...] | None = None,
) -> int:
    """Return the size in bytes of ``optimizer``'s states for one parameter, or for one rank's shard of it.

    Args:
        group: options of the parameter's group (``momentum``, ``amsgrad``, ...).
        shape: shape of the shard that this rank updates.
        dtype: dtype of the weight in training.
        whole_shape: shape of the unsharded parameter; None means ``shape``.

    Raises:
        RoomierError: the states of the optimizer are unknown, and the optimizer cannot take a step on a small
            parameter.
    """
    kind, whole_shape = type(optimizer), whole_shape or shape
    if isinstance(optimizer, BlockwiseAdamW):  # the bits of a state depend on the number of elements
        num_rows, bits, rounding = shape[0] if shape else None, group["state_bits"], group["weight_rounding"]
        return blockwise_adamw_bytes(whole_shape, bits, dtype, rounding, num_rows=num_rows)
    if isinstance(optimizer, Muon):
        kind = torch.optim.Muon if group.get("is_hidden") else torch.optim.AdamW
    if issubclass(kind, torch.optim.Adafactor) and len(shape) == 2 and whole_shape[0] == 1 and not shape[0]:
        return _COUNTER_BYTES  # only the rank with the row has its column means, which otherwise all ranks have
    sizes = dict(zip(_PRIMES, shape, strict=False))
    states = _states_of_small(kind, group, _PRIMES[: len(shape)], dtype)
    return sum(math.prod(sizes.get(size, size) for size in dimensions) * itemsize for dimensions, itemsize in states)


def _states_of_small(
    kind: type[Optimizer], options: Mapping[str, Any], shape: tuple[int, ...], dtype: torch.dtype
) -> list[tuple[torch.Size, int]]:
    """Return the shape and the itemsize of each state that an optimizer has after one step on a small parameter.

    The dimensions of the small parameter are different primes, so each dimension of a state identifies the
    corresponding dimension of the parameter.
    """
    settings = {key: value for key, value in options.items() if key not in ("params", "fused", "foreach", "capturable")}
    key = kind, shape, dtype, repr(settings)
    if key not in _known:
        copy = nn.Parameter(torch.ones(shape, dtype=dtype))
        copy.grad = torch.ones_like(copy)
        try:
            # Stochastic rounding draws random numbers, except with fake tensors.
            with nullcontext() if torch_fake.makes_fake_tensors() else preserved_rng():
                optimizer = cast(Any, kind)([{"params": [copy], **settings}])
                optimizer.step()
        except Exception as error:
            action = "Call report_of(engine) after the first step, when the states exist"
            raise RoomierError(
                "optimizer", kind.__name__, f"has states that are unknown before the first step: {error}", action
            ) from error
        states = [each for each in optimizer.state[copy].values() if isinstance(each, Tensor)]
        _known[key] = [(each.shape, each.itemsize) for each in states]
    return _known[key]
