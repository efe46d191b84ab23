"""From the Plan's strategy to a module divided among ranks. What it takes is imported where it is needed: half a second
that one process does not pay."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from roomier.core.errors import RoomierError
from roomier.core.ranks import Ranks
from roomier.engine.materialise import cuts_parameters
from roomier.engine.parallel import Parallel
from roomier.plan import Plan
from roomier.precision.policy import Precision

if TYPE_CHECKING:
    from roomier.parallel.shard import Sharding, Shards

_SHARDS = "_roomier_shards"


def divide(
    plan: Plan, network: nn.Module, device: torch.device, precision: Precision, ranks: Ranks, *, by_hand: bool
) -> Parallel | None:
    """``network`` divided among the ranks, in place; with one rank there is nothing to divide.

    Args:
        by_hand: backward and update run within a training step (manual optimization).

    Raises:
        RoomierError: it cannot be divided in this way.
    """
    if ranks.is_alone:
        return None
    wanted = plan.parallel
    earlier: Shards | None = network.__dict__.get(_SHARDS)
    if earlier is not None and not cuts_parameters(plan, ranks):
        raise _cut_otherwise(network)
    if plan.optimizer.name == "onebit_adam":
        from roomier.parallel.own_gradients import OwnGradients

        return OwnGradients(network, ranks)
    from roomier.parallel.agree import take_values_of_rank_zero

    wire_dtype = torch.bfloat16 if wanted.reduce_dtype == "bf16" else None
    if wanted.strategy == "ddp":
        from roomier.parallel.powersgd import PowerSGD
        from roomier.parallel.replicate import Replicas

        take_values_of_rank_zero(network, ranks)  # DDP does so too, but is made after the first step, or never
        compresses = wanted.gradient_compression == "powersgd"
        return Replicas(
            network,
            device,
            ranks,
            by_hand=by_hand,
            finds_unused=wanted.find_unused_parameters,
            wire_dtype=wire_dtype,
            compression=PowerSGD(wanted.compression_rank, wanted.compression_warmup_steps) if compresses else None,
        )
    from roomier.parallel.mesh import make_mesh
    from roomier.parallel.shard import Sharding, Shards, check_shardable, lay_out_by_rows

    sharding = Sharding(
        mesh=make_mesh(device.type, ranks.world.size, wanted.num_shards),
        frees_parameters=wanted.strategy in ("zero3", "hsdp"),
        reduces_each_micro_batch=wanted.strategy != "zero1" or plan.batch.accumulate_grad_batches == 1,
        compute_dtype=precision.autocast_dtype,
        wire_dtype=wire_dtype,
        finds_unused=wanted.find_unused_parameters,
        by_hand=by_hand,
        is_pairwise=ranks.exchange_pairwise(device),
    )
    if earlier is not None:  # a fit before: the model is evaluated, or fitted again, as it was cut
        _check_cut_alike(earlier, sharding, network)
        earlier.release()
        earlier.begin_run()
        return earlier
    check_shardable(network)
    lay_out_by_rows(network)
    take_values_of_rank_zero(network, ranks)
    shards = Shards(network, sharding)
    shards.begin_run()
    network.__dict__[_SHARDS] = shards  # past __setattr__, for which it would be a part of the model
    return shards


def _check_cut_alike(earlier: Shards, wanted: Sharding, network: nn.Module) -> None:
    if earlier.sharding != wanted:
        raise _cut_otherwise(network)


def _cut_otherwise(network: nn.Module) -> RoomierError:
    action = "Use the strategy, precision and accumulation of that run, or load its checkpoint into a new model"
    problem = "an earlier run divided it among the ranks in another way, which cannot be undone"
    return RoomierError("model", type(network).__name__, problem, action)
