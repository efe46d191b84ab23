"""Several loaders that are read together: the same batches as Lightning's CombinedLoader, and a position for each
loader."""

import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from roomier.core.errors import DataError
from roomier.data import CombinedLoader
from roomier.data.combined import MODES, training_loader
from roomier.data.first_batch import first_batch
from roomier.data.source import Source
from tests.data.pretended import Pretended


class Numbers(Dataset[int]):
    """Sample ``i`` is ``first + i``."""

    def __init__(self, length: int, first: int = 0) -> None:
        self.length = length
        self.first = first

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return self.first + index


class Noisy(Numbers):
    """Dataset that draws from two global generators for each sample, as augmentation does."""

    def __getitem__(self, index: int) -> Any:
        return float(torch.rand(()) + random.random() + super().__getitem__(index))


class Stream(IterableDataset[int]):
    """Stream without a length and with a different order in each pass."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.length).tolist()


class KeepsPosition:
    """Loader that saves its own state. The loader restarts in each pass, except in the first pass after its state is
    loaded."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.position = self.next_start = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        self.position, self.next_start = self.next_start, 0
        while self.position < self.length:
            self.position += 1
            yield 100 * self.position

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next_start = self.position = state["position"]


class DrawsEachTime(Sampler[int]):
    """Sampler that draws from the global generators for each index."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(7):
            yield random.randrange(7)

    def __len__(self) -> int:
        return 7


def plain(batch: Any) -> Any:
    """Convert tensors to lists, to compare them."""
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    return type(batch)(map(plain, batch)) if isinstance(batch, (list, tuple)) else batch


FORMS: dict[str, Callable[[], Any]] = {
    "dict": lambda: {"a": DataLoader(Numbers(6), batch_size=4), "b": DataLoader(Numbers(15), batch_size=5)},
    "list": lambda: [DataLoader(Numbers(15), batch_size=5), DataLoader(Numbers(6)), DataLoader(Numbers(7), 2)],
    "nested": lambda: {"a": [DataLoader(Numbers(6)), (DataLoader(Numbers(3)),)], "b": DataLoader(Numbers(15), 5)},
    "list of one": lambda: [DataLoader(Numbers(6), batch_size=4)],
    "a loader": lambda: DataLoader(Numbers(6), batch_size=4),
    "lists of numbers": lambda: {"a": [1, 2, 3], "b": range(5)},
    "iterables": lambda: (DataLoader(Numbers(4)), range(7)),
    "streams": lambda: {"a": DataLoader(Stream(4)), "b": DataLoader(Numbers(6))},
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", FORMS)
def test_batches_are_equal_to_lightning(form: str, mode: Any):
    lightning = pytest.importorskip("lightning.pytorch.utilities")
    torch.manual_seed(0)
    reference = lightning.CombinedLoader(FORMS[form](), mode)
    wanted = [(plain(batch), *indices) for batch, *indices in reference]
    torch.manual_seed(0)
    ours = CombinedLoader(FORMS[form](), mode)
    assert [(plain(batch), *indices) for batch, *indices in ours] == wanted
    if form != "streams":
        iter(reference)
        assert len(ours) == len(reference) == len(wanted)
        batches = [batch for batch, *_ in wanted]
        # Read the same object in training and in an evaluation, and do the same with Lightning's object.
        for loader in (ours, training_loader(reference, "train_dataloaders")):
            for training in (True, False):
                source = Source(loader, name="train_dataloaders", seed=0, training=training)
                assert source.num_batches == len(wanted)
                assert [plain(batch) for batch in source.start(0)] == batches


def test_default_mode_ends_with_the_longest_loader():
    loader = training_loader([DataLoader(Numbers(2)), DataLoader(Numbers(3, first=10))], "train_dataloaders")
    batches = [plain(batch) for batch in Source(loader, name="train_dataloaders", seed=0).start(0)]
    assert batches == [[[0], [10]], [[1], [11]], [[0], [12]]]


def of_every_kind() -> dict[str, Any]:
    return {
        "shuffled": DataLoader(Noisy(10), batch_size=2, shuffle=True),
        "again": DataLoader(Noisy(10), batch_size=2, shuffle=True),
        "weighted": [
            DataLoader(Numbers(7), batch_size=2, sampler=WeightedRandomSampler(torch.ones(7).tolist(), 7)),
            DataLoader(Numbers(7), batch_size=2, sampler=DrawsEachTime()),
        ],
        "list": [1, 2, 3],
        "stream": DataLoader(Stream(5), batch_size=2),
        "keeps": KeepsPosition(4),
    }


def read(source: Source, epochs: int = 2, first: int = 0) -> list[Any]:
    """Return the batches of the epochs from ``first`` to ``epochs``, exclusive, while the loop also draws random
    numbers."""
    found = []
    for epoch in range(first, epochs):
        for batch in source.start(epoch):
            torch.rand(3)
            found.append(plain(batch))
    return found


@pytest.mark.parametrize("mode", MODES)
def test_a_run_resumes_at_every_batch(mode: Any, capsys: pytest.CaptureFixture[str]):
    def source(seed: int = 3) -> Source:
        return Source(CombinedLoader(of_every_kind(), mode), name="train_dataloaders", seed=seed)

    torch.manual_seed(5)
    random.seed(5)
    first, batches, states = source(), [], []
    for epoch in range(2):
        for batch in first.start(epoch):
            torch.rand(3)
            batches.append(plain(batch))
            states.append((epoch, first.state_dict(), torch.get_rng_state(), random.getstate(), first.num_batches_done))
    assert batches[: len(batches) // 2] != batches[len(batches) // 2 :]  # epochs have different orders
    for number, (epoch, state, of_torch, of_python, num_done) in enumerate(states):
        second = source(seed=4)  # the seed of the saved run is used
        second.check(state, epoch)
        second.load_state_dict(state)
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        rest = second.start(epoch)
        assert second.num_batches_done == num_done
        remaining = []
        for batch in rest:
            torch.rand(3)
            remaining.append(plain(batch))
        assert remaining + read(second, first=epoch + 1) == batches[number + 1 :]
    capsys.readouterr()  # discard notices about loaders that do not save their position


def test_each_pass_over_a_short_loader_has_a_new_shuffle():
    loader = CombinedLoader([DataLoader(Numbers(12)), DataLoader(Numbers(4), shuffle=True)], "max_size_cycle")
    batches = [int(batch[1]) for batch in Source(loader, name="train_dataloaders", seed=0).start(0)]
    passes = [batches[:4], batches[4:8], batches[8:]]
    assert all(sorted(each) == [0, 1, 2, 3] for each in passes)
    assert len(set(map(tuple, passes))) > 1


def test_loaders_read_together_have_different_orders():
    for generator in (None, torch.Generator().manual_seed(0)):
        pair = [DataLoader(Numbers(20), batch_size=20, shuffle=True, generator=generator) for _ in range(2)]
        [[first, second]] = Source(CombinedLoader(pair), name="train_dataloaders", seed=0).start(0)
        assert first.tolist() != second.tolist()


def test_loaders_with_equal_generator_seeds_have_equal_orders():
    pair = [
        DataLoader(Numbers(20), batch_size=20, shuffle=True, generator=torch.Generator().manual_seed(0))
        for _ in range(2)
    ]
    [[first, second]] = Source(CombinedLoader(pair), name="train_dataloaders", seed=0).start(0)
    assert first.tolist() == second.tolist()


@pytest.mark.parametrize(("mode", "num_batches"), [("min_size", 2), ("max_size", 5), ("max_size_cycle", 5)])
def test_ranks_share_each_loader(mode: Any, num_batches: int):
    """Two ranks share 10 and 5 samples. Each sample of a pass goes to exactly one rank."""
    found: list[list[Any]] = []
    for rank in range(2):
        loader = CombinedLoader([DataLoader(Numbers(10), 1), list(range(100, 105))], mode)
        source = Source(loader, name="train_dataloaders", seed=0, ranks=Pretended(rank, 2))
        assert source.num_batches == num_batches
        found.append([plain(batch) for batch in source.start(0)])
        assert len(found[-1]) == num_batches
    numbers = [batch[0][0] for of_rank in found for batch in of_rank]
    assert len(set(numbers)) == 2 * num_batches
    assert {batch[1] for of_rank in found for batch in of_rank} - {None} == {100, 101, 102, 103}


def test_an_epoch_over_several_loaders_resumes_on_other_ranks(capsys: pytest.CaptureFixture[str]):
    def source(rank: int, size: int) -> Source:
        loaders = {"a": DataLoader(Numbers(48), shuffle=True), "b": DataLoader(Numbers(8, first=100), shuffle=True)}
        loader = CombinedLoader(loaders, "max_size_cycle")
        return Source(loader, name="train_dataloaders", seed=1, ranks=Pretended(rank, size))

    before: list[dict[str, Any]] = []
    for rank in range(2):
        each = source(rank, 2)
        before += islice(each.start(0), 6)
        state = each.state_dict()
    after: list[dict[str, Any]] = []
    for rank in range(4):
        each = source(rank, 4)
        each.load_state_dict(state)
        batches = each.start(0)
        assert (each.num_batches, each.num_batches_done) == (12, 3)
        after += batches
    assert sorted(int(batch["a"]) for batch in before + after) == list(range(48))
    # 12 samples of "b" were read: one full pass, and half of the second pass, which the 4 ranks continue.
    short = [int(batch["b"]) for batch in before]
    assert sorted(short[:4] + short[6:10]) == list(range(100, 108))
    second_pass = short[4:6] + short[10:] + [int(after[9 * rank]["b"]) for rank in range(4)]
    assert sorted(second_pass) == list(range(100, 108))
    capsys.readouterr()


def test_a_generator_cannot_restart():
    loader = CombinedLoader([DataLoader(Numbers(3)), (number for number in range(2))], "max_size_cycle")
    batches = Source(loader, name="train_dataloaders", seed=0).start(0)
    assert len(list(islice(batches, 2))) == 2
    with pytest.raises(DataError, match=r"train_dataloaders\[1\]=.*can be iterated only once"):
        next(batches)


@pytest.mark.parametrize(
    ("loaders", "mode", "message"),
    [
        ([DataLoader(Numbers(2))], "longest", "mode='longest': is unknown"),
        ([], "min_size", "contains no loaders"),
        (
            [DataLoader(Numbers(2)), torch.zeros(2)],
            "min_size",
            r"iterables\[1\]=.*is a Tensor, which yields no batches",
        ),
        ({"a": {"b": Numbers(2), "c": DataLoader(Numbers(2))}}, "min_size", r"iterables\['a'\]\['b'\]=.*is a dataset"),
        ([CombinedLoader([DataLoader(Numbers(2))])], "min_size", r"iterables\[0\]=.*among several loaders"),
    ],
)
def test_invalid_arguments_are_rejected(loaders: Any, mode: Any, message: str):
    with pytest.raises(DataError, match=message):
        CombinedLoader(loaders, mode)


def test_an_empty_loader_is_reported_with_its_path():
    loader = CombinedLoader({"a": DataLoader(Numbers(2)), "b": DataLoader(Numbers(1), batch_size=2, drop_last=True)})
    with pytest.raises(DataError, match=r"train_dataloaders\['b'\]=.*yields no batches"):
        Source(loader, name="train_dataloaders", seed=0)


def test_samplers_with_a_shared_generator_are_rejected():
    generator = torch.Generator()
    pair = [
        DataLoader(Numbers(4), sampler=RandomSampler(Numbers(4), replacement=True, generator=generator))
        for _ in range(2)
    ]
    with pytest.raises(DataError, match=r"train_dataloaders\[0\]=.*from the same random generator as another loader"):
        Source(CombinedLoader(pair), name="train_dataloaders", seed=0)


@pytest.mark.parametrize(
    "other",
    [
        CombinedLoader({"a": DataLoader(Numbers(4))}, "max_size"),
        CombinedLoader({"a": DataLoader(Numbers(4)), "c": DataLoader(Numbers(4))}),
        CombinedLoader({"a": DataLoader(Numbers(4)), "b": [1, 2]}),
        CombinedLoader({"a": DataLoader(Numbers(5)), "b": DataLoader(Numbers(4))}),
    ],
)
def test_a_position_of_other_loaders_is_rejected(other: CombinedLoader):
    source = Source(
        CombinedLoader({"a": DataLoader(Numbers(4)), "b": DataLoader(Numbers(4))}), name="train_dataloaders", seed=0
    )
    next(source.start(0))
    with pytest.raises(DataError, match="of the saved run"):
        Source(other, name="train_dataloaders", seed=0).check(source.state_dict(), 0)


def test_first_batch_of_several_loaders_has_no_side_effects():
    loaders = {"a": DataLoader(Noisy(4), batch_size=3, shuffle=True), "b": (number for number in range(4))}
    torch.manual_seed(0)
    before = torch.get_rng_state()
    batch, to_read = first_batch(CombinedLoader(loaders, "min_size"), "train_dataloaders")
    assert torch.equal(torch.get_rng_state(), before)
    assert (len(batch["a"]), batch["b"]) == (3, 0)
    assert [plain(each)["b"] for each in Source(to_read, name="train_dataloaders", seed=0).start(0)] == [0, 1]


def test_first_batch_of_sequential_loaders_is_the_largest():
    loader = CombinedLoader([DataLoader(Numbers(9), size) for size in (2, 5, 3)], "sequential")
    batch, _ = first_batch(loader, "train_dataloaders")
    assert batch.shape == (5,)


def test_workers_of_incomplete_passes_are_ended():
    loader = CombinedLoader([DataLoader(Numbers(2)), DataLoader(Numbers(40), num_workers=1)], "min_size")
    source = Source(loader, name="train_dataloaders", seed=0)
    batches = source.start(0)
    assert len(list(batches)) == 2
    import torch.multiprocessing

    assert not torch.multiprocessing.active_children()
