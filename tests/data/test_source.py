"""Batches of a Source, the time at which the Source reads them, and invalid loaders. For resume, see test_resume."""

import math
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from roomier.core.errors import DataError
from roomier.data.source import Source
from tests.data.numbers import NUM_SAMPLES, Noisy, NoisyStream, Numbers, same, samples, weighted
from tests.data.pretended import Pretended


def source(loader: Any, **options: Any) -> Source:
    return Source(loader, name="train_dataloaders", seed=11, **options)


@pytest.mark.parametrize("make", [lambda data: DataLoader(data, batch_size=2, shuffle=True), iter, weighted])
def test_no_batch_is_read_before_it_is_requested(make: Callable[[Any], Any]):
    read: list[int] = []

    class Recording(Numbers):
        def __getitem__(self, index: int) -> Tensor:
            read.append(index)
            if index >= NUM_SAMPLES:
                raise IndexError
            return super().__getitem__(index)

    batches = source(make(Recording())).start(0)
    assert read == []
    sizes = [len(read) for _ in islice(batches, 3)]
    assert sizes in ([2, 4, 6], [1, 2, 3], [4, 8, 12])


@pytest.mark.parametrize("data", [Noisy(), Subset(Noisy(), range(NUM_SAMPLES))])
def test_noise_in_workers_depends_on_seed_epoch_and_index(data: Dataset[Tensor]):
    def noise(seed: int, epoch: int, num_workers: int, batch_size: int) -> dict[int, list[float]]:
        loader = DataLoader(data, batch_size=batch_size, shuffle=True, num_workers=num_workers)
        batches = Source(loader, name="train", seed=seed).start(epoch)
        return {int(sample[0]): sample[1:].tolist() for batch in batches for sample in batch}

    reference = noise(1, 0, 1, 4)
    assert noise(1, 0, 2, 5) == reference
    for different in (noise(1, 1, 2, 4), noise(2, 0, 2, 4)):
        assert all(different[index] != reference[index] for index in range(NUM_SAMPLES))


def test_persistent_workers_after_an_interrupted_epoch():
    def make() -> Source:
        return source(DataLoader(Noisy(), batch_size=2, shuffle=True, num_workers=1, persistent_workers=True))

    cut = make()
    list(islice(cut.start(0), 2))
    assert same(list(cut.start(1)), list(make().start(1)))


def test_workers_that_the_user_started_are_not_used():
    def make() -> DataLoader[Tensor]:
        return DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True)

    used = make()
    list(used)
    assert same(list(source(used).start(0)), list(source(make()).start(0)))


@pytest.mark.parametrize("training", [True, False])
def test_pinned_memory(training: bool):
    loader = DataLoader(Numbers(), batch_size=4)
    if torch.cuda.is_available():
        assert next(source(loader, training=training, pin_memory=True).start(0)).is_pinned()
    else:
        with pytest.warns(UserWarning, match="'pin_memory' argument is set as true but no accelerator"):
            source(loader, training=training, pin_memory=True).start(0)
    assert not loader.pin_memory


def test_worker_init_fn_reaches_the_users_dataset():
    def init(worker_id: int) -> None:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        info.dataset.offset = info.dataset.base + 100 * worker_id

    class Offset(Numbers):
        base = 1000
        offset = 0

        def __getitem__(self, index: int) -> Tensor:
            return super().__getitem__(index) + self.offset

    loader = DataLoader(Offset(), batch_size=22, num_workers=1, worker_init_fn=init)
    assert samples(list(source(loader).start(0))) == list(range(1000, 1000 + NUM_SAMPLES))


@pytest.mark.more
def test_workers_that_are_spawned():
    loader = DataLoader(
        TensorDataset(torch.arange(6.0)), batch_size=2, shuffle=True, num_workers=1, multiprocessing_context="spawn"
    )
    assert sorted(int(x) for (batch,) in source(loader).start(0) for x in batch) == list(range(6))


def test_noise_without_workers_comes_from_the_global_generators():
    loader = DataLoader(Noisy(), batch_size=4)
    torch.manual_seed(0)
    mine = list(source(loader).start(0))
    torch.manual_seed(0)
    assert [batch[:, 1].tolist() for batch in mine] == [batch[:, 1].tolist() for batch in loader]


def test_other_options_of_the_loader_are_kept():
    def collate(numbers: list[Tensor]) -> list[float]:
        return [float(number) for number in numbers]

    loader = DataLoader(Numbers(), batch_size=4, collate_fn=collate, drop_last=True, shuffle=True)
    batches = list(source(loader).start(0))
    assert all(isinstance(batch, list) for batch in batches)
    assert [len(batch) for batch in batches] == [4] * 5
    assert isinstance(loader.sampler, RandomSampler), "the user's loader was changed"


def test_generator_of_the_loader_determines_the_order():
    def order(generator_seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(generator_seed)
        return samples(list(source(DataLoader(Numbers(), shuffle=True, generator=generator)).start(0)))

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_evaluation_keeps_the_users_sampler():
    loader = DataLoader(Numbers(), batch_size=4, sampler=SequentialSampler(range(9)))
    evaluation = source(loader, training=False)
    assert samples(list(evaluation.start(0))) == list(range(9))
    shuffled = DataLoader(Numbers(), batch_size=4, shuffle=True)
    torch.manual_seed(5)
    mine = samples(list(source(shuffled, training=False).start(0)))
    torch.manual_seed(5)
    assert mine == samples(list(shuffled))


def test_shuffling_can_be_disabled(capsys: pytest.CaptureFixture[str]):
    frozen = source(DataLoader(Numbers(), batch_size=4, shuffle=True), shuffle_allowed=False)
    assert samples(list(frozen.start(0))) == samples(list(frozen.start(1))) == list(range(NUM_SAMPLES))
    assert capsys.readouterr().err == ""
    source(weighted(Numbers()), shuffle_allowed=False)
    assert "cannot disable the shuffling of a custom sampler" in capsys.readouterr().err


def test_set_epoch_is_called():
    class ByEpoch(Sampler[int]):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter([self.epoch])

    mine = source(DataLoader(Numbers(), sampler=ByEpoch()))
    assert [samples(list(mine.start(epoch))) for epoch in (3, 4)] == [[3], [4]]


@pytest.mark.parametrize("size", [1, 2])
def test_an_evaluation_does_not_set_the_epoch_of_the_training_dataset(size: int):
    class ByEpoch(Numbers):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    data, ranks = ByEpoch(), Pretended(0, size)
    training = source(DataLoader(data), ranks=ranks).start(7)
    next(training)
    list(source(DataLoader(data), ranks=ranks, training=False).turns(2))
    assert data.epoch == 7


@pytest.mark.parametrize(
    "loader",
    [
        [],
        (),
        DataLoader([]),
        DataLoader([1, 2], batch_size=4, drop_last=True),
        DataLoader([1, 2], batch_sampler=[]),
    ],
)
def test_empty_loader_is_rejected_immediately(loader: Any):
    with pytest.raises(DataError, match="train_dataloaders="):
        source(loader)


def test_fewer_samples_than_ranks():
    with pytest.raises(DataError, match="yields no batches"):
        source(DataLoader([1, 2]), ranks=Pretended(0, 3))


@pytest.mark.parametrize("loader", [iter([]), (x for x in ()), DataLoader(NoisyStream(), 100, drop_last=True)])
def test_empty_loader_without_length_is_rejected_on_first_read(loader: Any):
    batches = source(loader).start(0)
    with pytest.raises(DataError, match=r"train_dataloaders=.*yields no batches"):
        next(batches)


@pytest.mark.parametrize(
    ("loader", "action"),
    [
        (None, "Pass a DataLoader"),
        (3, "Pass a DataLoader"),
        ("data.txt", "Pass a DataLoader"),
        (torch.zeros(4, 2), "Pass a DataLoader"),
        (np.zeros(4), "Pass a DataLoader"),
        ({"input_ids": torch.zeros(4)}, "dict of DataLoaders"),
        ({}, "is an empty dict"),
        (Numbers(), r"DataLoader\(dataset, batch_size=8\)"),
        ([DataLoader([1]), DataLoader([2])], "CombinedLoader"),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_objects_that_yield_no_batches_are_rejected(loader: Any, action: str, training: bool):
    with pytest.raises(DataError, match=action):
        source(loader, training=training)


def test_dataset_without_length():
    class NoLength(Dataset[int]):
        def __getitem__(self, index: int) -> int:
            return index

    with pytest.raises(DataError, match="without a length"):
        source(DataLoader(NoLength()))


def test_cost_of_a_batch():
    """A batch costs about a tenth of a microsecond. The bound allows for a busy machine."""
    batches = [0] * 100_000
    best_s = math.inf
    for _ in range(5):
        iterator = source(batches).start(0)
        begin = time.perf_counter()
        for _batch in iterator:
            pass
        best_s = min(best_s, time.perf_counter() - begin)
    assert best_s / len(batches) < 2e-6
