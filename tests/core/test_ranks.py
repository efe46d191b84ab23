"""Functions that only rank 0 calls, with one result or error on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from roomier.core.errors import DataError
from roomier.core.ranks import Ranks
from roomier.core.world import World


class PeculiarError(Exception):
    """An error that cannot be created from its arguments."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


def refuse() -> None:
    raise DataError("train_dataloaders", (number for number in range(3)), "is read once only", "Pass a list")


def fail() -> None:
    raise PeculiarError(code=7)


def raised_on_ranks() -> list[tuple[str, str]]:
    """Return the types and texts that two errors of rank 0 have on this rank."""
    ranks = Ranks(World(dist.get_rank(), dist.get_world_size(), dist.get_rank(), 0, dist.get_world_size()))
    found = []
    for function in (refuse, fail):
        try:
            ranks.on_zero(function)
        except Exception as error:
            found.append((type(error).__name__, str(error)))
    assert ranks.gather(len(found)) == [2, 2]  # the ranks still make the same calls
    return found


def test_an_error_that_cannot_be_sent_is_raised_with_its_text_on_every_rank(on_ranks: Any) -> None:
    first, second = on_ranks(2, raised_on_ranks)
    assert first[0] == second[0]
    assert first[0][0] == "DataError"
    assert first[1] == ("PeculiarError", "code 7")
    assert second[1] == ("RuntimeError", "PeculiarError on rank 0: code 7")


def test_a_single_rank_raises_the_original_error() -> None:
    with pytest.raises(PeculiarError, match="code 7"):
        Ranks().on_zero(fail)
