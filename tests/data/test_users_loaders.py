"""Loaders such as users and libraries write, with custom constructors and iterators.

Each loader yields every sample, on one rank and on two ranks, alone and together with another loader. Each loader
resumes at its position. Reading its first batch in advance has no side effects.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler

from roomier.data import CombinedLoader
from roomier.data.first_batch import first_batch
from roomier.data.source import Source
from tests.covering import few
from tests.data.pretended import Pretended

NUM_SAMPLES = 12


class Numbers(Dataset[float]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> float:
        return float(index)


class GraphLoader(DataLoader[float]):
    """Loader like the DataLoader of torch_geometric, with additional arguments and a fixed collate function."""

    def __init__(self, dataset: Any, batch_size: int = 1, follow_batch: Any = None, **options: Any) -> None:
        self.follow_batch = follow_batch
        super().__init__(dataset, batch_size, collate_fn=lambda samples: {"x": torch.tensor(samples)}, **options)


class Filtered(Iterator[Any]):
    def __init__(self, iterator: Any, change: Callable[[Any], Any]) -> None:
        self.iterator = iterator
        self.change = change

    def __next__(self) -> Any:
        return self.change(next(self.iterator))


class NodeLoader(DataLoader[int]):
    """Loader like NodeLoader of torch_geometric, without a dataset. The main process completes the batches of
    workers."""

    def __init__(self, values: torch.Tensor, **options: Any) -> None:
        self.values = values
        super().__init__(range(len(values)), collate_fn=self.gather, **options)  # type: ignore[arg-type]

    def gather(self, index: list[int]) -> torch.Tensor:
        return torch.tensor(index)

    def _get_iterator(self) -> Any:
        return Filtered(super()._get_iterator(), lambda index: {"x": self.values[index]})


class Configured(DataLoader[float]):
    """Loader that cannot be constructed from the arguments of a DataLoader."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(Numbers(), **config)


class Doubling(DataLoader[float]):
    """Loader with a custom ``__iter__``, like loaders that prefetch."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield 2 * batch / 2


class Table:
    """Dataset like Hugging Face's: it is not a torch class, reads several rows in one call, and has an output
    format."""

    def __init__(self) -> None:
        self.format: str | None = None

    def set_format(self, format: str) -> None:
        self.format = format

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.tensor(float(index)) if self.format == "torch" else float(index)}

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [self[index] for index in indices]


class Shards:
    """Loader like the loaders of webdataset, which are not torch classes and have no length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(float(NUM_SAMPLES)).split(3)


class Sized(IterableDataset[float]):
    """Stream with a length."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __iter__(self) -> Iterator[float]:
        yield from torch.randperm(NUM_SAMPLES).float().tolist()


class InGroups(Sampler[list[int]]):
    """Batch sampler as in a forecasting library. The sampler draws from Python's generator and groups samples by
    time."""

    def __iter__(self) -> Iterator[list[int]]:
        groups = [list(range(first, first + 3)) for first in range(0, NUM_SAMPLES, 3)]
        random.shuffle(groups)
        yield from groups

    def __len__(self) -> int:
        return NUM_SAMPLES // 3


def table() -> Any:
    rows = Table()
    rows.set_format("torch")
    return rows


LOADERS: dict[str, Callable[[], Any]] = {
    "graphs": lambda: GraphLoader(Numbers(), batch_size=3, shuffle=True),
    "nodes": lambda: NodeLoader(torch.arange(12.0), batch_size=3, shuffle=True),
    "nodes, workers": lambda: NodeLoader(torch.arange(12.0), batch_size=3, shuffle=True, num_workers=1),
    "configured": lambda: Configured({"batch_size": 3, "shuffle": True}),
    "own iteration": lambda: Doubling(Numbers(), batch_size=3, shuffle=True),
    "table": lambda: DataLoader(table(), batch_size=3, shuffle=True),
    "shards": Shards,
    "stream": lambda: DataLoader(Sized(), batch_size=3),
    "batch sampler": lambda: DataLoader(Numbers(), batch_sampler=InGroups()),
    "no batches": lambda: DataLoader(Numbers(), batch_size=None, sampler=RandomSampler(Numbers())),
}


def values(batch: Any) -> list[float]:
    if isinstance(batch, dict):
        return [value for each in batch.values() for value in values(each)]
    return batch.flatten().tolist() if isinstance(batch, torch.Tensor) else [batch]


def together(loader: Any, is_alone: bool) -> Any:
    return loader if is_alone else CombinedLoader({"own": loader, "short": [0.0, 0.0]}, "max_size_cycle")


def own(batch: Any, is_alone: bool) -> list[float]:
    return values(batch if is_alone else batch["own"])


@pytest.mark.parametrize("is_alone", few([False, True]))
@pytest.mark.parametrize("kind", LOADERS)
def test_loader_yields_every_sample_and_resumes(kind: str, is_alone: bool, capsys: Any):
    def source() -> Source:
        return Source(together(LOADERS[kind](), is_alone), name="train_dataloaders", seed=3)

    torch.manual_seed(0)
    random.seed(0)
    first, batches = source(), []
    for epoch in range(2):
        read = [own(batch, is_alone) for batch in first.start(epoch)]
        assert sorted(value for batch in read for value in batch) == list(range(NUM_SAMPLES))
        batches += read
    torch.manual_seed(0)
    random.seed(0)
    cut = source()
    reading = cut.start(0)
    begun = [own(next(reading), is_alone) for _ in range(2)]
    state, random_states = cut.state_dict(), (torch.get_rng_state(), random.getstate())
    cut.close()
    resumed = source()
    resumed.load_state_dict(state)
    torch.set_rng_state(random_states[0])
    random.setstate(random_states[1])
    rest = [own(batch, is_alone) for epoch in range(2) for batch in resumed.start(epoch)]
    assert begun + rest == batches
    resumed.close()
    capsys.readouterr()


@pytest.mark.parametrize("is_alone", [True, False])
@pytest.mark.parametrize("kind", LOADERS)
def test_two_ranks_share_the_loader(kind: str, is_alone: bool, capsys: Any):
    found = []
    for rank in range(2):
        torch.manual_seed(rank)
        random.seed(rank)
        loader = together(LOADERS[kind](), is_alone)
        source = Source(loader, name="train_dataloaders", seed=3, ranks=Pretended(rank, 2))
        found.append([value for batch in source.start(0) for value in own(batch, is_alone)])
    assert sorted(found[0] + found[1]) == list(range(NUM_SAMPLES))
    assert len(found[0]) == len(found[1])
    capsys.readouterr()


@pytest.mark.parametrize("is_alone", [True, False])
@pytest.mark.parametrize("kind", LOADERS)
def test_first_batch_has_the_structure_of_all_batches(kind: str, is_alone: bool):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    batch, loader = first_batch(together(LOADERS[kind](), is_alone), "train_dataloaders")
    assert torch.equal(torch.get_rng_state(), before)
    source = Source(loader, name="train_dataloaders", seed=3)
    wanted = next(source.start(0))
    source.close()
    assert type(batch) is type(wanted)
    assert len(own(batch, is_alone)) == len(own(wanted, is_alone))
    one, other = (batch, wanted) if is_alone else (batch["own"], wanted["own"])
    assert type(one) is type(other)
    assert not isinstance(one, dict) or one.keys() == other.keys()
