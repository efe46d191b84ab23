"""Creates the tier for the parameters of a network, as the Plan requires."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from roomier.core.host_memory import always_give_back_blocks
from roomier.core.torch_offload import groups_of
from roomier.engine.facts import Facts
from roomier.engine.levers import layers_read_later
from roomier.engine.materialise import TakenWeights
from roomier.engine.weights_file import WeightsToRead
from roomier.plan import OffloadPlan, Plan
from roomier.techniques.offload.parameters import OffloadedParameters
from roomier.techniques.offload.regions import MIN_BYTES, Region, regions_of
from roomier.techniques.offload.residency import no_values, record_sizes
from roomier.techniques.offload.shards import OffloadedShards, sharded_regions
from roomier.techniques.tiers.disk import DiskTier
from roomier.techniques.tiers.host import HostTier
from roomier.techniques.tiers.scratch import Scratch
from roomier.techniques.tiers.tier import Tier

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
    read_later = layers_read_later(plan, facts)
    regions = regions_of(network, blocks, min_bytes, lambda module: module in read_later)
    values: Callable[[nn.Parameter], Tensor | None] = no_values if taken is None else taken.values_of(network)
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
    offload: OffloadPlan,
    name: str,
    sizes: Sequence[int],
    device: torch.device,
    *,
    num_buffers: int,
    num_ahead: int | None = None,
    shares_large: bool = False,
) -> Tier:
    """Return a new tier for records of ``sizes``.

    Args:
        name: ``"disk"`` for a tier on disk. Any other name creates a tier in host memory.
        sizes: size of each record in bytes.
        num_buffers: number of buffers in a disk tier.
        num_ahead, shares_large: arguments of a disk tier; see :class:`roomier.techniques.tiers.disk.DiskTier`.
    """
    pinned = device.type != "cpu"
    if name == "disk":
        if not pinned:
            always_give_back_blocks(2**20)  # otherwise, the process retains the memory of freed tensors
        scratch = Scratch(offload.folder)
        return DiskTier(scratch, sizes, num_buffers, pinned, num_ahead, shares_large=shares_large, closes_scratch=True)
    return HostTier(sizes, pinned)


def _tier_of_parameters(plan: Plan, regions: Sequence[Region], device: torch.device) -> Tier:
    sizes = record_sizes(regions)
    name = plan.offload.parameters
    return tier_of(plan.offload, name, sizes, device, num_buffers=NUM_BUFFERS, num_ahead=_NUM_AHEAD)
