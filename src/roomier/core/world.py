"""Rank of this process, and number of ranks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    """Position of this process in the job.

    Attributes:
        rank: rank of this process, from 0 to ``size - 1``.
        size: number of ranks.
        local_rank: rank within the node.
        node_rank: index of the node.
        local_size: number of ranks on each node.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    node_rank: int = 0
    local_size: int = 1

    @property
    def is_global_zero(self) -> bool:
        """True if this process is rank 0."""
        return self.rank == 0

    @property
    def is_one_node(self) -> bool:
        """True if all ranks run on this node."""
        return self.local_size == self.size
