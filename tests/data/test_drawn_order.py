"""The order that torch's sampler draws, and positions in this order."""

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from roomier.core.device.rng import rng_state, set_rng_state
from roomier.data.source import Source
from tests.data.pretended import Pretended

NUM_SAMPLES = 22
NAME = "train_dataloaders"


def loader(batch_size: int = 4, own_seed: int | None = None, **options: Any) -> DataLoader[Any]:
    generator = None if own_seed is None else torch.Generator().manual_seed(own_seed)
    return DataLoader(range(NUM_SAMPLES), batch_size, shuffle=True, generator=generator, **options)  # type: ignore[arg-type]


def order_of_torch(own: DataLoader[Any], num_epochs: int, seed: int = 1) -> list[list[int]]:
    """Return the indices of each epoch, read by a loop that stops after ``len(own)`` batches."""
    torch.manual_seed(seed)
    epochs = []
    for _ in range(num_epochs):
        iterator = iter(own)
        epochs.append([int(each) for _ in range(len(own)) for each in next(iterator)])
    return epochs


def read(batches: Iterator[Tensor], num_batches: int | None = None) -> list[int]:
    if num_batches is None:
        return [int(each) for batch in batches for each in batch]
    return [int(each) for _ in range(num_batches) for each in next(batches)]


OPTIONS = {
    "global generator": {},
    "its own generator": {"own_seed": 3},
    "its own generator, full batches": {"own_seed": 3, "batch_size": 2},
    "its own generator, drop_last": {"own_seed": 3, "drop_last": True},
    "no batches": {"own_seed": 3, "batch_size": 1},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_order_is_equal_to_torch(options):
    expected = order_of_torch(loader(**options), 3)
    torch.manual_seed(1)
    source = Source(loader(**options), name=NAME, seed=9, draws_order=True)
    assert [read(source.start(epoch)) for epoch in range(3)] == expected
    assert expected[0] != expected[1]


def test_order_with_workers_is_equal_to_torch():
    own = loader()
    torch.manual_seed(1)
    expected = [[int(each) for batch in own for each in batch] for _ in range(2)]
    torch.manual_seed(1)
    source = Source(loader(num_workers=1), name=NAME, seed=9, draws_order=True)
    assert [read(source.start(epoch)) for epoch in range(2)] == expected


@pytest.mark.parametrize("num_done", [0, 1, 3, 6])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_resume_continues_the_drawn_order(options, num_done):
    torch.manual_seed(1)
    whole = Source(loader(**options), name=NAME, seed=9, draws_order=True)
    read(whole.start(0))
    batches = whole.start(1)
    num_done = min(num_done, int(whole.num_batches))
    read(batches, num_done)
    state, random = whole.state_dict(), rng_state()
    expected = [read(batches), read(whole.start(2)), torch.rand(())]

    torch.manual_seed(100)
    again = Source(loader(**options), name=NAME, seed=9, draws_order=True)
    again.load_state_dict(state)
    set_rng_state(random)
    assert [read(again.start(1)), read(again.start(2)), torch.rand(())] == expected


def test_resume_with_another_batch_size_repeats_and_skips_no_sample():
    torch.manual_seed(1)
    first = Source(loader(), name=NAME, seed=9, draws_order=True)
    done = read(first.start(0), 3)
    second = Source(loader(batch_size=5), name=NAME, seed=9, draws_order=True)
    second.load_state_dict(first.state_dict())
    assert sorted(done + read(second.start(0))) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True)])
def test_a_resumed_epoch_keeps_its_kind_of_order(before, after):
    torch.manual_seed(1)
    first = Source(loader(), name=NAME, seed=9, draws_order=before)
    done = read(first.start(0), 3)
    second = Source(loader(), name=NAME, seed=9, draws_order=after)
    second.load_state_dict(first.state_dict())
    assert sorted(done + read(second.start(0))) == list(range(NUM_SAMPLES))
    torch.manual_seed(5)
    orders = [read(second.start(1))]
    torch.manual_seed(6)
    orders.append(read(second.start(1)))
    assert (orders[0] != orders[1]) == after


class FromRankZero(Pretended):
    """Rank of a process group in which ``from_zero`` returns the value of rank 0."""

    sent: ClassVar[list[Any]] = []

    def from_zero(self, value: Any) -> Any:
        if self.world.rank == 0:
            self.sent.append(value)
            return value
        return self.sent.pop(0)


def test_all_ranks_use_the_order_of_rank_zero():
    """The random state of other ranks has no effect."""
    [expected] = order_of_torch(loader(), 1)
    parts = []
    for rank in range(2):
        torch.manual_seed(1 + rank)
        source = Source(loader(batch_size=2), name=NAME, seed=9, ranks=FromRankZero(rank, 2), draws_order=True)
        parts.append(read(source.start(0)))
    assert parts == [expected[0::2], expected[1::2]]
    assert not FromRankZero.sent
