"""Loaders that already shard themselves in a way that roomier cannot detect, or whose order differs between ranks, are
rejected on all ranks, because sharding them again would lose samples."""

from __future__ import annotations

import io
import math
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler

from roomier.core.errors import DataError
from roomier.core.ranks import Ranks
from roomier.core.world import World
from roomier.data import CombinedLoader
from roomier.data.share import checksum, share_of
from roomier.data.source import Source
from tests.covering import few
from tests.ranks.pool import RankPool

NUM_SAMPLES = 24


def place() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


class Hidden(IterableDataset[int]):
    """Stream that shards itself with a function, so its own code does not refer to the rank."""

    def __init__(self) -> None:
        self.values = place()

    def __iter__(self) -> Iterator[int]:
        first, step = self.values
        yield from range(first, NUM_SAMPLES, step)


class Unseeded(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from np.random.default_rng().permutation(NUM_SAMPLES).tolist()


class HiddenState(Hidden):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class HiddenSampler(Sampler[int]):
    def __len__(self) -> int:
        return NUM_SAMPLES // 2

    def __iter__(self) -> Iterator[int]:
        return iter(Hidden())


class Declared(Hidden):
    shards_by_rank = True


class Augmented(Unseeded):
    shards_by_rank = False


class SaysItShards(IterableDataset[int]):
    """Stream whose code refers to the rank, although all ranks read the same samples."""

    def __iter__(self) -> Iterator[int]:
        assert dist.get_rank() >= 0
        yield from range(NUM_SAMPLES)


def hidden_list() -> list[Tensor]:
    return list(torch.tensor(list(Hidden())).split(2))


HIDDEN: dict[str, Callable[[], Any]] = {
    "stream": lambda: DataLoader(Hidden(), batch_size=2),
    "workers": lambda: DataLoader(Hidden(), batch_size=2, num_workers=1),
    "unseeded": lambda: DataLoader(Unseeded(), batch_size=2),
    "state": lambda: DataLoader(HiddenState(), batch_size=2),
    "sampler": lambda: DataLoader(torch.arange(NUM_SAMPLES), batch_size=2, sampler=HiddenSampler()),  # type: ignore[arg-type]
    "list": hidden_list,
    "several": lambda: CombinedLoader([DataLoader(torch.arange(9)), DataLoader(Hidden())], "max_size_cycle"),  # type: ignore[arg-type]
}


def samples(make: Callable[[], Any], training: bool) -> list[int] | str:
    rank, size = place()
    try:
        source = Source(make(), name="loader", seed=0, ranks=Ranks(World(rank, size)), training=training)
        if training:
            return [int(each) for batch in source.start(0) for each in batch]
        return [int(each) for turn in source.turns(math.inf) if turn.counts for each in turn.batch]
    except DataError as error:
        return str(error)


def samples_of(name: str, training: bool) -> list[int] | str:
    return samples(HIDDEN[name], training)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", few(HIDDEN))
def test_different_first_batches_are_rejected_on_all_ranks(on_ranks: RankPool, name: str, training: bool) -> None:
    for text in on_ranks(2, samples_of, name, training):
        assert isinstance(text, str)
        assert "different first batches on ranks 0 and 1" in text
        assert "shards_by_rank" in text
        assert "not seeded equally" in text


def read_declared(name: str) -> list[int] | str:
    dataset = {"yes": Declared, "no": Augmented, "says": SaysItShards}[name]()
    return samples(lambda: DataLoader(dataset, batch_size=2), training=True)


@pytest.mark.more
def test_shards_by_rank_replaces_the_comparison(on_ranks: RankPool) -> None:
    assert sorted(chain(*on_ranks(2, read_declared, "yes"))) == list(range(NUM_SAMPLES))
    assert [len(each) for each in on_ranks(2, read_declared, "no")] == [NUM_SAMPLES // 2] * 2


def test_equal_first_batches_of_a_loader_that_shards_itself_are_reported(
    on_ranks: RankPool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert on_ranks(2, read_declared, "says") == [list(range(NUM_SAMPLES))] * 2
    assert "all ranks received the same first batch, although SaysItShards (reads its rank)" in capsys.readouterr().out


@dataclass
class Place:
    global_rank: int
    world_size: int


class LikeLitdata(IterableDataset[int]):
    """Stream that stores the rank and the number of ranks for which it was created."""

    def __init__(self, rank: int, size: int) -> None:
        self.place = Place(rank, size)

    def __iter__(self) -> Iterator[int]:
        yield from range(self.place.global_rank, NUM_SAMPLES, self.place.world_size)


class Nested(IterableDataset[int]):
    def __init__(self, *parts: Any) -> None:
        self.parts = list(parts)

    def __iter__(self) -> Iterator[int]:
        yield from self.parts[0]


class WithPlace(Nested):
    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(range(rank, NUM_SAMPLES, world_size))
        self.rank, self.world_size = rank, world_size


def split_by_node(source: Any) -> Any:
    return source


@pytest.mark.parametrize(
    ("stream", "shards_itself"),
    [
        (LikeLitdata(0, 2), True),
        (LikeLitdata(0, 1), False),
        (Nested(Nested(LikeLitdata(0, 2))), True),
        (Nested(DataLoader(LikeLitdata(0, 2))), True),
        (WithPlace(0, 2), True),
        (WithPlace(0, 1), False),
        (Nested(range(4), split_by_node), True),
        (Nested(range(4), checksum), False),
        (Nested(range(4)), False),
    ],
)
def test_streams_within_a_stream_are_searched(stream: Any, shards_itself: bool) -> None:
    for loader in (DataLoader(stream), stream):
        assert (share_of(loader, World(0, 2)).divided_by is not None) == shards_itself


def test_a_stream_for_other_ranks_is_rejected() -> None:
    with pytest.raises(DataError, match=r"was created for rank 0 of 2, but this is rank 1 of 2.*train_dataloader"):
        share_of(DataLoader(LikeLitdata(0, 2)), World(1, 2))


def read_created_early() -> list[int] | str:
    rank, size = place()
    return samples(lambda: DataLoader(WithPlace(*((0, 1) if rank == 0 else (rank, size)))), training=True)


@pytest.mark.more
def test_a_stream_that_was_created_before_the_ranks_is_rejected_on_all_ranks(on_ranks: RankPool) -> None:
    first, second = on_ranks(2, read_created_early)
    assert "shards itself across ranks, but not on rank 0" in first
    assert "shards itself across ranks, but not on rank 0" in second


@dataclass
class Fields:
    x: Tensor


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2), torch.ones(2)),
        ({"x": [torch.zeros(2)]}, {"x": [torch.ones(2)]}),
        (Fields(torch.zeros(2)), Fields(torch.ones(2))),
        (("a", b"b"), ("a", b"c")),
        (np.zeros(3), np.ones(3)),
        (np.array(["a", None]), np.array(["b", None])),
        (torch.zeros(3, dtype=torch.bfloat16).t(), torch.ones(3, dtype=torch.bfloat16).t()),
    ],
)
def test_checksums_depend_on_the_contents(one: Any, other: Any) -> None:
    assert checksum(one) != checksum(other)
    nested = torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged)
    assert checksum((one, object(), nested)) == checksum((one, object(), nested))


def write_shards(folder: Path, num_shards: int) -> str:
    per_shard = NUM_SAMPLES // num_shards
    for shard in range(num_shards):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in range(shard * per_shard, (shard + 1) * per_shard):
                text = str(number).encode()
                info = tarfile.TarInfo(f"{number:04d}.cls")
                info.size = len(text)
                tar.addfile(info, io.BytesIO(text))
    return f"{folder}/{{0..{num_shards - 1}}}.tar"


def read_webdataset(urls: str, kind: str, training: bool) -> list[int] | str:
    import webdataset

    splits = webdataset.split_by_node if kind != "whole" else None
    stream = webdataset.WebDataset(urls, shardshuffle=False, nodesplitter=splits).decode().to_tuple("cls").map(_first)
    if kind == "batched":
        return samples(lambda: webdataset.WebLoader(stream.batched(2, collation_fn=list), batch_size=None), training)
    return samples(lambda: DataLoader(stream, batch_size=2), training)


def _first(sample: tuple[int]) -> int:
    return sample[0]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", few(["split", "batched", "whole"]))
def test_a_webdataset_is_read_completely(on_ranks: RankPool, tmp_path: Path, kind: str, training: bool) -> None:
    pytest.importorskip("webdataset")
    read = on_ranks(2, read_webdataset, write_shards(tmp_path, 4), kind, training)
    assert sorted(chain(*read)) == list(range(NUM_SAMPLES))
