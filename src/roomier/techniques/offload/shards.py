"""Shards that ``fully_shard`` created and that are on the device only while they are all-gathered or updated.

``fully_shard`` reads the shards of a unit only in the all-gather of the unit, which it can start before the forward or
backward pass of the previous unit. Hooks of the module would run too late. The method that starts the all-gather is
therefore wrapped to copy the shards to the device first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import nn

from roomier.core.torch_offload import ShardGroup
from roomier.techniques.offload.regions import Region, ShardSlot, layout
from roomier.techniques.offload.residency import Residency
from roomier.techniques.tiers.tier import Tier


def sharded_regions(groups: Iterable[ShardGroup]) -> list[Region]:
    """Return one region for each group of shards."""
    regions: list[Region] = []
    for group in groups:
        places, num_bytes = layout([shard.padded for shard in group.shards])
        slots = tuple(ShardSlot(shard, place) for shard, place in zip(group.shards, places, strict=True))
        regions.append(Region(len(regions), group.name, slots, num_bytes))
    return regions


class OffloadedShards(Residency):
    """Shards that leave the device for a tier.

    Args:
        network: model that contains the shards.
        groups: the groups of shards, in the order of the forward passes.
        regions: result of :func:`sharded_regions` for ``groups``.
        tier: tier with the records of :func:`roomier.techniques.offload.residency.record_sizes`.
        device: device on which the model runs.

    The attributes are described in :class:`Residency`.

    Raises:
        PlanError: the model has no blocks.
    """

    def __init__(
        self,
        network: nn.Module,
        groups: Sequence[ShardGroup],
        regions: Sequence[Region],
        tier: Tier,
        device: torch.device,
    ) -> None:
        self._groups = list(groups)
        super().__init__(network, regions, [(region,) for region in regions], tier, device)

    def install(self) -> None:
        """Wrap each all-gather so that the shards are brought to the device first."""
        for group, region in zip(self._groups, self.regions, strict=True):
            group.before_unshard(partial(self._before_unshard, region))

    @torch.no_grad()
    def _before_unshard(self, region: Region) -> None:
        self.use((region,))
        for each in self.before_use:
            each(region)

    def _uninstall(self) -> None:
        for group in self._groups:
            group.restore_unshard()
