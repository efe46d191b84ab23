"""Distribution of a model across ranks, as the Plan's strategy requires.

The implementations of the strategies are imported in the functions that use them, because the imports take half a
second and a run with a single process does not need them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from roomier.api.blocks import open_blocks
from roomier.core import torch_fake
from roomier.core.errors import RoomierError
from roomier.core.host_memory import retain_freed_blocks
from roomier.engine.facts import OWNERS, Facts
from roomier.engine.materialise import TakenWeights, on_meta, replace_parameters, shards_parameters
from roomier.plan import Plan
from roomier.plan.choices import averages_itself
from roomier.techniques.parallel.parallel import Parallel
from roomier.techniques.pipeline.pipeline import Pipeline

if TYPE_CHECKING:
    from roomier.techniques.parallel.shard import Shards

_SHARDS = "_roomier_shards"


def is_sharded(network: nn.Module) -> bool:
    """Return whether a run sharded the parameters of ``network``."""
    return _SHARDS in network.__dict__


def divide(plan: Plan, facts: Facts, taken: TakenWeights | None = None) -> Parallel:
    """Distribute the network across the ranks, in place.

    Args:
        plan: plan of the run.
        facts: properties of the network.
        taken: weights that were moved out of the network. A pipeline restores them.

    Raises:
        RoomierError: the strategy does not support the network.
    """
    network, device, ranks = facts.network, facts.device, facts.ranks
    wanted = plan.parallel
    if facts.is_staged and facts.pipeline is None:
        raise _sharded_differently(network)
    if ranks.is_alone or wanted.strategy == "single":  # a trace has one replica among fake peers
        return Parallel()
    earlier: Shards | None = network.__dict__.get(_SHARDS)
    is_whole = ranks.mesh.shard == 1 if facts.pipeline is not None else not shards_parameters(plan, ranks)
    if earlier is not None and is_whole:
        raise _sharded_differently(network)
    wire_dtype = torch.bfloat16 if wanted.reduce_dtype == "bf16" else None
    if facts.pipeline is not None:
        _move_to_stages(facts, facts.pipeline, taken)
        if is_whole:
            from roomier.techniques.parallel.stages import Stages  # late import: unused by one process

            return Stages(network, ranks, network.__dict__[OWNERS], wire_dtype)
    if averages_itself(plan.optimizer.name):
        from roomier.techniques.parallel.replicate import OwnGradients  # late import: unused by one process

        return OwnGradients(network, ranks)
    if is_whole:
        from roomier.techniques.parallel.agree import take_values_of_rank_zero  # late import: unused by one process
        from roomier.techniques.parallel.replicate import Replicas  # late import: a single process does not need it

        take_values_of_rank_zero(network, ranks)  # DDP also does this, but is created after the first step, or never
        return Replicas(
            network,
            device,
            ranks,
            by_hand=facts.is_manual,
            wanted=wanted,
            wire_dtype=wire_dtype,
        )
    return _sharded(plan, facts, earlier, wire_dtype)


def _sharded(plan: Plan, facts: Facts, earlier: Shards | None, wire_dtype: torch.dtype | None) -> Parallel:
    from roomier.techniques.parallel import shard  # late import: a single process does not need it
    from roomier.techniques.parallel.agree import take_values_of_rank_zero  # late import: as above
    from roomier.techniques.parallel.mesh import make_mesh  # late import: as above

    network, device, ranks, wanted = facts.network, facts.device, facts.ranks, plan.parallel
    sharding = shard.Sharding(
        mesh=make_mesh(device.type, wanted.mesh_on(ranks.world)),
        frees_parameters=wanted.strategy in ("zero3", "hsdp"),
        reduces_each_micro_batch=wanted.strategy != "zero1" or plan.batch.accumulate_grad_batches == 1,
        compute_dtype=facts.precision.autocast_dtype,
        wire_dtype=wire_dtype,
        finds_unused=wanted.find_unused_parameters,
        by_hand=facts.is_manual,
        is_pairwise=ranks.exchange_pairwise(device),
        is_sequential=wanted.communication == "sequential",
    )
    if earlier is not None:  # an earlier fit sharded this network, and the same shards are used again
        if earlier.sharding != sharding:
            raise _sharded_differently(network)
        earlier.release()
        earlier.begin_run()
        return earlier
    if sharding.is_pairwise:
        _retain_memory_of_steps(plan, network)
    shard.check_shardable(network)
    shard.lay_out_by_rows(network)
    if facts.pipeline is not None:
        from roomier.techniques.parallel.sharded_stages import ShardedStages  # late import: as above

        shards: Shards = ShardedStages(network, sharding, open_blocks(facts.blocks), ranks, network.__dict__[OWNERS])
    else:
        take_values_of_rank_zero(network, ranks)
        shards = shard.Shards(network, sharding, facts.blocks)
    shards.begin_run()
    network.__dict__[_SHARDS] = shards  # not by setattr, which would register the shards as a submodule
    return shards


def _move_to_stages(facts: Facts, pipeline: Pipeline, taken: TakenWeights | None) -> None:
    from roomier.techniques.parallel.agree import take_values_of_rank_zero  # late import: unused by one process

    network, stage = facts.network, facts.ranks.mesh.stage_index
    if not facts.is_staged:
        take_values_of_rank_zero(network, facts.ranks)
        owners = network.__dict__[OWNERS] = pipeline.owners(network, facts.blocks)
        absent = {each for name, each in network.named_parameters() if stage not in owners[name]}
        replace_parameters(network, lambda each: on_meta(each) if each in absent else each)
        if taken is not None:
            taken.move_to_stages(owners, stage)
            taken.restore(network, network, facts.device)


def _retain_memory_of_steps(plan: Plan, network: nn.Module) -> None:
    """Make glibc retain the memory that a step frees, unless tensors are offloaded to save host memory.

    A step frees unsharded parameters, gradients and buffers of collectives, and the next step allocates them again. If
    glibc returned their memory in between, the kernel would clear each page in every step.
    """
    offload = plan.offload
    is_offloaded = {offload.optimizer_states, offload.parameters, offload.activations} != {"none"}
    if not (is_offloaded or torch_fake.makes_fake_tensors()):
        step_bytes = 2 * sum(each.nbytes for each in network.parameters())
        retain_freed_blocks(min(max(step_bytes, 2**26), 2**31 - 1))


def _sharded_differently(network: nn.Module) -> RoomierError:
    problem = "was sharded in a different way by an earlier run, and this sharding cannot be undone"
    action = "Use the strategy, precision and accumulation of that run, or load its checkpoint into a new model"
    return RoomierError("model", type(network).__name__, problem, action)
