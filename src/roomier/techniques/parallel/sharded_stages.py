"""Parameters of a pipeline that are sharded over the ranks of each stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from roomier.core.ranks import Ranks
from roomier.techniques.parallel.shard import Sharding, Shards
from roomier.techniques.parallel.stages import Stages


class ShardedStages(Stages, Shards):
    """Network of which each rank stores a shard of one stage.

    After the last backward pass of a step, :class:`Shards` has summed the gradients over the ranks of a stage, and
    :class:`Stages` sums the shards of shared weights over the stages.

    Args:
        network: network whose absent parameters are on the meta device.
        sharding: settings of the sharding, whose mesh contains the ranks of this stage.
        blocks: the blocks of the network.
        ranks: all ranks of the run.
        owners: for each parameter, the numbers of the stages that store it.
    """

    def __init__(
        self,
        network: nn.Module,
        sharding: Sharding,
        blocks: Sequence[nn.Module],
        ranks: Ranks,
        owners: Mapping[str, tuple[int, ...]],
    ) -> None:
        stage = ranks.mesh.stage_index
        absent = {each for name, each in network.named_parameters() if stage not in owners[name]}
        Shards.__init__(self, network, sharding, blocks, absent)
        Stages.__init__(self, network, ranks, owners, sharding.wire_dtype)
