"""Entry point of offloading: creates the objects that store tensors outside the device between their uses.

| tensors | created by | kept and moved by |
|---|---|---|
| parameters of an unsharded network | :func:`filled_parameters` | ``techniques/offload/parameters.py`` |
| parameters that ``fully_shard`` shards | :func:`offloaded_shards` | ``techniques/offload/shards.py`` |
| gradients of these parameters | both functions | ``techniques/offload/residency.py`` |
| optimizer states | :func:`offloaded_updates` | ``techniques/offload/states.py`` |
| activations | ``techniques/activation/recompute.py`` | ``techniques/activation/copies.py`` |

:func:`tier_of` creates the storage of the parameters and states: records in host memory or on disk
(``techniques/tiers``). ``build`` calls :func:`filled_parameters` or :func:`offloaded_shards` before it creates the
optimizers. :func:`offloaded_updates` then returns the object that updates the parameters while they or their states are
on the device: ``OffloadedUpdates`` determines when a unit is updated, and ``ParameterTier`` what happens to
its parameters and gradients. ``docs/design/offload.md`` explains the transfers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roomier.core import torch_fake
from roomier.core.errors import PlanError
from roomier.core.host_memory import always_give_back_blocks
from roomier.core.sharded import local_part
from roomier.core.torch_offload import groups_of
from roomier.engine.facts import Facts
from roomier.engine.materialise import TakenWeights
from roomier.engine.narrowed import homes_of
from roomier.engine.offloaded_updates import OffloadedUpdates, ParameterTier, check_optimizer
from roomier.engine.step_in_backward import FIELD, StepInBackward
from roomier.engine.updates import ParametersOnDevice, Updates
from roomier.engine.weights_file import WeightsToRead
from roomier.plan import OffloadPlan, Plan
from roomier.plan.levers import update_mode
from roomier.techniques.loss.chunked import find_output_layer
from roomier.techniques.offload.parameters import OffloadedParameters
from roomier.techniques.offload.regions import MIN_BYTES, Region, regions_of
from roomier.techniques.offload.residency import Residency, record_sizes
from roomier.techniques.offload.shards import OffloadedShards, sharded_regions
from roomier.techniques.offload.staging import staging_of
from roomier.techniques.offload.states import OffloadedStates, first_leaving, record_bytes, units_around, units_of
from roomier.techniques.optim.state_bytes import state_bytes
from roomier.techniques.parallel.parallel import Parallel
from roomier.techniques.tiers.disk import DiskTier
from roomier.techniques.tiers.scratch import Scratch
from roomier.techniques.tiers.tier import HostTier, Tier

NUM_BUFFERS = 4
"""Number of buffers in the ring of a disk tier that stores parameters."""
_NUM_AHEAD = 2
"""Number of parameter records that are read ahead. The other buffers are for the current region and for its
gradients."""


def offloaded_parameters(
    plan: Plan, facts: Facts, taken: TakenWeights | None, *, min_bytes: int = MIN_BYTES
) -> OffloadedParameters:
    """Move the parameters of an unsharded network to the tier that ``plan`` names.

    If the parameters are on the meta device, at most one region is in memory at a time.

    Args:
        taken: weights of parameters on the meta device. None if all parameters have values.
        min_bytes: the parameters of a module outside the blocks stay on the device if they have fewer bytes.

    Raises:
        PlanError: the network has no blocks.
        TierError: the tier cannot be created.
    """
    network, blocks = facts.network, facts.blocks
    # A chunked loss reads the weights of the output layer after the layer's ``forward`` has returned.
    read_later = find_output_layer(network, blocks) if plan.loss.chunked else None
    regions = regions_of(network, blocks, min_bytes, lambda module: module is read_later)
    values = None if taken is None else taken.values_of(network)
    tier = _tier_of_parameters(plan, regions, facts.device)
    return OffloadedParameters(network, blocks, regions, tier, facts.device, values)


def filled_parameters(
    plan: Plan, facts: Facts, taken: TakenWeights | None, weights: WeightsToRead | None
) -> OffloadedParameters:
    """Offload the parameters with :func:`offloaded_parameters`, and read or restore all values.

    Args:
        weights: file with the initial weights; None keeps the values of the network.
    """
    network = facts.network
    parameters = offloaded_parameters(plan, facts, taken)
    if taken is not None:
        taken.restore(network, network, facts.device)
    if weights is not None:
        parameters.settle()
        parameters.show_stored()
        weights.read_into(network, parameters.prepare_to_write)
        parameters.settle()
    return parameters


def offloaded_shards(plan: Plan, facts: Facts) -> OffloadedShards:
    """Move the shards that ``fully_shard`` created for a network to the tier that ``plan`` names.

    Raises:
        PlanError: the network has no blocks.
        TierError: the tier cannot be created.
    """
    groups = groups_of(facts.network)
    regions = sharded_regions(groups)
    tier = _tier_of_parameters(plan, regions, facts.device)
    return OffloadedShards(facts.network, groups, regions, tier, facts.device)


def tier_of(
    offload: OffloadPlan, name: str, sizes: Sequence[int], device: torch.device, *, num_buffers: int, **options: Any
) -> Tier:
    """Return a new tier for records of ``sizes``.

    Args:
        name: ``"disk"`` for a tier on disk. Any other name creates a tier in host memory.
        sizes: size of each record in bytes.
        num_buffers: number of buffers in a disk tier.
        options: other arguments of :class:`roomier.techniques.tiers.disk.DiskTier`.
    """
    pinned = device.type != "cpu"
    if name != "disk":
        return HostTier(sizes, pinned)
    if not pinned:
        always_give_back_blocks(2**20)  # otherwise, the process retains the memory of freed tensors
    return DiskTier(Scratch(offload.folder), sizes, num_buffers, pinned, closes_scratch=True, **options)


def _tier_of_parameters(plan: Plan, regions: Sequence[Region], device: torch.device) -> Tier:
    sizes, name = record_sizes(regions), plan.offload.parameters
    return tier_of(plan.offload, name, sizes, device, num_buffers=NUM_BUFFERS, num_ahead=_NUM_AHEAD)


def offloaded_updates(
    plan: Plan, facts: Facts, optimizers: Sequence[Optimizer], parallel: Parallel, residency: Residency | None
) -> OffloadedUpdates:
    """Return updates whose optimizer states or parameters are in the tiers that ``plan`` names.

    Args:
        residency: the offloaded parameters; None if no parameters are offloaded.

    Raises:
        PlanError: an optimizer or manual optimization does not support the offloading that ``plan`` requests.
        TierError: the tier cannot be created.
    """
    for optimizer in optimizers:
        check_optimizer(optimizer)
    homes = homes_of(optimizers)
    trained = [each for each in homes if isinstance(each, nn.Parameter)]
    if residency is None:
        modules = parallel.units or _closed(facts.network, facts.blocks)
        units = units_of(trained, modules, [*parallel.root_parameters, *parallel.late_parameters])
    else:
        units = units_around([region.parameters for region in residency.regions], trained)
    bytes_of = {}
    for parameter in (each for unit in units for each in unit.parameters):
        own = tuple(local_part(parameter.detach()).shape)
        bytes_of[parameter] = state_bytes(*homes[parameter], own, parameter.dtype, tuple(parameter.shape))
    unit_bytes = [sum(bytes_of[each] for each in unit.parameters) for unit in units]
    has_tier = plan.offload.optimizer_states != "none"
    first = first_leaving(unit_bytes, plan.offload.share) if has_tier else len(units)
    mode = mode_of(plan, facts, optimizers)
    is_speculative = mode == "speculative"
    sizes = [record_bytes(unit, bytes_of, holds_weights=is_speculative) for unit in units[first:]]
    sizes *= 1 + is_speculative
    tier = tier_of(
        plan.offload,
        plan.offload.optimizer_states,
        sizes,
        facts.device,
        num_buffers=plan.offload.buffers,
        num_ahead=None if plan.offload.buffers > 1 else 0,
        shares_large=True,
    )
    staging = staging_of(tier, sizes, facts.device)
    return OffloadedUpdates(
        optimizers,
        units,
        OffloadedStates(units, first, optimizers, staging, is_speculative=is_speculative),
        mode=mode,
        facts=facts,
        parameters=ParametersOnDevice() if residency is None else ParameterTier(residency, units, homes, parallel),
        parallel=parallel,
    )


def mode_of(plan: Plan, facts: Facts, optimizers: Sequence[Optimizer]) -> str:
    """Return the update mode; see [Note: three exact modes].

    Raises:
        PlanError: with manual optimization, the Plan offloads parameters or requests deferred or speculative updates.
    """
    mode = plan.offload.update
    if facts.is_manual and plan.offload.parameters != "none":
        problem = "is not supported with manual optimization, in which gradients must stay on the device"
        action = "Offload only the optimizer states, or use automatic optimization"
        raise PlanError("offload.parameters", plan.offload.parameters, problem, action)
    if facts.is_manual:
        if mode in ("deferred", "speculative"):
            problem = "is not supported with manual optimization, in which training_step steps the optimizers"
            raise PlanError("offload.update", mode, problem, "Use 'plain', or use automatic optimization")
        return "plain"
    return update_mode(plan)


def _closed(network: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the blocks that share no parameter with a module outside the block."""
    owners = _num_owners(network)
    return [block for block in blocks if all(num == owners[each] for each, num in _num_owners(block).items())]


def _num_owners(module: nn.Module) -> Counter[Tensor]:
    return Counter(each for part in module.modules() for each in part.parameters(recurse=False))


def updates_of(
    plan: Plan, facts: Facts, optimizers: Sequence[Optimizer], parallel: Parallel, residency: Residency | None
) -> Updates:
    """Return the object that determines when the optimizers step and where the optimizer states are stored.

    Args:
        residency: the offloaded parameters; None if no parameters are offloaded.

    Raises:
        PlanError: ``plan`` requests updates that manual optimization or one of the optimizers does not support.
        TierError: the tier of the optimizer states cannot be created.
    """
    has_states = plan.offload.optimizer_states != "none" and bool(optimizers) and not torch_fake.makes_fake_tensors()
    if has_states or residency is not None:
        return offloaded_updates(plan, facts, optimizers, parallel, residency)
    way = plan.optimizer.step_in_backward
    if way == "none" or not optimizers:
        return Updates(parallel)
    if facts.is_manual:
        problem = "is not supported with manual optimization, in which training_step steps the optimizers"
        raise PlanError(FIELD, way, problem, "Set step_in_backward=False, or use automatic optimization")
    return StepInBackward(
        facts.network,
        optimizers,
        facts.blocks,
        way=way,
        batch_plan=plan.batch,
        parallel=parallel,
    )
