"""Ranks that share sequences read the same batches. Loaders that yield different batches are rejected on every rank."""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler, Subset, get_worker_info

from roomier import Trainer
from roomier.core.errors import DataError, RoomierError
from roomier.data import CombinedLoader
from tests.context.networks import Batch
from tests.context.test_data import NUM_SAMPLES, Indexed, Reads
from tests.ranks.pool import RankPool


class Counted(IterableDataset[Batch]):
    """Stream of the first ``num_samples`` samples, without a length."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[Batch]:
        return (Indexed()[index] for index in range(self.num_samples))


class OfRank(Sampler[int]):
    """Sampler that shards by the rank of the process."""

    def __init__(self) -> None:
        self.first, self.step = dist.get_rank(), dist.get_world_size()

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, NUM_SAMPLES, self.step))

    def __len__(self) -> int:
        return len(range(self.first, NUM_SAMPLES, self.step))


def whole(num_samples: int = NUM_SAMPLES) -> DataLoader[Any]:
    return DataLoader(Subset(Indexed(), range(num_samples)), batch_size=1)


def stream(num_samples: int) -> DataLoader[Any]:
    return DataLoader(Counted(num_samples), batch_size=1)


def of_rank() -> DataLoader[Any]:
    return DataLoader(Indexed(), sampler=OfRank())


def distributed() -> DataLoader[Any]:
    return DataLoader(Indexed(), sampler=DistributedSampler(Indexed()))


def unequal(make: Callable[[int], DataLoader[Any]]) -> DataLoader[Any]:
    """Return a loader that is longer on the last rank."""
    return make(9 if dist.get_rank() == dist.get_world_size() - 1 else 8)


def fit(trainer: Trainer, loader: Any) -> None:
    trainer.fit(Reads(), loader)


def validate(trainer: Trainer, loader: Any) -> None:
    trainer.fit(Reads(), whole(), loader)


def predict(trainer: Trainer, loader: Any) -> None:
    trainer.fit(Reads(), whole())
    trainer.predict(Reads(), loader)


def predict_stream(trainer: Trainer, loader: Any) -> None:
    list(trainer.predict_stream(Reads(), loader))


DIFFER = "yields different (batches|numbers of batches)"
CASES: dict[str, tuple[Callable[..., None], Callable[[], Any], str]] = {
    "lengths in training": (fit, lambda: unequal(whole), "8.* 9 batches by rank, which differ on ranks"),
    "lengths": (validate, lambda: unequal(whole), "8.* 9 batches by rank, which differ on ranks"),
    "lengths of the second": (validate, lambda: [whole(), unequal(whole)], "which differ on ranks"),
    "streams": (validate, lambda: unequal(stream), DIFFER),
    "sampler": (validate, of_rank, DIFFER),
    "sampler in training": (fit, of_rank, DIFFER),
    "distributed sampler": (fit, distributed, "trainer.data_rank"),
    "lengths in predict": (predict, lambda: unequal(whole), "which differ on ranks"),
    "sampler in predict": (predict, of_rank, DIFFER),
    "streams in predict_stream": (predict_stream, lambda: unequal(stream), DIFFER),
}


def trainer_of(root: Path, num_ranks: int, **keywords: Any) -> Trainer:
    return Trainer(
        strategy={"name": "zero2", "context_parallel_size": 2},
        devices=num_ranks,
        accelerator="cpu",
        logger=False,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        default_root_dir=root,
        enable_progress_bar=False,
        enable_model_summary=False,
        **keywords,
    )


def rejected(name: str, root: Path, num_ranks: int) -> tuple[str, str]:
    run, make, _ = CASES[name]
    try:
        run(trainer_of(root, num_ranks, max_steps=4, val_check_interval=2), make())
    except RoomierError as error:
        return type(error).__name__, str(error)
    return "", "no error"


FEW = ("lengths", "streams")


@pytest.mark.parametrize(
    ("names", "num_ranks"),
    [(FEW, 2), pytest.param([*CASES], 2, marks=pytest.mark.more), pytest.param([*CASES], 4, marks=pytest.mark.slow)],
)
def test_different_batches_are_rejected_on_every_rank(
    names: Sequence[str], num_ranks: int, on_ranks: RankPool, tmp_path: Path
) -> None:
    calls = [(name, tmp_path, num_ranks) for name in names]
    for name, of_ranks in zip(names, on_ranks.each(num_ranks, rejected, calls, timeout_s=60), strict=True):
        for kind, message in of_ranks:
            assert kind == DataError.__name__, (name, message)
            assert re.search(CASES[name][2], message), (name, message)


class OfDataRank(IterableDataset[Batch]):
    """Stream that shards by the data rank and by the worker process."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        number, count = (worker.id, worker.num_workers) if worker else (0, 1)
        own = range(self.rank, NUM_SAMPLES, self.world_size)
        return (Indexed()[index] for index in own[number::count])


class Shuffled(Sampler[int]):
    """Sampler that draws from Python's global generator for each index."""

    def __iter__(self) -> Iterator[int]:
        rest = list(range(NUM_SAMPLES))
        while rest:
            yield rest.pop(random.randrange(len(rest)))

    def __len__(self) -> int:
        return NUM_SAMPLES


def distributed_by_data_rank(trainer: Trainer) -> DataLoader[Any]:
    world: dict[str, Any] = {"num_replicas": trainer.num_data_ranks, "rank": trainer.data_rank}
    return DataLoader(Indexed(), sampler=DistributedSampler(Indexed(), shuffle=True, **world))


READ: dict[str, Callable[[Trainer], Any]] = {
    "stream by data rank": lambda trainer: DataLoader(
        OfDataRank(trainer.data_rank, trainer.num_data_ranks), batch_size=1, num_workers=2
    ),
    "distributed by data rank": distributed_by_data_rank,
    "sampler that draws": lambda _: DataLoader(Indexed(), sampler=Shuffled()),
    "shuffled": lambda _: DataLoader(Indexed(), shuffle=True),
    "list": lambda _: list(whole()),
    "several": lambda _: CombinedLoader([whole(8), DataLoader(Indexed(), shuffle=True)], "sequential"),
    "unequal streams": lambda _: unequal(stream),
}


class ReadsOwn(Reads):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def train_dataloader(self) -> Any:
        return READ[self.name](self.trainer)  # type: ignore[arg-type]


def read(name: str, root: Path, num_ranks: int) -> list[int]:
    """Return the samples that this rank reads in an epoch of an unseeded run."""
    torch.manual_seed(dist.get_rank())
    random.seed(dist.get_rank())
    module = ReadsOwn(name)
    trainer = trainer_of(root, num_ranks, max_epochs=1)
    trainer.fit(module)
    return module.read


@pytest.mark.more
@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_a_group_reads_each_sample_once(num_ranks: int, on_ranks: RankPool, tmp_path: Path) -> None:
    calls = [(name, tmp_path, num_ranks) for name in READ]
    for name, of_ranks in zip(READ, on_ranks.each(num_ranks, read, calls, timeout_s=120), strict=True):
        assert of_ranks[::2] == of_ranks[1::2], name
        wanted = [*range(8 if name == "unequal streams" else NUM_SAMPLES), *(range(8) if name == "several" else ())]
        assert sorted(index for each in of_ranks[::2] for index in each) == sorted(wanted), name
