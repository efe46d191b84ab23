"""Prediction of the sizes of the model states under a Plan, before or after the engine is built."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from roomier.api.blocks import find_blocks
from roomier.api.engine import Engine
from roomier.core.errors import PlanError
from roomier.plan import Plan
from roomier.plan.choices import averages_itself
from roomier.plan.levers import has_two_backwards, lever_that_frees_gradients, rounding_in_force, update_mode
from roomier.planner.memory.model_states import ModelStates, StateBytes, model_states
from roomier.planner.memory.walk import Layout
from roomier.planner.memory.weights import Weight, buffer_bytes, units_with_weights, with_adapters
from roomier.techniques.optim.by_name import make_optimizer
from roomier.techniques.optim.onebit_adam import OneBitAdam, onebit_adam_bytes
from roomier.techniques.optim.state_bytes import state_bytes
from roomier.techniques.precision.policy import precision_of


def predict(network: nn.Module, plan: Plan, device: torch.device | None = None, rank: int = 0) -> ModelStates:
    """Predict the sizes of the model states of ``network`` under ``plan``. The network may be on the ``meta`` device.

    Args:
        plan: Plan with the name of an optimizer.
        device: device of the run; None means the CPU.
        rank: rank whose memory is predicted. No rank requires more memory than rank 0.

    Raises:
        PlanError: the plan does not name an optimizer.

    Example:
        >>> predict(network, plan).peak.total()
    """
    wanted = plan.optimizer
    if wanted.name is None:
        action = "Use Trainer(optimizer='adamw'), or build the engine and call predict_built"
        raise PlanError("optimizer", None, "must be the name of an optimizer", action)
    network, blocks = with_adapters(network, find_blocks(network), plan.adapter)
    # The optimizer has no states yet.
    optimizer = make_optimizer(
        wanted.name,
        network,
        weight_decay=wanted.weight_decay,
        options={key: value for key, value in wanted.options.items() if key not in ("fused", "foreach")},
        weight_rounding=rounding_in_force(plan),
        blocks=blocks,
    )
    return _model_states(network, blocks, plan, device or torch.device("cpu"), rank, [optimizer])


def predict_built(engine: Engine, plan: Plan, rank: int = 0) -> ModelStates:
    """Predict the sizes of the model states of ``engine``, which was created from ``plan``. All units must be
    resharded."""
    return _model_states(engine.module, engine.blocks, plan, engine.device, rank, engine.optimizers)


def layout_of(plan: Plan, device: torch.device, rank: int = 0) -> Layout:
    """Return the settings of ``plan`` that determine the sizes of model states on ``rank``."""
    parallel = plan.parallel
    num_micro_batches = plan.batch.accumulate_grad_batches
    steps_in_backward = lever_that_frees_gradients(plan) is not None
    if parallel.num_ranks == 1 or averages_itself(plan.optimizer.name):
        # DDP does not wrap the model on a single rank, or if the optimizer averages over the ranks, because the
        # gradients then differ between ranks.
        return Layout("single", num_micro_batches=num_micro_batches, steps_in_backward=steps_in_backward)
    is_speculative = plan.offload.optimizer_states != "none" and update_mode(plan) == "speculative"
    is_one_copy = parallel.strategy == "hsdp" and parallel.num_shards == parallel.num_ranks
    return Layout(
        strategy="zero3" if is_one_copy else parallel.strategy,
        num_shards=parallel.num_shards,
        shard=rank % parallel.num_shards,
        num_micro_batches=num_micro_batches,
        wire_dtype=torch.bfloat16 if parallel.reduce_dtype == "bf16" else None,
        on_gloo=device.type == "cpu",
        is_sequential=parallel.communication == "sequential",
        steps_in_backward=steps_in_backward,
        reads_in_backward=is_speculative and num_micro_batches == 1,
        num_backwards=2 if has_two_backwards(plan) else 1,
    )


def _model_states(
    network: nn.Module,
    blocks: Sequence[nn.Module],
    plan: Plan,
    device: torch.device,
    rank: int,
    optimizers: Sequence[Optimizer],
) -> ModelStates:
    updated_by = groups_of_weights(network, optimizers)
    precision = precision_of(plan.precision.mode, device)
    units = units_with_weights(network, blocks, precision.autocast_dtype, precision.weight_dtype)
    buffers = buffer_bytes(network, precision.weight_dtype)
    return model_states(units, layout_of(plan, device, rank), state_bytes_of(plan, updated_by), buffers)


def groups_of_weights(
    network: nn.Module, optimizers: Sequence[Optimizer]
) -> dict[str, tuple[Optimizer, Mapping[str, Any]]]:
    """Return the optimizer and the parameter group of each weight that is updated, by the name of the weight."""
    names = {parameter: name for name, parameter in network.named_parameters()}
    return {
        names[parameter]: (optimizer, group)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter in names
    }


def state_bytes_of(plan: Plan, updated_by: Mapping[str, tuple[Optimizer, Mapping[str, Any]]]) -> StateBytes:
    """Return a function that computes the size of a weight's optimizer states in bytes.

    Args:
        updated_by: optimizer and parameter group of each weight, keyed by the name of the weight.
    """
    known: dict[Hashable, int] = {}  # equal blocks have weights with equal shapes

    def states_of(weight: Weight, own: tuple[int, ...]) -> int:
        found = updated_by.get(weight.name)
        if found is None:  # no optimizer updates it
            return 0
        optimizer, group = found
        key = (id(group), weight.shape, own, weight.dtype)
        if key not in known:
            known[key] = _state_bytes(plan, optimizer, group, weight, own)
        return known[key]

    return states_of


def _state_bytes(
    plan: Plan, optimizer: Optimizer, group: Mapping[str, Any], weight: Weight, own: tuple[int, ...]
) -> int:
    if isinstance(optimizer, OneBitAdam):
        rounds = plan.optimizer.options.get("rounds_variance", plan.parallel.strategy == "zero1")
        return onebit_adam_bytes(math.prod(own), plan.parallel.num_ranks, rounds_variance=bool(rounds))
    return state_bytes(optimizer, group, own, weight.dtype, weight.shape)
