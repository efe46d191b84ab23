"""Prepared loaders yield the same batches as Accelerate's loaders, and can resume."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

import roomier
from roomier.core.ranks import Ranks
from roomier.core.world import World
from roomier.prepared.loader import ShardedBatches, ShardedStream
from tests.ranks.pool import RankPool

SIZES = list(itertools.product((1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 3, 5, 6, 7, 12, 13, 24), (False, True)))


def batches(num_samples: int, size: int, drop_last: bool) -> BatchSampler:
    return BatchSampler(SequentialSampler(range(num_samples)), size, drop_last)


@pytest.mark.parametrize("splits", [False, True], ids=["whole", "split"])
def test_batches_equal_accelerate(splits: bool) -> None:
    for num_ranks, size, num_samples, drop_last in SIZES:
        full = size * num_ranks if splits else size
        for rank in range(num_ranks):
            given = batches(num_samples, full, drop_last)
            theirs = BatchSamplerShard(given, num_ranks, rank, split_batches=splits)
            ours = ShardedBatches(given, World(rank, num_ranks), splits=splits)
            assert [*ours] == [*theirs], (num_ranks, size, num_samples, drop_last, rank)
            assert len(ours) == len(theirs) == len([*ours])


def test_repeated_samples_are_counted() -> None:
    for num_ranks, size, num_samples, drop_last in SIZES:
        given = batches(num_samples, size, drop_last)
        shares = [ShardedBatches(given, World(rank, num_ranks), splits=False) for rank in range(num_ranks)]
        rounds = [[*itertools.chain(*of_ranks)] for of_ranks in zip(*shares, strict=True)]
        if not rounds:
            continue
        rounds[-1] = rounds[-1][: shares[0].num_kept(len(rounds[-1]), num_ranks)]
        kept = [index for each in rounds for index in each]
        assert kept == list(range(len(kept)))
        assert drop_last or len(kept) == num_samples


class Stream(IterableDataset[int]):
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num_samples))

    def __len__(self) -> int:
        return self.num_samples


def test_streams_equal_accelerate() -> None:
    for num_ranks, size, num_samples, drop_last in SIZES:
        for rank in range(num_ranks):
            theirs = IterableDatasetShard(
                Stream(num_samples), size, drop_last, num_processes=num_ranks, process_index=rank
            )
            ours = ShardedStream(Stream(num_samples), World(rank, num_ranks), size, drop_last=drop_last)
            assert [*ours] == [*theirs]
            assert len(ours) == len([*ours])


def test_batches_of_other_samplers_remain_unchanged() -> None:
    given = [[0], [1, 2, 3], [4, 5], [6], [7, 8]]
    shares = [[*ShardedBatches(given, World(rank, 2), splits=False)] for rank in range(2)]
    assert shares == [[[0], [4, 5], [7, 8]], [[1, 2, 3], [6], [0]]]


def accelerator(**keywords: Any) -> roomier.Accelerator:
    return roomier.Accelerator(cpu=True, **keywords)


def test_the_end_of_each_of_two_nested_loaders() -> None:
    prepare = accelerator(gradient_accumulation_steps=4)
    outer, inner = prepare.prepare(DataLoader(range(6), batch_size=2), DataLoader(range(4), batch_size=2))
    found = []
    for _ in outer:
        with prepare.accumulate():
            found.append(prepare.sync_gradients)
        for number, _ in enumerate(inner):
            with prepare.accumulate():
                found.append((number, prepare.sync_gradients))
        for _ in inner:
            break  # the loader is not read to its end
    at_end = [(0, False), (1, True)]
    assert found[:3] == [False, *at_end]
    assert found[6] is True
    assert not prepare._accumulation.loaders


@pytest.mark.parametrize("shuffle", [False, True])
def test_skipped_batches(shuffle: bool) -> None:
    prepare = accelerator()
    loader = prepare.prepare(DataLoader(range(10), batch_size=3, shuffle=shuffle))
    torch.manual_seed(5)
    full = [each.tolist() for each in loader]
    torch.manual_seed(5)
    later = prepare.skip_first_batches(loader, 2)
    assert [each.tolist() for each in later] == full[2:]
    assert len(later) == 2
    stream = prepare.prepare(DataLoader(Stream(7), batch_size=2))
    assert [each.tolist() for each in prepare.skip_first_batches(stream, 3)] == [[6]]


def own_order() -> DataLoader[int]:
    return DataLoader(range(10), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(3))  # type: ignore[arg-type]


def test_a_resume_continues_the_order_of_a_generator() -> None:
    epochs = [[each.tolist() for each in accelerator().prepare(loader)] for loader in [own_order()] for _ in range(3)]
    loader = accelerator().prepare(own_order())
    assert [each.tolist() for each in loader] == epochs[0]
    reading = iter(loader)
    next(reading)
    state = loader.state_dict()
    prepare = accelerator()
    loader = prepare.prepare(own_order())
    loader.load_state_dict(state)
    before = torch.get_rng_state()
    assert [each.tolist() for each in prepare.skip_first_batches(loader, 1)] == epochs[1][1:]
    assert [each.tolist() for each in loader] == epochs[2]
    loader.load_state_dict(state)
    assert [*prepare.skip_first_batches(loader, 4)] == []
    assert torch.equal(torch.get_rng_state(), before)


def test_a_new_order_after_a_different_number_of_ranks_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    prepare = accelerator()
    saved = {"epoch": 1, "start": {"torch": torch.get_rng_state()}, "generator": None}  # of one process
    prepare.prepare(DataLoader(range(7))).load_state_dict(saved)
    assert capsys.readouterr().err == ""
    loader = prepare.prepare(own_order())
    loader.load_state_dict(saved)
    assert "draws a new order" in capsys.readouterr().err
    assert len([*loader]) == 4


def test_a_loader_that_is_only_skipped_is_not_in_the_checkpoint() -> None:
    prepare = accelerator()
    later = prepare.skip_first_batches(DataLoader(range(10), batch_size=3), 3)
    assert [each.tolist() for each in later] == [[9]]
    assert prepare._states()["loaders"] == []


def shuffled(num_epochs: int) -> list[list[int]]:
    torch.manual_seed(torch.distributed.get_rank())  # all ranks have the same order, even with different seeds
    prepare = accelerator()
    loader = prepare.prepare(DataLoader(range(7), batch_size=2, shuffle=True))
    return [prepare.gather_for_metrics(batch).tolist() for _ in range(num_epochs) for batch in loader]


def test_ranks_read_one_order(on_ranks: RankPool) -> None:
    one, other = on_ranks(2, shuffled, 2)
    assert one == other
    epochs = [[*itertools.chain(*one[:2])], [*itertools.chain(*one[2:])]]
    assert [sorted(each) for each in epochs] == [[*range(7)]] * 2
    assert epochs[0] != epochs[1]


def of_streams() -> list[Any]:
    prepare = accelerator()
    stream = prepare.prepare(DataLoader(Stream(7), batch_size=2))
    split = accelerator(split_batches=True)
    divided = split.prepare(DataLoader(range(7), batch_size=4))
    return [
        [prepare.gather_for_metrics(each).tolist() for each in stream],
        [prepare.gather_for_metrics([str(int(index)) for index in each]) for each in stream],
        [split.gather_for_metrics(each).tolist() for each in divided],
        (len(stream), len(divided), divided.total_batch_size, divided.total_dataset_length),
    ]


@pytest.mark.more
def test_streams_and_divided_batches(on_ranks: RankPool) -> None:
    rounds = [[0, 1, 2, 3], [4, 5, 6]]
    for found in on_ranks(2, of_streams):
        assert found == [rounds, [[str(each) for each in of_round] for of_round in rounds], rounds, (2, 2, 4, 7)]


def test_batches_that_cannot_be_divided() -> None:
    from roomier.prepared.loader import AccumulationState, prepared_loader

    ranks = object.__new__(Ranks)
    ranks.world = World(0, 2)
    with pytest.raises(roomier.PlanError, match=r"split_batches=True.*multiple of 2 \(number of ranks\), but it is 3"):
        prepared_loader(
            DataLoader(range(7), batch_size=3), ranks, lambda x: x, AccumulationState(), splits_batches=True
        )
