"""Batches of samples of similar length: their order, their padding, and their position."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from roomier.core.errors import DataError
from roomier.data import LengthGroupedBatchSampler
from roomier.data.position import POSITION_FORM
from roomier.data.source import Source
from tests.covering import few
from tests.data.pretended import Pretended


def lengths_of(num_samples: int, seed: int = 0) -> list[int]:
    """Return lengths with a long tail, as texts have."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.empty(num_samples).log_normal_(4.0, 0.7, generator=generator).long() + 1).clamp(max=1000).tolist()


def epoch_of(sampler: LengthGroupedBatchSampler, epoch: int) -> list[list[int]]:
    sampler.set_epoch(epoch)
    return list(sampler)


def padded(batch: list[int], lengths: list[int]) -> int:
    return len(batch) * max(lengths[index] for index in batch)


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=60),
    batch_size=st.none() | st.integers(1, 9),
    max_tokens=st.none() | st.integers(40, 200),
    batches_per_step=st.integers(1, 5),
    spread=st.sampled_from([0.0, 0.1, 0.9]),
    shuffle=st.booleans(),
)
def test_each_sample_is_in_one_batch_within_the_limits(
    lengths: list[int], batch_size: int | None, max_tokens: int | None, **options: Any
) -> None:
    if batch_size is None and max_tokens is None:
        return
    sampler = LengthGroupedBatchSampler(lengths, batch_size=batch_size, max_tokens=max_tokens, **options)
    for epoch in range(3):
        batches = epoch_of(sampler, epoch)
        assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
        assert len(batches) == len(sampler)
        assert all(len(batch) <= (batch_size or len(batch)) for batch in batches)
        assert all(padded(batch, lengths) <= (max_tokens or 10**6) for batch in batches)
        assert max(lengths) in [lengths[index] for index in batches[0]]


def test_order_depends_on_seed_and_epoch_only_and_changes_the_batches() -> None:
    lengths = lengths_of(400)
    first = LengthGroupedBatchSampler(lengths, batch_size=8, seed=3)
    torch.manual_seed(9)
    before = torch.get_rng_state()
    for each in (torch.tensor(lengths), np.array(lengths[::-1])[::-1]):
        assert epoch_of(first, 2) == epoch_of(LengthGroupedBatchSampler(each, batch_size=8, seed=np.int64(3)), 2)  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), before)
    of_epochs = [{frozenset(batch) for batch in epoch_of(first, epoch)} for epoch in range(2)]
    assert len(of_epochs[0] & of_epochs[1]) < len(first) // 10
    assert epoch_of(first, 0) != epoch_of(LengthGroupedBatchSampler(lengths, batch_size=8, seed=4), 0)


@pytest.mark.parametrize(
    ("options", "most"),
    [({"batch_size": 8}, 0.12), ({"max_tokens": 2048}, 0.12), ({"batch_size": 8, "spread": 0.5}, 0.35)],
)
def test_batches_contain_little_padding(options: dict[str, Any], most: float) -> None:
    lengths = lengths_of(4000)
    sampler = LengthGroupedBatchSampler(lengths, **options)
    share = 1 - sum(lengths) / sum(padded(batch, lengths) for batch in sampler)
    at_random = torch.randperm(4000, generator=torch.Generator().manual_seed(0)).split(8)
    assert share < most < 1 - sum(lengths) / sum(padded(batch.tolist(), lengths) for batch in at_random)


def source_of(lengths: list[int], rank: int, size: int, num_workers: int = 0, **options: Any) -> Source:
    sampler = LengthGroupedBatchSampler(lengths, **options)
    loader = DataLoader(range(len(lengths)), batch_sampler=sampler, num_workers=num_workers)  # type: ignore[arg-type]
    return Source(loader, name="train_dataloaders", seed=0, ranks=Pretended(rank, size))


def rest_of(source: Source, epoch: int) -> list[list[int]]:
    found = [batch.tolist() for batch in source.start(epoch)]
    source.close()
    return found


@pytest.mark.parametrize("size", few([2, 4]))
def test_ranks_read_batches_of_similar_length_in_each_step(size: int) -> None:
    lengths = lengths_of(4003)
    dropped = []
    for epoch in range(3):
        ranks = [
            rest_of(source_of(lengths, rank, size, max_tokens=1500, batches_per_step=size), epoch)
            for rank in range(size)
        ]
        assert len({len(batches) for batches in ranks}) == 1
        read = sorted(index for batches in ranks for batch in batches for index in batch)
        assert len(set(read)) == len(read)
        dropped.append(frozenset(range(4003)) - set(read))
        apart = 0.0
        for step in zip(*ranks, strict=True):
            longest = [max(lengths[index] for index in batch) for batch in step]
            apart += 1 - min(longest) / max(longest)
        assert apart / len(ranks[0]) < 0.1
    assert len(set(dropped)) == len(dropped) or not any(dropped)


@pytest.mark.parametrize(("before", "after", "num_workers"), [(1, 1, 0), (1, 1, 2), (2, 2, 0), (4, 2, 0), (2, 3, 0)])
def test_a_run_resumes_at_each_batch_on_any_number_of_ranks(
    before: int, after: int, num_workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths, epoch, num_done = lengths_of(120), 1, 3
    options: dict[str, Any] = {"batch_size": 3, "num_workers": num_workers}
    wanted = list(epoch_of(LengthGroupedBatchSampler(lengths, batch_size=3), epoch))
    state: dict[str, Any] = {}
    for rank in range(before):
        source = source_of(lengths, rank, before, **options)
        reading = source.start(epoch)
        assert [next(reading).tolist() for _ in range(num_done)] == wanted[rank : num_done * before : before]
        state = source.state_dict()
        source.close()
    torch.manual_seed(5)
    for rank in range(after):
        source = source_of(lengths, rank, after, **options)
        source.load_state_dict(state)
        rest = wanted[num_done * before :]
        rest = rest[: len(rest) // after * after]
        assert rest_of(source, epoch) == rest[rank::after]
        assert len(rest_of(source, epoch + 1)) == len(wanted) // after
    capsys.readouterr()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": lengths_of(40, seed=1)}, "has different lengths"),
        ({"lengths": lengths_of(41)}, "has different lengths"),
        ({"batch_size": 4}, "has batch_size=4, but .* batch_size=3.*Create the sampler with batch_size=3"),
        ({"max_tokens": 4000}, "has max_tokens=4000, but .* max_tokens=None"),
        ({"seed": 1}, "has seed=1"),
        ({"shuffle": False}, "has shuffle=False"),
        ({"batches_per_step": 2}, "has batches_per_step=2"),
        ({"spread": 0.5}, "has spread=0.5"),
    ],
    ids=lambda each: "-".join(each) if isinstance(each, dict) else "",
)
def test_a_resume_within_an_epoch_requires_the_same_order(changes: dict[str, Any], message: str) -> None:
    before: dict[str, Any] = {"lengths": lengths_of(40), "batch_size": 3}
    source = source_of(rank=0, size=1, **before)
    reading = source.start(0)
    next(reading)
    state = source.state_dict()
    POSITION_FORM(state, "data")
    after = source_of(rank=0, size=1, **{**before, **changes})
    with pytest.raises(DataError, match=f"(?s){message}"):
        after.check(state, 0)
    after.load_state_dict(state)
    with pytest.raises(DataError, match=f"(?s){message}"):
        after.start(0)
    after.check(state, 1)  # the sampler can change between two epochs


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([1, 2], {}, "batch_size=None: is required without max_tokens"),
        ([1, 2], {"batch_size": 0}, "batch_size=0: must be a positive integer"),
        ([1, 9, 2], {"max_tokens": 8}, "max_tokens=8: is less than the 9 tokens of sample 1"),
        ([1, 2], {"batch_size": 1, "spread": 1.0}, r"spread=1.0: must be in \[0, 1\)"),
        ([1, 2], {"batch_size": 1, "batches_per_step": 0}, "batches_per_step=0: must be a positive"),
        ([], {"batch_size": 1}, "lengths=.* must contain one integer for each sample"),
        ([1.5], {"batch_size": 1}, "lengths=.* must contain one integer for each sample"),
        (None, {"batch_size": 1}, "lengths=None: must contain one integer for each sample"),
        (["ab", "c"], {"batch_size": 1}, "lengths=.* must contain one integer for each sample"),
        ([[1], [2]], {"batch_size": 1}, "lengths=.* must contain one integer for each sample"),
        ([-1], {"batch_size": 1}, "lengths=.* must contain one integer for each sample"),
        (torch.ones(2, device="meta"), {"batch_size": 1}, r"lengths=.*meta.*: must be in host memory.*lengths.cpu()"),
    ],
)
def test_invalid_arguments_are_rejected(lengths: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        LengthGroupedBatchSampler(lengths, **options)
