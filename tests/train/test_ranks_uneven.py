"""Loaders of different lengths on two ranks: no rank waits for batches that do not exist."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import roomier
from roomier.core.errors import DataError

pytestmark = pytest.mark.more

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


class Samples(Dataset[Tensor]):
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Tensor:
        if index >= self.num_samples:
            raise IndexError
        return torch.tensor([float(index)])


class OwnSamples(Samples):
    """Each rank has different data."""

    shards_by_rank = True


class Stream(IterableDataset[Tensor]):
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Any:
        return iter([torch.tensor([float(index)]) for index in range(self.num_samples)])


class OwnStream(Stream):
    shards_by_rank = True


KINDS = {
    "list": lambda size: [torch.tensor([[float(index)]]) for index in range(size)],
    "map-style": lambda size: DataLoader(Samples(size)),
    "map-style with a sampler": lambda size: DataLoader(Samples(size), sampler=range(size)),
    "map-style, own data": lambda size: DataLoader(OwnSamples(size)),
    "iterable": lambda size: DataLoader(Stream(size)),
    "iterable, own data": lambda size: DataLoader(OwnStream(size)),
    "generator": lambda size: (torch.tensor([[float(index)]]) for index in range(size)),
    "one of several": lambda size: {"even": DataLoader(Samples(8)), "uneven": DataLoader(Samples(size))},
}


class Reads(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.trained: list[float] = []
        self.validated: list[float] = []

    def training_step(self, batch, batch_idx):
        batch = batch["uneven"] if isinstance(batch, dict) else batch
        self.trained += batch.flatten().tolist()
        return self.net(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        self.validated += batch.flatten().tolist()
        self.log("mean", batch.mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def outcome(strategy: str, train: Any, val: Any = None) -> Any:
    """Return the samples that this rank read in one epoch, or its error."""
    module = Reads()
    trainer = roomier.Trainer(
        **QUIET, strategy=strategy, devices=dist.get_world_size(), max_epochs=1, num_sanity_val_steps=0
    )
    try:
        trainer.fit(module, train, val)
    except DataError as error:
        return error.field, error.problem
    return (module.trained, None) if val is None else (module.validated, float(trainer.callback_metrics["mean"]))


def train_on(strategy: str, sizes: tuple[int, int]) -> dict[str, Any]:
    """Run several fits. After an error, both ranks can begin the next fit."""
    return {kind: outcome(strategy, make(sizes[dist.get_rank()])) for kind, make in KINDS.items()}


def validate_on(strategy: str, sizes: tuple[int, int]) -> dict[str, Any]:
    even = [torch.ones(1, 1)] * 4
    kinds = {kind: make for kind, make in KINDS.items() if kind != "one of several"}
    outcomes = {kind: outcome(strategy, even, make(sizes[dist.get_rank()])) for kind, make in kinds.items()}
    on_one = outcome(strategy, even, even if dist.get_rank() == 0 else None)
    return {**outcomes, "on one rank alone": on_one}


STRATEGIES = ["ddp", pytest.param("zero2", marks=pytest.mark.slow), pytest.param("zero3", marks=pytest.mark.slow)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_uses_as_many_batches_as_the_shortest_loader(on_ranks, capfd, strategy: str) -> None:
    first, second = on_ranks(2, train_on, strategy, (4, 7))
    taken = {kind: [read for read, _ in pair] for kind, pair in pairs(first, second).items()}
    assert taken.pop("one of several") == [
        [0, 2, 0, 2],
        [1, 3, 5, 1],
    ]  # with max_size_cycle, the longest loader determines the length on each rank
    for kind, (of_first, of_second) in taken.items():
        own = kind.endswith("own data")
        assert (of_first, of_second) == (([0, 1, 2, 3],) * 2 if own else ([0, 2], [1, 3])), kind
    printed = capfd.readouterr().out
    streams = re.findall(r"the loader of rank 0 ended after (\d) batches. The epoch ends on all ranks", printed)
    assert streams == ["2", "4", "2"]  # one notice for each loader without a length
    notice = "has 4 batches on rank 0, 7 batches on rank 1; each epoch has as many batches as the shortest loader"
    assert printed.count(notice) == 5  # the first rank prints one notice for each loader with a length


def pairs(first: dict[str, Any], second: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {kind: (first[kind], second[kind]) for kind in first}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_missing_training_data_on_one_rank_is_an_error_on_all(on_ranks, strategy: str) -> None:
    first, second = on_ranks(2, train_on, strategy, (4, 0))
    assert first == second
    for kind, (field, problem) in first.items():
        assert field == ("train_dataloaders['uneven']" if kind == "one of several" else "train_dataloaders")
        assert problem.startswith("yields no batches on rank 1"), kind


SAME_LOADER = "has 4 batches on rank 0, 7 batches on rank 1, but the ranks take turns with the batches of one loader"
SAME_BATCHES = "yields different numbers of batches on different ranks"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_evaluations_require_the_same_loaders_or_sharded_data(on_ranks, strategy: str) -> None:
    first, second = on_ranks(2, validate_on, strategy, (4, 7))
    for kind in ("map-style, own data", "iterable, own data"):
        assert first.pop(kind) == ([0, 1, 2, 3], pytest.approx(27 / 11))
        assert second.pop(kind) == ([0, 1, 2, 3, 4, 5, 6], pytest.approx(27 / 11))
    assert first == second
    problems = {kind: problem for kind, (_, problem) in first.items()}
    assert problems == {
        **dict.fromkeys(("list", "map-style", "map-style with a sampler"), SAME_LOADER),
        **dict.fromkeys(("iterable", "generator"), SAME_BATCHES),
        "on one rank alone": "has 1 loaders on rank 0, 0 loaders on rank 1",
    }


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_missing_validation_data_on_one_rank_is_an_error_on_all(on_ranks, strategy: str) -> None:
    first, second = on_ranks(2, validate_on, strategy, (4, 0))
    assert first == second
    problems = {kind: problem for kind, (_, problem) in first.items()}
    assert "but rank 1 has no batch" in problems.pop("iterable, own data")
    assert problems.pop("on one rank alone").startswith("has 1 loaders on rank 0")
    assert all(problem.startswith("yields no batches on rank 1") for problem in problems.values())
