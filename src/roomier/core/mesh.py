"""Arrangement of the ranks of a run in dimensions. It determines which ranks read the same samples, which ranks store
one replica of the model, and which ranks communicate with each other."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from roomier.core.world import World

TENSOR, CONTEXT, SHARD, REPLICATE, STAGE = "tensor", "context", "shard", "replicate", "stage"
_DIMENSIONS = (TENSOR, CONTEXT, SHARD, REPLICATE, STAGE)
INNER = (TENSOR, CONTEXT, STAGE)
"""Dimensions whose ranks read the same samples."""
OUTER = (SHARD, REPLICATE)


@dataclass(frozen=True)
class Mesh:
    """Sizes of the dimensions, from inner to outer: tensor, context, shard, replicate, stage. Ranks with consecutive
    coordinates in the inner dimensions have consecutive numbers, because they are usually on the same node. The stage
    is the outermost dimension, because stages exchange the fewest bytes.

    Parameters and optimizer states are sharded across the ranks of the three inner dimensions. The ranks of the tensor,
    context and stage dimensions read the same samples, and are called peers. A data rank is the index of a group of
    peers.

    Stages are numbered from the last rank to the first, so that rank 0 belongs to the last stage, which computes the
    loss.

    Args:
        world: this rank and the number of ranks.
        tensor: number of ranks that compute parts of the same layers.
        context: number of ranks that compute slices of the same sequences.
        shard: number of data ranks across which a stage of a replica of the model is sharded.
        stage: number of consecutive parts of the model that different ranks compute.
    """

    world: World = field(default_factory=World)
    tensor: int = 1
    context: int = 1
    shard: int = 1
    stage: int = 1

    @property
    def num_peers(self) -> int:
        """Number of ranks that read the same samples."""
        return self.tensor * self.context * self.stage

    @property
    def replicate(self) -> int:
        """Number of replicas of the model."""
        return self.world.size // (self.shards.size * self.stage)

    @property
    def stage_index(self) -> int:
        """Number of the first stage of this rank, which identifies the rank in its pipeline; 0 is the first stage."""
        return self.stage - 1 - self.coordinate(STAGE)

    @property
    def representatives(self) -> range:
        """The first rank of each group of peers, in the order of the data ranks. These ranks belong to the last
        stage."""
        return range(0, self.world.size // self.stage, self.tensor * self.context)

    def representative_of(self, rank: int) -> int:
        """Return the first of the peers of ``rank``."""
        step = self.representatives.step
        return rank % self.representatives.stop // step * step

    @property
    def data(self) -> World:
        """Data rank and number of data ranks. With one peer per group, this is :attr:`world`."""
        if self.num_peers == 1:
            return self.world
        first = self.representatives
        rank = self.representative_of(self.world.rank) // first.step
        local_size = max(1, min(self.world.local_size, first.stop) // first.step)
        return World(rank, len(first), rank % local_size, rank // local_size, local_size)

    @property
    def shards(self) -> World:
        """Index of this rank among the ranks that store one replica of its stage, and the number of these ranks."""
        size = self.tensor * self.context * self.shard
        return World(self.world.rank % size, size)

    def describe(self, rank: int) -> str:
        """Return the name of ``rank`` for messages. It contains the stage if there are several, counted from 1."""
        stage = f" (stage {self.stage - rank * self.stage // self.world.size} of {self.stage})"
        return f"rank {rank}{stage if self.stage > 1 else ''}"

    def coordinate(self, dimension: str) -> int:
        """Return the index of this rank in ``dimension``."""
        stride, size = self._stride_and_size(dimension)
        return self.world.rank // stride % size

    def along(self, *dimensions: str) -> tuple[int, ...]:
        """Return the ranks whose coordinates differ from those of this rank only in ``dimensions``, in ascending
        order."""
        ranks = [self.world.rank]
        for dimension in dimensions:
            stride, size = self._stride_and_size(dimension)
            own = self.coordinate(dimension)
            ranks = [rank + (index - own) * stride for index in range(size) for rank in ranks]
        return tuple(sorted(ranks))

    def _stride_and_size(self, dimension: str) -> tuple[int, int]:
        inner = _DIMENSIONS[: _DIMENSIONS.index(dimension)]
        return math.prod(getattr(self, each) for each in inner), getattr(self, dimension)
