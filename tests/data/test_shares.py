"""Samples of each rank: every sample goes to one rank, even if a run resumes with a different number of ranks."""

import math
import os
import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler
from torch.utils.data.distributed import DistributedSampler

from roomier.core.errors import DataError
from roomier.core.ranks import Ranks
from roomier.core.world import World
from roomier.data import OrderedSampler
from roomier.data.share import share_of
from roomier.data.source import Source
from tests.covering import few
from tests.data.pretended import Pretended

NUM_SAMPLES = 48


class Numbers(Dataset[int]):
    """Sample ``i`` is ``i``."""

    def __init__(self, length: int = NUM_SAMPLES) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Shuffled(Sampler[int]):
    """Sampler that draws its order from the global generators while it is read."""

    def __iter__(self) -> Iterator[int]:
        numbers = torch.randperm(NUM_SAMPLES).tolist()
        while numbers:
            yield numbers.pop(random.randrange(len(numbers)))

    def __len__(self) -> int:
        return NUM_SAMPLES


class ShuffledStream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(NUM_SAMPLES).tolist()


class Counting:
    """Loader that saves its own position."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]

    def __iter__(self) -> Iterator[Tensor]:
        if self.position >= NUM_SAMPLES:
            self.position = 0
        while self.position < NUM_SAMPLES:
            self.position += 2
            yield torch.tensor([self.position - 2, self.position - 1])


class Plain:
    """Iterable without a position."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.randperm(NUM_SAMPLES).split(2))


LOADERS: dict[str, Callable[[], Any]] = {
    "in order": lambda: DataLoader(Numbers(), batch_size=2),
    "shuffled": lambda: DataLoader(Numbers(), batch_size=2, shuffle=True),
    "sampler": lambda: DataLoader(Numbers(), batch_size=2, sampler=Shuffled()),
    "batch sampler": lambda: DataLoader(Numbers(), batch_sampler=BatchSampler(Shuffled(), 2, False)),
    "own generator": lambda: DataLoader(
        Numbers(), batch_size=2, sampler=RandomSampler(Numbers(), generator=torch.Generator().manual_seed(4))
    ),
    "list": lambda: list(torch.arange(NUM_SAMPLES).split(2)),
    "stream": lambda: DataLoader(ShuffledStream(), batch_size=2),
    "iterable": Plain,
    "stateful": Counting,
}


def source(loader: Any, rank: int, size: int, **keywords: Any) -> Source:
    # Ranks have drawn different random numbers before, for example in dropout.
    torch.manual_seed(100 + rank)
    random.seed(200 + rank)
    ranks = keywords.pop("ranks", None) or Pretended(rank, size)
    return Source(loader, name="train_dataloaders", seed=3, ranks=ranks, **keywords)


def ids(batches: Any) -> list[int]:
    return [int(each) for batch in batches for each in batch]


def sources(kind: str, size: int) -> list[Source]:
    return [source(LOADERS[kind](), rank, size) for rank in range(size)]


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("size", few([4, 1, 2]))
def test_every_sample_goes_to_one_rank(kind: str, size: int):
    for epoch in range(2):
        of_ranks = [list(each.start(epoch)) for each in sources(kind, size)]
        assert len({len(batches) for batches in of_ranks}) == 1
        assert sorted(id for batches in of_ranks for id in ids(batches)) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize(("size", "num_ranks_after"), few([(2, 3), (4, 2), (1, 2), (2, 4), (2, 1), (2, 2)], 2))
def test_resume_on_another_number_of_ranks(kind: str, size: int, num_ranks_after: int):
    read: list[int] = []
    states = []
    for rank in range(size):
        part = source(LOADERS[kind](), rank, size)
        batches = part.start(1)
        read += ids(islice(batches, 12 // size))
        states.append(part.state_dict())
    assert len(read) == 24
    for rank in range(num_ranks_after):
        part = source(LOADERS[kind](), rank, num_ranks_after)
        part.load_state_dict(states[0])
        batches = part.start(1)
        if kind not in ("stream", "iterable", "stateful"):
            assert part.num_batches - part.num_batches_done == 12 // num_ranks_after
        read += ids(batches)
    assert sorted(read) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize("kind", ["in order", "shuffled", "list", "sampler"])
def test_three_numbers_of_ranks_in_one_epoch(kind: str):
    """Resume on 4 ranks, then 3, then 1, within one epoch."""
    read, state = [], None
    for size, num_batches in ((4, 2), (3, 2), (1, 10)):
        states = []
        for rank in range(size):
            part = source(LOADERS[kind](), rank, size)
            if state is not None:
                part.load_state_dict(state)
            read += ids(islice(part.start(0), num_batches))
            states.append(part.state_dict())
        state = states[0]
    assert sorted(read) == list(range(NUM_SAMPLES))
    assert state["is_exhausted"]


@pytest.mark.parametrize("num_samples", range(1, 30))
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_tail_of_an_epoch(num_samples: int, drop_last: bool):
    """Batches equal the batches of a single rank with batch size 6, unless fewer samples than ranks remain."""
    size, batch_size = 3, 2
    parts = []
    for rank in range(size):
        loader = DataLoader(Numbers(num_samples), batch_size=batch_size, drop_last=drop_last)
        try:
            parts.append(source(loader, rank, size))
        except DataError:
            assert num_samples < (6 if drop_last else 3)
            return
    of_ranks = [list(part.start(0)) for part in parts]
    windows = [sorted(ids(batches)) for batches in zip(*of_ranks, strict=True)]
    alone = [sorted(ids([batch])) for batch in DataLoader(Numbers(num_samples), batch_size=6, drop_last=drop_last)]
    assert windows == [batch for batch in alone if len(batch) >= size]
    assert {part.num_batches for part in parts} == {len(windows)}


def test_dropped_samples_are_reported(capsys):
    source(DataLoader(Numbers(11), batch_size=5), 0, 2)
    assert "each epoch drops the last 1 of 11 samples, because all ranks must read" in capsys.readouterr().err
    source(DataLoader(Numbers(12), batch_size=5), 0, 2)
    assert capsys.readouterr().err == ""
    source([torch.ones(2)] * 5, 0, 2)
    assert "distributes full batches to 2 ranks" in capsys.readouterr().err


def test_a_last_incomplete_round_of_batches_is_dropped():
    of_ranks = [ids(source(list(torch.arange(7).split(1)), rank, 3).start(0)) for rank in range(3)]
    assert of_ranks == [[0, 3], [1, 4], [2, 5]]


def test_ordered_sampler_with_a_batch_size():
    of_ranks = [
        list(OrderedSampler(9, shuffle=False, seed=0, world=World(rank, 2), num_in_round=6)) for rank in range(2)
    ]
    assert of_ranks == [[0, 2, 4, 6, 8], [1, 3, 5, 7]]


# Loaders that shard themselves ------------------------------------------------------------------------------------


def distributed(rank: int, size: int) -> DataLoader[int]:
    sampler = DistributedSampler(Numbers(), num_replicas=size, rank=rank, shuffle=True, seed=5)
    return DataLoader(Numbers(), batch_size=2, sampler=sampler)


def read_distributed(num_batches: int, state: Any = None) -> tuple[list[int], Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    part = source(distributed(rank, size), rank, size, ranks=Ranks(World(rank, size)))
    if state is not None:
        part.load_state_dict(state)
    batches = part.start(2)
    return ids(islice(batches, num_batches)), part.state_dict()


def test_a_distributed_sampler_is_used_and_set_epoch_is_called(on_ranks, capsys):
    (first, state), (second, same) = on_ranks(2, read_distributed, 4)
    assert "DistributedSampler already shards this loader across ranks" in capsys.readouterr().out
    sampler = distributed(1, 2).sampler
    sampler.set_epoch(2)
    assert second == list(sampler)[:8]
    assert state["num_batches"] == same["num_batches"] == 8
    rest = [ids for ids, _ in on_ranks(4, read_distributed, 4, state)]
    assert sorted(each for part in (first, second, *rest) for each in part) == list(range(NUM_SAMPLES))


def test_a_distributed_sampler_for_other_ranks_is_rejected():
    with pytest.raises(DataError, match="was created for rank 1 of 4, but this is rank 0 of 2"):
        source(distributed(1, 4), 0, 2)


def read_on_three(state: Any) -> str:
    try:
        read_distributed(1, state)
    except DataError as error:
        return str(error)
    return ""


@pytest.mark.more
def test_a_position_of_a_distributed_sampler_that_cannot_be_converted_is_rejected(on_ranks):
    state = on_ranks(2, read_distributed, 4)[0][1]
    errors = on_ranks(3, read_on_three, state)
    for error in errors:
        assert "Resume with 2 ranks or from a checkpoint at the end of an epoch, or start a new run" in error


class Sharded(IterableDataset[int]):
    """Dataset that shards itself with the process group."""

    def __iter__(self) -> Iterator[int]:
        yield from range(dist.get_rank(), NUM_SAMPLES, dist.get_world_size())


class ShardedByEnvironment:
    def __iter__(self) -> Iterator[Tensor]:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return iter(torch.arange(rank, NUM_SAMPLES, size).split(2))


def a_generator() -> Iterator[Tensor]:
    def generate() -> Iterator[Tensor]:
        yield torch.tensor([dist.get_rank()])

    return generate()


class Marked(ShuffledStream):
    shards_by_rank = True


class MarkedAsUnsharded(Sharded):
    shards_by_rank = False


class OwnShard(Sampler[int]):
    """Sampler that shards without DistributedSampler, like the samplers of transformers and timm."""

    def __len__(self) -> int:
        return NUM_SAMPLES // dist.get_world_size()

    def __iter__(self) -> Iterator[int]:
        return iter(range(dist.get_rank(), NUM_SAMPLES, dist.get_world_size()))


class MadeForRank(Sampler[int]):
    """Sampler that shards for the rank in its arguments."""

    def __init__(self, num_replicas: int, rank: int) -> None:
        self.num_replicas, self.rank = num_replicas, rank

    def __len__(self) -> int:
        return NUM_SAMPLES // self.num_replicas

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, NUM_SAMPLES, self.num_replicas))


class OwnShardOfAll(OwnShard):
    shards_by_rank = False


class SplitByNode(Numbers):
    """Dataset with the attribute that ``datasets.distributed.split_dataset_by_node`` sets."""

    _distributed = object()


@pytest.mark.parametrize(
    ("make", "shards_itself"),
    [
        (lambda: DataLoader(Sharded(), batch_size=2), True),
        (ShardedByEnvironment, True),
        (a_generator, True),
        (lambda: DataLoader(Marked(), batch_size=2), True),
        (lambda: DataLoader(MarkedAsUnsharded(), batch_size=2), False),
        (lambda: distributed(0, 2), True),
        (lambda: DataLoader(Numbers(), sampler=OwnShard()), True),
        (lambda: DataLoader(Numbers(), batch_sampler=BatchSampler(OwnShard(), 2, False)), True),
        (lambda: DataLoader(Numbers(), sampler=MadeForRank(2, 0)), True),
        (lambda: DataLoader(Numbers(), sampler=MadeForRank(1, 0)), False),
        (lambda: DataLoader(Numbers(), sampler=OwnShardOfAll()), False),
        (lambda: DataLoader(SplitByNode(), batch_size=2), True),
        (lambda: DataLoader(SplitByNode(), sampler=OwnShardOfAll()), False),
        (Plain, False),
        (lambda: DataLoader(ShuffledStream(), batch_size=2), False),
        (lambda: DataLoader(Numbers(), batch_size=2), False),
        (lambda: [torch.ones(2)], False),
    ],
)
def test_loaders_that_shard_themselves_are_detected(make: Callable[[], Any], shards_itself: bool):
    assert (share_of(make(), World(0, 2)).divided_by is not None) == shards_itself
    assert share_of(make(), World()).divided_by is None


def read_sharded() -> list[int]:
    rank, size = dist.get_rank(), dist.get_world_size()
    loader = DataLoader(Sharded(), batch_size=2)
    return ids(source(loader, rank, size, ranks=Ranks(World(rank, size))).start(0))


def test_a_stream_that_shards_itself_is_not_sharded_again(on_ranks):
    assert on_ranks(2, read_sharded) == [list(range(0, NUM_SAMPLES, 2)), list(range(1, NUM_SAMPLES, 2))]


@pytest.mark.parametrize("training", [True, False])
def test_a_sampler_that_shards_is_not_sharded_again(training: bool):
    for rank in range(2):
        loader = DataLoader(Numbers(), sampler=MadeForRank(2, rank), batch_size=2)
        mine = Source(loader, name="loader", seed=0, ranks=Pretended(rank, 2), training=training)
        batches = mine.start(0) if training else [turn.batch for turn in mine.turns(math.inf) if turn.counts]
        assert ids(batches) == list(range(rank, NUM_SAMPLES, 2))


def stop_within_sharded() -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    part = source(DataLoader(Sharded(), batch_size=2), rank, size, ranks=Ranks(World(rank, size)))
    list(islice(part.start(0), 3))
    return part.state_dict()


@pytest.mark.more
def test_a_position_of_a_stream_that_shards_itself_is_rejected_on_other_ranks(on_ranks):
    first, second = on_ranks(2, stop_within_sharded)
    assert first["num_batches"] == second["num_batches"] == 6
    alone = source(DataLoader(Sharded(), batch_size=2), 0, 1)
    with pytest.raises(DataError, match="was saved with 2 ranks cannot be used with 1 ranks"):
        alone.check(first, 0)
