"""A fit after a search equals a fit without a search bit for bit: weights, states, order of the data, random numbers,
logs."""

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

import roomier
from roomier.callbacks import LearningRateMonitor
from roomier.core.device.rng import rng_state
from roomier.tuner import lr_find, scale_batch_size
from tests.covering import few
from tests.tuner.conftest import Named, Net, shuffled


class Draws(Dataset):
    """Samples with noise from a generator of the dataset and from the global generators."""

    def __init__(self) -> None:
        self.generator = random.Random(4)
        self.num_read = 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.num_read += 1
        x = torch.full((8,), self.generator.random()) + torch.rand(8)
        return x, x[:1]


class Data(roomier.DataModule):
    """DataModule that splits once with global random numbers, and stores its loader."""

    def __init__(self) -> None:
        super().__init__()
        self.train: Any = None

    def setup(self, stage: str) -> None:
        if self.train is None:
            whole = shuffled().dataset
            self.train, _ = random_split(whole, [192, 64])
            self.loader = DataLoader(self.train, batch_size=16, shuffle=True)

    def train_dataloader(self) -> DataLoader:
        return self.loader


class OwnLoader(Net):
    """Module that stores its loader in an attribute, with a separate generator."""

    def __init__(self) -> None:
        super().__init__()
        self.loader = shuffled(generator=torch.Generator().manual_seed(9))

    def train_dataloader(self) -> DataLoader:
        return self.loader


class Once(Dataset):
    def __init__(self) -> None:
        self.rows = iter(range(10))

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return next(self.rows)


Case = Callable[[], tuple[roomier.Module, dict[str, Any]]]
CASES: dict[str, Case] = {
    "shuffle": lambda: (Net(), {"train_dataloaders": shuffled()}),
    "generator": lambda: (Net(), {"train_dataloaders": shuffled(generator=torch.Generator().manual_seed(2))}),
    "workers": lambda: (Net(), {"train_dataloaders": shuffled(num_workers=1)}),
    "own draws": lambda: (Net(), {"train_dataloaders": DataLoader(Draws(), batch_size=8, shuffle=True)}),
    "data module": lambda: (Net(), {"datamodule": Data()}),
    "own loader": lambda: (OwnLoader(), {}),
    "list": lambda: (Net(), {"train_dataloaders": list(shuffled())}),
    "two loaders": lambda: (Pair(), {"train_dataloaders": {"a": shuffled(), "b": shuffled(32)}}),
}
SLOW = ("generator", "list", "own loader")


class Pair(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch["a"], batch_idx) + super().training_step(batch["b"], batch_idx)


def left_behind(trainer: roomier.Trainer, module: Net) -> dict[str, Any]:
    return {
        "weights": {name: each.clone() for name, each in module.state_dict().items()},
        "seen": list(module.seen),
        "optimizer": copy.deepcopy(trainer.optimizers[0].state_dict()),
        "random": rng_state(),
        "rows": [{**row, "time": None} for row in log_of(trainer)],
        "files": sorted(str(path.relative_to(trainer.default_root_dir)) for path in root_of(trainer).rglob("*")),
    }


def root_of(trainer: roomier.Trainer) -> Path:
    return Path(trainer.default_root_dir)


def log_of(trainer: roomier.Trainer) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(trainer.log_dir) / "metrics.jsonl").read_text().splitlines()]


def fitted(tmp_path: Path, case: Case, search: Callable[..., Any] | None) -> dict[str, Any]:
    roomier.seed_everything(11)
    module, data = case()
    trainer = roomier.Trainer(
        accelerator="cpu",
        default_root_dir=tmp_path,
        max_epochs=2,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[LearningRateMonitor()],
    )
    if search is not None:
        before, parts = dict(vars(trainer)), vars(module).copy()
        search(trainer, module, data.get("train_dataloaders"), datamodule=data.get("datamodule"))
        now = vars(trainer)
        assert {name for name in before | now if before.get(name) is not now.get(name)} <= {"ranks", "micro_batch"}
        assert vars(module).keys() == parts.keys()
        assert module.seen == []
        trainer.micro_batch = None
        assert not tmp_path.exists()
    trainer.fit(module, **data)
    return left_behind(trainer, module)


def assert_same(one: Any, other: Any, where: str = "") -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for name in one:
            assert_same(one[name], other[name], f"{where}.{name}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_same(left, right, f"{where}[{index}]")
    else:
        assert one == other, where


def rates(trainer: roomier.Trainer, *arguments: Any, **keywords: Any) -> None:
    curve = lr_find(trainer, *arguments, num_training=12, min_lr=1e-4, **keywords)
    assert len(curve.losses) > 8


def sizes(trainer: roomier.Trainer, *arguments: Any, **keywords: Any) -> None:
    plan = trainer.requested_plan
    assert scale_batch_size(trainer, *arguments, memory_budget="1GiB", **keywords)
    trainer.plan = trainer.requested_plan = plan


@pytest.mark.parametrize(
    "name", few([pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES], 2)
)
def test_after_a_search_for_a_rate(tmp_path: Path, name: str) -> None:
    without = fitted(tmp_path / "without", CASES[name], None)
    assert_same(fitted(tmp_path / "with", CASES[name], rates), without)


@pytest.mark.parametrize(
    "name", ["data module", *(pytest.param(name, marks=pytest.mark.slow) for name in ("shuffle", "own draws"))]
)
def test_after_a_search_for_a_batch_size(tmp_path: Path, name: str) -> None:
    without = fitted(tmp_path / "without", CASES[name], None)
    assert_same(fitted(tmp_path / "with", CASES[name], sizes), without)


def test_fit_with_a_rate_search_equals_a_fit_with_the_found_rate(tmp_path: Path, make_trainer) -> None:
    def fit(lr: float, **keywords: Any) -> tuple[Net, float]:
        roomier.seed_everything(2)
        module = Net(lr)
        make_trainer(max_steps=20, **keywords).fit(module, shuffled())
        return module, module.lr

    module, found = fit(1e-3, auto_lr_find=True)
    assert found != 1e-3
    assert module.hparams["lr"] == found
    assert_same(dict(module.state_dict()), dict(fit(found)[0].state_dict()))


def test_rate_search_with_an_optimizer_of_the_trainer(make_trainer) -> None:
    def fit(lr: float, **keywords: Any) -> tuple[Named, float]:
        roomier.seed_everything(2)
        module = Named()
        trainer = make_trainer(max_steps=20, optimizer="sgd", learning_rate=lr, lr_schedule="cosine", **keywords)
        trainer.fit(module, shuffled())
        return module, trainer.plan.optimizer.lr

    module, found = fit(1e-3, auto_lr_find=True)
    assert found != 1e-3
    assert_same(dict(module.state_dict()), dict(fit(found)[0].state_dict()))


def test_fit_with_a_batch_size_search_equals_a_fit_with_the_found_size(make_trainer) -> None:
    def fit(batch_size: int, **keywords: Any) -> tuple[Net, roomier.Trainer]:
        roomier.seed_everything(2)
        module = Net(width=256)
        trainer = make_trainer(max_steps=6, **keywords)
        trainer.fit(module, shuffled(batch_size))
        return module, trainer

    module, trainer = fit(64, auto_scale_batch_size=True, memory_budget="1MiB", accumulate_grad_batches=2)
    size, accumulate = trainer.micro_batch, trainer.accumulate_grad_batches
    assert size * accumulate == 128
    assert size != 64
    assert_same(dict(module.state_dict()), dict(fit(size, accumulate_grad_batches=accumulate)[0].state_dict()))


def test_data_that_can_be_read_only_once_is_rejected(make_trainer) -> None:
    trainer = make_trainer(max_steps=2)
    with pytest.raises(roomier.RoomierError, match="can be iterated only once"):
        lr_find(trainer, Net(), iter(list(shuffled())))
    with pytest.raises(roomier.RoomierError, match=r"Once\.rows"):
        lr_find(trainer, Net(), DataLoader(Once(), batch_size=2))


def test_model_that_cannot_be_copied_is_rejected(make_trainer) -> None:
    net = Net()
    net.lock = (each for each in ())
    with pytest.raises(roomier.RoomierError, match=r"Net.*cannot be copied"):
        lr_find(make_trainer(max_steps=2), net, shuffled())


def test_dataset_is_not_copied(make_trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorDataset, "__deepcopy__", lambda *_: pytest.fail("copied"), raising=False)
    net = Net()
    net.data = shuffled().dataset
    lr_find(make_trainer(max_steps=2), net, shuffled(), num_training=2)
