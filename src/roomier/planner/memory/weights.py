"""Shapes of a network's weights, grouped into units whose weights are communicated together."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from roomier.plan.parts import AdapterPlan
from roomier.techniques.adapters.layers import is_adapter
from roomier.techniques.adapters.lora import apply_lora, quantise_base
from roomier.techniques.parallel.shard import parts_of, root_parameters_of, units_of


@dataclass(frozen=True)
class Weight:
    """Parameter without its values.

    Attributes:
        name: qualified name. It is not compared, so that the parameters of equal blocks are equal.
        shape: unsharded shape.
        dtype: dtype in which the optimizer updates the parameter.
        is_trained: True if the parameter requires gradients.
    """

    name: str = field(compare=False)
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_trained: bool


@dataclass(frozen=True)
class Unit:
    """Weights that are all-gathered, reduced and resharded together.

    Attributes:
        name: name of the first module; empty for the root.
        weights: weights of the unit.
        gathered_dtype: dtype of the computation and of the gradients.
        sum_dtype: dtype in which gradients are reduced.
        is_root: True for the unit that contains the weights outside all other units.
        ends_late: True if the inputs of the unit have no gradient, so that its backward pass ends only at the end of
            the model's backward pass.
        is_looked_up: True for an embedding, whose weights the backward pass does not need and does not all-gather.
        is_inner: True for the norms and embeddings of a block, whose other weights are in the preceding unit.
    """

    name: str
    weights: tuple[Weight, ...]
    gathered_dtype: torch.dtype
    sum_dtype: torch.dtype
    is_root: bool = False
    ends_late: bool = False
    is_looked_up: bool = False
    is_inner: bool = False


def units_with_weights(
    network: nn.Module,
    blocks: Sequence[nn.Module],
    compute_dtype: torch.dtype | None = None,
    weight_dtype: torch.dtype | None = None,
) -> list[Unit]:
    """Return the units of ``network``, which may be sharded, in the order of its modules. The root is the first unit.

    Args:
        compute_dtype: dtype of autocast; None if autocast is disabled.
        weight_dtype: dtype to which floating-point weights will be converted; None preserves the dtype of each weight.
    """
    names = {module: name for name, module in network.named_modules()}
    of_parameters = {parameter: name for name, parameter in network.named_parameters()}
    rest = dict(of_parameters)
    units: list[Unit] = []
    all_units = units_of(network, blocks)
    in_root = root_parameters_of(all_units, compute_dtype)
    for unit in all_units:
        parts: list[Unit] = []
        for modules, dtype in parts_of(unit, compute_dtype):
            of_modules = dict.fromkeys(each for module in modules for each in module.parameters())
            parameters = [each for each in of_modules if each in rest and each not in in_root]
            if not parameters:  # a block can have only norms
                continue
            weights = tuple(_weight(each, rest.pop(each), weight_dtype) for each in parameters)
            parts.append(
                Unit(
                    names[modules[0]],
                    weights,
                    gathered_dtype=dtype or weights[0].dtype,
                    sum_dtype=_sum_dtype(weights),
                    ends_late=all(isinstance(each, (nn.Embedding, nn.EmbeddingBag)) for each in modules),
                    is_looked_up=_is_embedding_itself(unit),
                    is_inner=modules != [unit],
                )
            )
        if len(parts) == 1:
            parts = [replace(parts[0], is_inner=False)]
        units += reversed(parts)  # the forward pass of a block starts before its norms
    if rest:
        weights = tuple(_weight(parameter, name, weight_dtype) for parameter, name in rest.items())
        units.insert(0, Unit("", weights, weights[0].dtype, _sum_dtype(weights), is_root=True))
    return units


def buffer_bytes(network: nn.Module, weight_dtype: torch.dtype | None = None) -> int:
    """Return the total size of the buffers in bytes, including quantized frozen weights. Every rank stores all buffers.

    Args:
        weight_dtype: dtype to which floating-point buffers will be converted; None preserves the dtype of each buffer.
    """
    return sum(
        each.numel() * (weight_dtype if weight_dtype is not None and each.is_floating_point() else each.dtype).itemsize
        for each in network.buffers()
    )


def with_adapters(
    network: nn.Module, blocks: Sequence[nn.Module], plan: AdapterPlan
) -> tuple[nn.Module, Sequence[nn.Module]]:
    """Return a copy of ``network`` with the adapters of ``plan`` and without parameter values, and its blocks.

    If ``network`` already has adapters, or the plan has none, return ``network`` and ``blocks`` unchanged.
    """
    if plan.lora_rank is None or any(is_adapter(name) for name, _ in network.named_parameters()):
        return network, blocks
    shapes = {
        id(each): nn.Parameter(torch.empty_like(each, device="meta"), requires_grad=each.requires_grad)
        for each in network.parameters()
    }
    memo: dict[int, Any] = {**shapes, **{id(each): each for each in network.buffers()}}
    copied = copy.deepcopy(network, memo)
    copied_blocks = [memo[id(each)] for each in blocks]
    apply_lora(copied, copied_blocks, plan)
    if plan.frozen_base != "as_is":
        quantise_base(copied, plan)
    return copied, copied_blocks


def _weight(parameter: nn.Parameter, name: str, weight_dtype: torch.dtype | None) -> Weight:
    dtype = weight_dtype if weight_dtype is not None and parameter.is_floating_point() else parameter.dtype
    return Weight(name, tuple(parameter.shape), dtype, parameter.requires_grad)


def _sum_dtype(weights: tuple[Weight, ...]) -> torch.dtype:
    return torch.float64 if any(each.dtype is torch.float64 for each in weights) else torch.float32


def _is_embedding_itself(module: nn.Module) -> bool:
    # fully_shard inserts a class before the original class of a module.
    return type(module) is nn.Embedding or (isinstance(module, FSDPModule) and nn.Embedding in type(module).__bases__)
