"""Which rank this process is, among how many."""

from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    """The place of this process in the job: one value, never a global.

    Attributes:
        rank: of this process among all, from 0. size: how many there are.
        local_rank: among those of its node. local_size: how many a node has.
        node_rank: of its node.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    node_rank: int = 0
    local_size: int = 1

    @property
    def is_global_zero(self) -> bool:
        return self.rank == 0
