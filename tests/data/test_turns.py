"""Evaluation on several ranks: each batch that a single rank would evaluate counts once."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from roomier.core.errors import DataError
from roomier.core.ranks import Ranks
from roomier.core.world import World
from roomier.data.source import Source
from tests.covering import few
from tests.data.pretended import Pretended


class Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


class Stream(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


class Sharded(Stream):
    def __iter__(self) -> Iterator[int]:
        return iter(range(dist.get_rank(), self.length, dist.get_world_size()))


def padded(length: int) -> DataLoader[int]:
    sampler = DistributedSampler(Numbers(length), num_replicas=4, rank=1, shuffle=False)
    return DataLoader(Numbers(length), sampler=sampler)


LOADERS: dict[str, Callable[[int], Any]] = {
    "list": lambda length: list(torch.arange(length).split(1)),
    "data loader": lambda length: DataLoader(Numbers(length)),
    "distributed sampler": padded,
    "unbatched": lambda length: DataLoader(Numbers(length), batch_size=None),
    "stream": lambda length: DataLoader(Stream(length)),
}


def source(loader: Any, rank: int, size: int, ranks: Ranks | None = None) -> Source:
    ranks = ranks or Pretended(rank, size)
    return Source(loader, name="val_dataloaders", seed=0, ranks=ranks, training=False)


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("size", few([2, 1, 4]))
@pytest.mark.parametrize("limit", few([5, float("inf")]))
def test_each_batch_counts_once(kind: str, size: int, limit: float):
    for length in range(1, 10):
        of_ranks = [list(source(LOADERS[kind](length), rank, size).turns(limit)) for rank in range(size)]
        assert len({len(turns) for turns in of_ranks}) == 1
        counted = sorted((turn.number, int(turn.batch)) for turns in of_ranks for turn in turns if turn.counts)
        assert counted == [(number, number) for number in range(int(min(length, limit)))]
        for turns in of_ranks:
            assert all(turn.counts for turn in turns[:-1])
            assert all(isinstance(turn.batch, (int, Tensor)) for turn in turns)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_each_rank_loads_only_its_own_batches(num_workers: int):
    part = source(DataLoader(Numbers(9), batch_size=2, num_workers=num_workers), 1, 2)
    assert part.num_batches == 5
    turns = list(part.turns(float("inf")))
    assert [turn.batch.tolist() for turn in turns] == [[2, 3], [6, 7], [8]]
    assert [turn.counts for turn in turns] == [True, True, False]
    assert [turn.batch.tolist() for turn in part.turns(2)] == [[2, 3]]


def test_a_shuffling_loader_has_one_order_on_all_ranks():
    numbers = []
    for rank in range(3):
        torch.manual_seed(rank)
        turns = source(DataLoader(Numbers(12), shuffle=True), rank, 3).turns(float("inf"))
        numbers += [int(turn.batch) for turn in turns if turn.counts]
    assert sorted(numbers) == list(range(12))


def test_removed_padding_is_reported(capsys):
    source(padded(5), 0, 2)
    assert "replaced the DistributedSampler, which repeats samples" in capsys.readouterr().err


def turns_of(make: Callable[[int], Any], length: int, limit: float) -> list[tuple[int, bool]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    part = source(DataLoader(make(length)), rank, size, Ranks(World(rank, size)))
    return [(int(turn.batch), turn.counts) for turn in part.turns(limit)]


@pytest.mark.parametrize(("length", "limit"), few([(7, 100), (8, 100), (8, 5), (4, 2), (2, 1)], 2))
def test_a_stream_that_shards_itself(on_ranks, length: int, limit: int):
    of_ranks = on_ranks(2, turns_of, Sharded, length, limit)
    assert len(of_ranks[0]) == len(of_ranks[1])
    counted = sorted(batch for turns in of_ranks for batch, counts in turns if counts)
    assert counted == list(range(min(length, limit)))


def turns_or_error(make: Callable[[int], Any]) -> str:
    try:
        turns_of(make, 1, 100)
    except DataError as error:
        return error.problem
    return ""


@pytest.mark.more
def test_a_rank_without_batches_raises_on_all_ranks(on_ranks):
    problem = "is sharded across ranks by Sharded (reads its rank), but rank 1 has no batch"
    assert on_ranks(2, turns_or_error, Sharded) == [problem, problem]


class OfAnotherLength(Stream):
    """Stream with a different length on each rank."""

    def __init__(self, length: int) -> None:
        super().__init__(length + 2 * dist.group.WORLD.rank())


@pytest.mark.more
def test_streams_of_different_lengths_raise_on_all_ranks(on_ranks):
    problem = "yields different numbers of batches on different ranks"
    assert on_ranks(2, turns_or_error, OfAnotherLength) == [problem, problem]
