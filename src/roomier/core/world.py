"""Which rank this process is, among how many."""

from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    """The place of this process in the job: one value, never a global."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    node_rank: int = 0

    @property
    def is_global_zero(self) -> bool:
        return self.rank == 0
