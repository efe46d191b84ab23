"""A resume with every kind of loader, compared with the uninterrupted run."""

import math
import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from roomier.core.device.rng import rng_state, seed_everything, set_rng_state
from roomier.core.errors import DataError
from roomier.data.batch_feeds import is_same
from roomier.data.source import Source
from tests.covering import few
from tests.data.numbers import NUM_SAMPLES, Noisy, NoisyStream, Numbers, same, samples, weighted
from tests.data.pretended import Pretended


class NoisyAtOnce(Noisy):
    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        noise = torch.rand(len(indices))
        return [torch.tensor([float(index), float(noise[slot])]) for slot, index in enumerate(indices)]


class OwnNoise(Numbers):
    """Dataset with noise from a generator that belongs to the dataset."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(4)

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), torch.rand((), generator=self.generator).item()])


class NoisyIterable:
    """Iterable that draws an order at the start of each pass, and noise for each batch."""

    def __iter__(self) -> Iterator[Tensor]:
        order = torch.randperm(NUM_SAMPLES)
        for number in order:
            yield torch.stack([number, torch.randint(1000, ())])


class Stateful:
    """Loader with its own position and order. If ``restarts`` is True, a finished state starts the next epoch."""

    def __init__(self, restarts: bool = True) -> None:
        self.generator = random.Random(5)
        self.order: list[int] = []
        self.position = 0
        self.restarts = restarts
        self.is_loaded = False

    def __iter__(self) -> Iterator[int]:
        if not self.is_loaded or (self.restarts and self.position == NUM_SAMPLES):
            self.order = self.generator.sample(range(NUM_SAMPLES), NUM_SAMPLES)
            self.position = 0
        self.is_loaded = False
        while self.position < NUM_SAMPLES:
            self.position += 1
            yield self.order[self.position - 1]

    def state_dict(self) -> dict[str, Any]:
        version, internal, gauss = self.generator.getstate()
        return {"position": self.position, "order": self.order, "generator": [version, list(internal), gauss]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position, self.order, self.is_loaded = state_dict["position"], state_dict["order"], True
        version, internal, gauss = state_dict["generator"]
        self.generator.setstate((version, tuple(internal), gauss))


class OwnBatches(Sampler[list[int]]):
    """Batches of increasing size, in an order that is drawn at the start of each epoch."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(NUM_SAMPLES).tolist()
        size = 0
        while order:
            size += 1
            yield [order.pop() for _ in range(min(size, len(order)))]


class OwnLoader(DataLoader[Tensor]):
    """Subclass that has a different constructor, but does not override the iteration of torch."""

    def __init__(self, num_samples: int) -> None:
        super().__init__(Numbers(), batch_size=4, shuffle=True)
        self.extra = num_samples


class OwnIteration(DataLoader[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        for batch in super().__iter__():
            yield -batch


def loader_of_batch_sampler(**options: Any) -> DataLoader[Tensor]:
    numbers = Numbers()
    return DataLoader(numbers, batch_sampler=BatchSampler(RandomSampler(numbers), 4, drop_last=True), **options)


KINDS: dict[str, tuple[str, Callable[[], Any]]] = {
    "list": ("list", lambda: [torch.tensor(i) for i in range(7)]),
    "shuffled": ("ordered", lambda: DataLoader(Noisy(), batch_size=4, shuffle=True)),
    "in order": ("ordered", lambda: DataLoader(Noisy(), batch_size=4, drop_last=True)),
    "single samples": ("ordered", lambda: DataLoader(Noisy(), batch_size=None, shuffle=True)),
    "torch's batch sampler": ("ordered", loader_of_batch_sampler),
    "subclass": ("ordered", lambda: OwnLoader(3)),
    "subset": ("ordered", lambda: DataLoader(Subset(Noisy(), range(15)), batch_size=4, shuffle=True)),
    "dataset's own noise": ("ordered", lambda: DataLoader(OwnNoise(), batch_size=4, shuffle=True)),
    "workers": ("ordered", lambda: DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=2)),
    "persistent workers": (
        "ordered",
        lambda: DataLoader(NoisyAtOnce(), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True),
    ),
    "weighted": ("walked", lambda: weighted(Noisy())),
    "weighted, own generator": ("walked", lambda: weighted(Noisy(), torch.Generator().manual_seed(3))),
    "weighted, workers": ("walked", lambda: weighted(Noisy(), num_workers=2)),
    "weighted, workers, at once": ("walked", lambda: weighted(NoisyAtOnce(), num_workers=1)),
    "weighted, dataset's own noise": ("walked", lambda: weighted(OwnNoise())),
    "own batch sampler": ("walked", lambda: DataLoader(Noisy(), batch_sampler=OwnBatches())),
    "own sampler of lists": (
        "walked",
        lambda: DataLoader(
            TensorDataset(torch.rand(NUM_SAMPLES, generator=torch.Generator().manual_seed(0))),
            sampler=OwnBatches(),
            batch_size=None,
            num_workers=1,
        ),
    ),
    "iterable": ("replayed", NoisyIterable),
    "stream": ("replayed", lambda: DataLoader(NoisyStream(), batch_size=4)),
    "stream, worker": ("replayed", lambda: DataLoader(NoisyStream(), batch_size=4, num_workers=1)),
    "own iteration": ("replayed", lambda: OwnIteration(Noisy(), batch_size=4, shuffle=True)),
    "stateful": ("stateful", Stateful),
    "stateful, exhausted at its end": ("stateful", lambda: Stateful(restarts=False)),
}


SOURCES: list[Source] = []


def source(loader: Any, **options: Any) -> Source:
    SOURCES.append(Source(loader, name="train_dataloaders", seed=11, **options))
    return SOURCES[-1]


@pytest.fixture(autouse=True)
def ended_sources() -> Iterator[None]:
    """End all workers after each test. Otherwise the garbage collector waits 5 s for each worker."""
    yield
    while SOURCES:
        SOURCES.pop().end()


def resume(resumed: Source, state: dict[str, Any]) -> Iterator[Any]:
    resumed.load_state_dict(state)
    return resumed.start(state["epoch"])


def with_step_noise(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield batches as in a training loop, whose steps draw from the global generators, for example in dropout."""
    for batch in batches:
        torch.rand(3)
        np.random.rand()
        yield batch


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_done", few([3, 1]))
def test_resume_is_exact_in_the_middle_of_the_second_epoch(kind: str, num_done: int):
    feed_kind, make_loader = KINDS[kind]
    seed_everything(0)
    first = source(make_loader())
    epoch_zero = list(with_step_noise(first.start(0)))
    batches = with_step_noise(first.start(1))
    done = list(islice(batches, num_done))
    state, random_state = first.state_dict(), rng_state()
    rest = list(batches)
    epoch_two = list(with_step_noise(first.start(2)))
    assert state["kind"] == feed_kind
    assert (state["epoch"], state["num_batches"]) == (1, num_done)
    assert rest
    assert not same(epoch_zero, done + rest) or kind == "list" or kind == "own sampler of lists"

    seed_everything(99)
    second = source(make_loader())
    second.load_state_dict(state)
    set_rng_state(random_state)
    resumed = second.start(1)
    assert torch.equal(torch.get_rng_state(), random_state["torch"]), "start moved the restored generators"
    assert second.num_batches_done == num_done
    assert same(list(with_step_noise(resumed)), rest)
    assert same(list(with_step_noise(second.start(2))), epoch_two)


@pytest.mark.parametrize("kind", KINDS)
def test_state_holds_plain_values_and_tensors(kind: str):
    def check(value: Any) -> None:
        if type(value) is dict:
            assert all(type(key) is str for key in value)
            value = list(value.values())
        if type(value) in (list, tuple):
            for part in value:
                check(part)
        else:
            assert value is None or type(value) in (str, int, float, bool, Tensor)

    mine = source(KINDS[kind][1]())
    next(mine.start(0))
    check(mine.state_dict())


@pytest.mark.parametrize("kind", few(KINDS, 4))
def test_resume_between_two_epochs(kind: str):
    _, make_loader = KINDS[kind]
    seed_everything(0)
    first = source(make_loader())
    list(with_step_noise(first.start(0)))
    state, random_state = first.state_dict(), rng_state()
    epoch_one = list(with_step_noise(first.start(1)))

    for start_again in (False, True):
        seed_everything(99)
        second = source(make_loader())
        second.load_state_dict(state)
        set_rng_state(random_state)
        if start_again:
            assert list(second.start(0)) == []
        assert same(list(with_step_noise(second.start(1))), epoch_one)


def weighted_with_workers(**options: Any) -> DataLoader[Tensor]:
    sampler = WeightedRandomSampler([1.0] * NUM_SAMPLES, NUM_SAMPLES, **options)
    return DataLoader(Numbers(), 8, sampler=sampler, num_workers=1, persistent_workers=True, **options)


@pytest.mark.parametrize(("has_own_generator", "ends_by_loop"), [(False, True), (True, False)])
def test_persistent_workers_draw_no_additional_seed_after_a_resume(has_own_generator: bool, ends_by_loop: bool):
    """Random numbers that are drawn after the start of an epoch, for example in dropout, are identical."""

    def make() -> DataLoader[Tensor]:
        if not has_own_generator:
            return weighted_with_workers()
        return weighted_with_workers(generator=torch.Generator().manual_seed(1))

    torch.manual_seed(0)
    first, second = source(make()), source(make())
    begun = list(first.start(0))
    state, of_torch = first.state_dict(), torch.get_rng_state()
    of_next, drawn = list(first.start(1)), torch.get_rng_state()
    assert not same(of_next, begun)
    torch.manual_seed(1)
    second.load_state_dict(state)
    torch.set_rng_state(of_torch)
    if ends_by_loop:
        assert list(second.start(0)) == []
    assert same(list(second.start(1)), of_next)
    assert torch.equal(torch.get_rng_state(), drawn)
    for each in (first, second):
        each.close()


def test_an_epoch_is_over_after_its_last_batch():
    """The loop can stop after ``num_batches`` batches without requesting another batch."""
    first = source(DataLoader(Numbers(), batch_size=4, shuffle=True))
    list(islice(first.start(0), int(first.num_batches)))
    second = source(DataLoader(Numbers(), batch_size=4, shuffle=True))
    second.load_state_dict(first.state_dict())
    assert list(second.start(0)) == []
    assert len(list(second.start(1))) == 6


def test_the_epoch_after_an_interrupted_epoch_starts_at_its_first_batch():
    first, second = source(Stateful()), source(Stateful())
    list(islice(first.start(0), 5))
    second.load_state_dict(first.state_dict())
    of_next = list(second.start(1))
    assert len(of_next) == NUM_SAMPLES
    assert same(of_next, list(first.start(1)))


class WithoutEnd:
    """Endless stream, in which a new iterator continues after the last element of the previous iterator."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            self.position += 1
            yield torch.tensor([self.position])

    def state_dict(self) -> dict[str, Any]:
        return {"position": torch.tensor(self.position)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = int(state_dict["position"])


def test_an_endless_stream_continues_after_an_epoch_with_limited_batches():
    first, second = source(WithoutEnd()), source(WithoutEnd())
    assert list(islice(first.start(0), 3)) == [1, 2, 3]
    second.load_state_dict(first.state_dict())
    before = rng_state()
    assert list(islice(second.start(1), 3)) == [4, 5, 6] == list(islice(first.start(1), 3))
    assert is_same(rng_state(), before)
    second.load_state_dict(first.state_dict())  # the run resumes in the same process, for example after a loss spike
    assert list(islice(second.start(2), 3)) == [7, 8, 9]


class ResetsAtItsEnd(IterableDataset[Tensor]):
    """Stream that resets its position to the beginning when it ends."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.position < 5:
            self.position += 1
            yield torch.tensor(float(self.position))
        self.position = 0

    state_dict = WithoutEnd.state_dict
    load_state_dict = WithoutEnd.load_state_dict


def test_a_stream_that_ended_is_not_read_again_in_the_same_epoch():
    first, second = (source(DataLoader(ResetsAtItsEnd(), batch_size=2)) for _ in range(2))
    assert len(list(islice(first.start(0), 3))) == 3
    second.load_state_dict(first.state_dict())
    assert list(second.start(0)) == []
    assert same(list(second.start(1)), list(first.start(1)))


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(("before", "after"), [(4, 2), (4, 8), (4, 3)])
def test_resume_with_another_batch_size_repeats_and_skips_no_sample(before: int, after: int, num_workers: int):
    def make(batch_size: int) -> Source:
        return source(DataLoader(Noisy(), batch_size=batch_size, shuffle=True, num_workers=num_workers))

    whole = [sample for batch in make(before).start(1) for sample in batch]
    first = make(before)
    done = list(islice(first.start(1), 3))
    second = make(after)
    second.load_state_dict(first.state_dict())
    rest = list(second.start(1))

    indices = [int(sample[0]) for batch in done + rest for sample in batch]
    assert indices == [int(sample[0]) for sample in whole]
    assert sorted(indices) == list(range(NUM_SAMPLES))
    assert [len(batch) for batch in rest[:-1]] == [after] * (len(rest) - 1)
    # In workers, the noise of each sample is also identical, because it depends only on (seed, epoch, index).
    if num_workers:
        assert same([sample for batch in done + rest for sample in batch], whole)


@pytest.mark.parametrize(("batch_size", "drop_last"), [(2, False), (8, False), (8, True), (5, True)])
def test_done_and_remaining_batches_add_up_to_the_epoch(batch_size: int, drop_last: bool):
    first = source(DataLoader(Numbers(), batch_size=4, shuffle=True))
    list(islice(first.start(0), 3))
    second = source(DataLoader(Numbers(), batch_size=batch_size, drop_last=drop_last, shuffle=True))
    second.load_state_dict(first.state_dict())
    batches = second.start(0)
    num_done = second.num_batches_done
    assert num_done + len(list(batches)) == second.num_batches == second.num_batches_done


def test_two_resumes_in_one_epoch_with_changing_batch_sizes():
    read: list[Tensor] = []
    state = None
    for batch_size, num_batches in ((4, 2), (2, 3), (3, 100)):
        part = source(DataLoader(Numbers(), batch_size=batch_size, shuffle=True))
        if state is not None:
            part.load_state_dict(state)
        read += islice(part.start(0), num_batches)
        state = part.state_dict()
    assert state is not None
    assert state["num_samples"] == NUM_SAMPLES
    assert sorted(samples(read)) == list(range(NUM_SAMPLES))


def test_resume_on_another_number_of_ranks_repeats_and_skips_no_sample():
    def make(rank: int, size: int) -> Source:
        return source(DataLoader(Numbers(), batch_size=2, shuffle=True), ranks=Pretended(rank, size))

    read: list[Tensor] = []
    state: dict[str, Any] = {}
    for rank in range(2):
        part = make(rank, 2)
        read += islice(part.start(0), 2)
        state = part.state_dict()
    assert state["num_samples"] == 8
    alone = make(0, 1)
    alone.load_state_dict(state)
    read += alone.start(0)
    assert sorted(samples(read)) == list(range(NUM_SAMPLES))


def test_resume_does_not_load_samples_that_are_done():
    read: list[int] = []

    class Recording(Numbers):
        def __getitem__(self, index: int) -> Tensor:
            read.append(index)
            return super().__getitem__(index)

    for make in (lambda: DataLoader(Recording(), batch_size=4, shuffle=True), lambda: weighted(Recording())):
        first = source(make())
        list(islice(first.start(0), 3))
        read.clear()
        second = source(make())
        second.load_state_dict(first.state_dict())
        batches = second.start(0)
        assert read == []
        next(batches)
        assert len(read) == 4


def test_state_of_the_dataset_is_the_position_of_the_loader():
    class Stream(Stateful, IterableDataset[Tensor]):
        pass

    first = source(DataLoader(Stream(), batch_size=4))
    batches = first.start(0)
    next(batches)
    state = first.state_dict()
    rest = list(batches)
    second = source(DataLoader(Stream(), batch_size=4))
    second.load_state_dict(state)
    assert state["kind"] == "stateful"
    assert same(list(second.start(0)), rest)


def test_generator_can_be_read_for_one_epoch():
    def make() -> Iterator[int]:
        return (number for number in range(5))

    first = source(make())
    assert first.num_batches == math.inf
    batches = first.start(0)
    assert [next(batches), next(batches)] == [0, 1]
    state = first.state_dict()
    assert list(batches) == [2, 3, 4]
    with pytest.raises(DataError, match=r"train_dataloaders=.*iterated only once, but epoch 1 iterates it again"):
        first.start(1)
    second = source(make())
    second.load_state_dict(state)
    assert list(second.start(0)) == [2, 3, 4]


@pytest.mark.parametrize(
    ("saved", "now", "problem"),
    [
        (DataLoader(range(8)), [1, 2, 3], "is a loader of kind 'list'"),
        (DataLoader(range(8)), DataLoader(range(9)), "has 9 samples"),
        (DataLoader(range(8), shuffle=True), DataLoader(range(8)), "is read in order"),
        ([1, 2, 3], [1], "has only 1 batches"),
        (NoisyIterable(), iter([1]), "has only 1 batches"),
        (weighted(Numbers()), DataLoader(Numbers(), batch_sampler=[[0]]), "ended after 1 batches"),
    ],
)
def test_position_of_other_data_is_rejected(saved: Any, now: Any, problem: str):
    first = source(saved)
    list(islice(first.start(0), 2))
    second = source(now)
    with pytest.raises(DataError, match=problem):
        resume(second, first.state_dict())


def test_state_before_the_first_start():
    first, second = source([1, 2]), source([1, 2])
    second.load_state_dict(first.state_dict())
    assert list(second.start(0)) == [1, 2]


def test_state_dict_returns_the_loaded_state_before_start():
    first, second = source([1, 2, 3]), source([1, 2, 3])
    next(first.start(0))
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()


def test_replay_and_custom_iteration_are_reported(capsys: pytest.CaptureFixture[str]):
    first, second = source(NoisyIterable()), source(NoisyIterable())
    next(first.start(0))
    second.load_state_dict(first.state_dict())
    assert capsys.readouterr().err == ""
    second.start(0)
    assert "train_dataloaders: reading and discarding 1 batches" in capsys.readouterr().err
    source(OwnIteration(Numbers()))
    assert "OwnIteration overrides __iter__" in capsys.readouterr().err
    source(DataLoader(Numbers(), num_workers=1, in_order=False))
    assert "in_order=False" in capsys.readouterr().err


def test_seed_of_the_saved_run_is_used():
    def make(seed: int) -> Source:
        return Source(DataLoader(Numbers(), batch_size=4, shuffle=True), name="train", seed=seed)

    first, second = make(1), make(2)
    batches = first.start(0)
    next(batches)
    second.load_state_dict(first.state_dict())
    assert same(list(second.start(0)), list(batches))
    assert same(list(second.start(1)), list(first.start(1)))
