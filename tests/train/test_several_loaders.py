"""Fits and evaluations with several loaders: arguments of the steps, lengths, limits and exact resume."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

import roomier
from roomier.callbacks import ModelCheckpoint
from roomier.core.errors import DataError
from roomier.core.tree import tensors
from roomier.data import CombinedLoader
from roomier.data.combined import MODES

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Noisy(Dataset[Tensor]):
    """Sample ``i`` is ``first + i``, with noise from the global generator."""

    def __init__(self, length: int, first: float = 0.0) -> None:
        self.length = length
        self.first = first

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(2) * 0.1 + self.first + index


class Learns(roomier.Module):
    """Module that records the batches of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.3), nn.Linear(4, 1))
        self.read: list[Any] = []

    def training_step(self, batch, batch_idx):
        found = list(tensors(batch))
        self.read.append((self.current_epoch, batch_idx, [each.tolist() for each in found]))
        return sum((self.net(each).square().mean() for each in found), torch.zeros(()))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def loaders(num_workers: int) -> dict[str, Any]:
    return {
        "long": DataLoader(Noisy(24), batch_size=3, shuffle=True, num_workers=num_workers),
        "short": [
            DataLoader(Noisy(7, 100.0), batch_size=1, shuffle=True),
            DataLoader(Noisy(9, 200.0), batch_size=1, sampler=WeightedRandomSampler([1.0] * 9, 8)),
        ],
        "batches": [torch.full((2, 2), float(number)) for number in range(4)],
    }


def train(size: int, strategy: str, mode: Any, num_workers: int, root: Path, max_steps: int, resumes: bool) -> Any:
    roomier.seed_everything(3)
    module = Learns()
    trainer = roomier.Trainer(
        **QUIET,
        max_epochs=2,
        max_steps=max_steps,
        default_root_dir=root,
        callbacks=[ModelCheckpoint(every_n_train_steps=max_steps if max_steps > 0 else 1000)],
        **({"strategy": strategy, "devices": size} if size > 1 else {}),
    )
    trainer.fit(module, CombinedLoader(loaders(num_workers), mode), ckpt_path="last" if resumes else None)
    weights = {name: each.tolist() for name, each in trainer.run.engine.module.state_dict().items() if size == 1}
    return module.read, weights, trainer.num_training_batches


@pytest.mark.parametrize(
    ("mode", "num_batches", "num_workers"),
    [
        ("min_size", 4, 0),
        ("max_size_cycle", 8, 1),
        pytest.param("max_size", 8, 0, marks=pytest.mark.slow),
        pytest.param("max_size_cycle", 8, 0, marks=pytest.mark.slow),
        pytest.param("sequential", 27, 0, marks=pytest.mark.slow),
    ],
)
def test_interrupted_run_resumes_bit_for_bit(tmp_path, mode: str, num_batches: int, num_workers: int):
    read, weights, length = train(1, "single", mode, num_workers, tmp_path / "whole", -1, False)
    assert (length, len(read)) == (num_batches, 2 * num_batches)
    for number, max_steps in enumerate([num_batches, num_batches + 2] if not num_workers else [num_batches + 2]):
        root = tmp_path / str(number)
        before, _, _ = train(1, "single", mode, num_workers, root, max_steps, False)
        after, resumed, _ = train(1, "single", mode, num_workers, root, -1, True)
        assert before + after == read
        assert resumed == weights


@pytest.mark.parametrize(
    ("size", "strategy", "mode", "num_batches"),
    [
        (2, "zero2", "max_size_cycle", 4),
        pytest.param(4, "zero3", "max_size", 2, marks=pytest.mark.slow),
        pytest.param(2, "ddp", "sequential", 13, marks=pytest.mark.slow),
    ],
)
def test_interrupted_ranks_resume_bit_for_bit(on_ranks, tmp_path, size, strategy, mode, num_batches):
    whole = on_ranks(size, train, size, strategy, mode, 0, tmp_path / "whole", -1, False)
    root = tmp_path / "cut"
    before = on_ranks(size, train, size, strategy, mode, 0, root, num_batches + 1, False)
    after = on_ranks(size, train, size, strategy, mode, 0, root, -1, True)
    for (read, _, length), (first, _, _), (rest, _, _) in zip(whole, before, after, strict=True):
        assert length == num_batches
        assert len(read) == 2 * num_batches
        assert first + rest == read
    samples = {tuple(map(tuple, batches[0])) for read, *_ in whole for epoch, _, batches in read if epoch == 0}
    assert len(samples) == size * num_batches  # no batch is read by two ranks


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("limit", [3, 0.5])
def test_limits_equal_lightning(make_trainer, mode: Any, limit: float):
    lightning = pytest.importorskip("lightning.pytorch")
    lengths = {"a": 10, "b": 4}
    wanted = {
        "min_size": {3: 3, 0.5: 2},
        "max_size": {3: 3, 0.5: 5},
        "max_size_cycle": {3: 3, 0.5: 5},
        "sequential": {3: 6, 0.5: 7},
    }
    steps: list[Any] = []

    class Counts(Learns):
        def training_step(self, batch, batch_idx):
            steps.append((batch_idx, [each.tolist() for each in tensors(batch)]))
            return super().training_step(batch, batch_idx)

    def data() -> dict[str, Any]:
        return {name: DataLoader(torch.arange(2.0 * length).reshape(-1, 2)) for name, length in lengths.items()}

    loader = lightning.utilities.CombinedLoader(data(), mode)
    trainer = make_trainer(max_epochs=1, limit_train_batches=limit)
    trainer.fit(Counts(), loader)
    assert trainer.num_training_batches == len(steps) == wanted[mode][limit]
    assert trainer.estimated_stepping_batches == len(steps)
    theirs = lightning.utilities.CombinedLoader(data(), mode)
    theirs.limits = [min(length, limit) if limit > 1 else int(length * limit) for length in lengths.values()]
    batches = [[each.tolist() for each in tensors(batch)] for batch, *_ in theirs][: len(steps)]
    assert steps == list(enumerate(batches))


@pytest.mark.parametrize("form", ["dict", "list", "list of one", "tuple"])
def test_batches_have_the_structure_of_the_loaders(make_trainer, form: str):
    pair = [DataLoader(torch.zeros(2, 2)), DataLoader(torch.ones(3, 2))]
    given: Any = {
        "dict": dict(zip("ab", pair, strict=True)),
        "list": pair,
        "list of one": pair[:1],
        "tuple": tuple(pair),
    }[form]
    forms: list[Any] = []

    class Gives(Learns):
        def train_dataloader(self):
            return given

        def training_step(self, batch, batch_idx):
            forms.append(batch)
            return super().training_step(batch, batch_idx)

    make_trainer(max_epochs=1).fit(Gives())
    assert len(forms) == (2 if form == "list of one" else 3)
    assert all(type(batch) is type(given) and len(batch) == len(given) for batch in forms)
    if form == "dict":
        assert list(forms[0]) == ["a", "b"]


def test_list_of_batches_is_one_loader(make_trainer):
    module = Learns()
    make_trainer(max_epochs=1).fit(module, [torch.zeros(3, 2), torch.ones(1, 2)])
    assert [batches for *_, batches in module.read] == [[[[0.0, 0.0]] * 3], [[[1.0, 1.0]]]]


def test_loader_among_batches_is_named(make_trainer):
    with pytest.raises(DataError, match=r"(?s)train_dataloaders\[1\]=.*is a Tensor, which yields no batches"):
        make_trainer(max_epochs=1).fit(Learns(), [DataLoader(torch.zeros(2, 2)), torch.zeros(2, 2)])


class Measures(roomier.Module):
    """Module that logs its inputs, and records its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)
        self.calls: list[Any] = []

    def validation_step(self, batch, batch_idx, dataloader_idx=None):
        self.calls.append((batch_idx, dataloader_idx, len(list(tensors(batch)))))
        mean = torch.stack([each.mean() for each in tensors(batch)]).mean()
        self.log("mean", mean, batch_size=1)
        if dataloader_idx is not None:
            self.log(f"of_{dataloader_idx}", mean, batch_size=1, add_dataloader_idx=False)

    test_step = validation_step

    def predict_step(self, batch, batch_idx, dataloader_idx=None):
        return (dataloader_idx, batch_idx, float(batch.mean()))


def valued(*lengths: int) -> list[Any]:
    """Return loaders with these numbers of batches: values 0, 1, ... in the first, 10, 11, ... in the second."""
    return [
        DataLoader((10 * number + torch.arange(length)).float().repeat(2, 1).T) for number, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("form", ["list", "dict", "nested", "combined"])
def test_several_loaders_are_evaluated_sequentially(make_trainer, form: str):
    first, second = valued(3, 2)
    given: Any = {
        "list": [first, second],
        "dict": {"x": first, "y": second},
        "nested": {"x": [first, {"z": second}]},
        "combined": CombinedLoader([first, second], "sequential"),
    }[form]
    module, trainer = Measures(), make_trainer()
    results = trainer.validate(module, given, verbose=False)
    assert results == [
        {"mean/dataloader_idx_0": 1.0, "of_0": 1.0},
        {"mean/dataloader_idx_1": 10.5, "of_1": 10.5},
    ]
    assert module.calls == [(0, 0, 1), (1, 0, 1), (2, 0, 1), (0, 1, 1), (1, 1, 1)]
    assert trainer.test(module, given, verbose=False) == results
    assert trainer.predict(module, given) == [
        [(0, 0, 0.0), (0, 1, 1.0), (0, 2, 2.0)],
        [(1, 0, 10.0), (1, 1, 11.0)],
    ]


@pytest.mark.parametrize(("limit", "numbers"), [(1, (1, 1)), (0.5, (2, 1)), (3, (3, 2)), (1.0, (4, 2))])
def test_each_loader_of_an_evaluation_is_limited(make_trainer, limit: float, numbers: tuple[int, int]):
    module = Measures()
    trainer = make_trainer(limit_val_batches=limit)
    trainer.validate(module, valued(4, 2), verbose=False)
    assert tuple(sum(call[1] == index for call in module.calls) for index in range(2)) == numbers


@pytest.mark.parametrize(
    ("mode", "calls", "mean"),
    [
        ("min_size", [(0, None, 2), (1, None, 2)], 5.5),
        ("max_size", [(0, None, 2), (1, None, 2), (2, None, 1)], (5.0 + 6.0 + 2.0) / 3),
        ("max_size_cycle", [(0, None, 2), (1, None, 2), (2, None, 2)], (5.0 + 6.0 + 6.0) / 3),
    ],
)
def test_combined_loaders_are_evaluated_together(make_trainer, on_ranks, mode: Any, calls, mean: float):
    module = Measures()
    loader = CombinedLoader(dict(zip("ab", valued(3, 2), strict=True)), mode)
    assert make_trainer().validate(module, loader, verbose=False) == [{"mean": pytest.approx(mean)}]
    assert module.calls == calls
    assert on_ranks(2, measured_together, mode) == [pytest.approx(mean)] * 2
    with pytest.raises(DataError, match=r"predict_dataloaders=.*predict supports one loader per batch"):
        make_trainer().predict(module, loader)


def measured_together(mode: Any) -> float:
    loader = CombinedLoader(dict(zip("ab", valued(3, 2), strict=True)), mode)
    trainer = roomier.Trainer(**QUIET, strategy="ddp", devices=2, enable_checkpointing=False)
    return trainer.validate(Measures(), loader, verbose=False)[0]["mean"]


def test_micro_batch_of_several_loaders_is_not_split(make_trainer):
    """The planner keeps micro-batches as the loaders yield them."""
    pair = {"a": DataLoader(torch.zeros(4, 2), batch_size=2), "b": DataLoader(torch.ones(3, 2))}
    module = Learns()
    trainer = make_trainer(strategy="auto", max_epochs=1, memory_budget="2GB")
    trainer.fit(module, pair)
    assert [[len(each) for each in batches] for *_, batches in module.read] == [[2, 1], [2, 1], [2, 1]]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", [None, "min_size", "max_size"])
def test_lightning_module_with_several_loaders_trains_as_in_lightning(make_trainer, mode: Any):
    lightning = pytest.importorskip("lightning.pytorch")

    class Both(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 1)
            self.calls: list[Any] = []

        def loader(self, length: int, seed: int) -> DataLoader[Any]:
            return DataLoader(torch.rand(length, 2, generator=torch.Generator().manual_seed(seed)), batch_size=2)

        def train_dataloader(self):
            pair = {"a": self.loader(9, 1), "b": [self.loader(5, 2)]}
            return pair if mode is None else lightning.utilities.CombinedLoader(pair, mode)

        def val_dataloader(self):
            return [self.loader(5, 3), self.loader(3, 4)]

        def training_step(self, batch, batch_idx):
            loss = sum(self.net(each).square().mean() for each in tensors(batch))
            self.calls.append((batch_idx, -1, float(loss.detach())))
            return loss

        def validation_step(self, batch, batch_idx, dataloader_idx):
            loss = self.net(batch).square().mean()
            self.calls.append((batch_idx, dataloader_idx, float(loss)))
            self.log("loss", loss)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    found = []
    options: Any = {"max_epochs": 2, "enable_checkpointing": False, **QUIET}
    for trainer in (lightning.Trainer(**options), make_trainer(max_epochs=2)):
        torch.manual_seed(0)
        module = Both()
        trainer.fit(module)
        results = trainer.validate(module, verbose=False)
        found.append((module.calls, results, trainer.num_training_batches))
    (their_calls, theirs, their_length), (calls, ours, length) = found
    assert [call[:2] for call in calls] == [call[:2] for call in their_calls]
    assert [call[2] for call in calls] == pytest.approx([call[2] for call in their_calls], abs=1e-6)
    assert ours == [pytest.approx(each, abs=1e-6) for each in theirs]
    assert length == their_length
