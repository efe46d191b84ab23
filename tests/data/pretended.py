"""A rank without the other ranks of its process group."""

from typing import Any

from roomier.core.ranks import Ranks
from roomier.core.world import World


class Pretended(Ranks):
    """One of several ranks that a test runs one after another in one process. Gathered values must be equal on all
    ranks."""

    def __init__(self, rank: int, size: int) -> None:
        self.world = World(rank, size)
        self.data, self.peers = self, Ranks()

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.world.size

    def from_zero(self, value: Any) -> Any:
        return value
