"""In every hook of a LightningModule's fit, the random state and the epochs of the samplers are the same with both
Trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, TensorDataset

from roomier import Trainer
from tests.lightning.both import make_trainer, quiet_lightning
from tests.lightning.modules import pl

pytestmark = pytest.mark.more

NUM_SAMPLES = 12
HOOKS = (
    *("fit_start", "fit_end", "sanity_check_start", "sanity_check_end"),
    *(f"train_{moment}" for moment in ("start", "end", "epoch_start", "epoch_end", "batch_start", "batch_end")),
    *(f"{stage}_{moment}" for stage in ("validation", "test", "predict") for moment in ("start", "batch_start", "end")),
)


def random_state() -> int:
    return hash(torch.get_rng_state().numpy().tobytes())


class Records(pl.Callback):
    """Callback that records the random state in each hook, and draws in the hooks before the first batch."""

    def __init__(self) -> None:
        self.seen: list[Any] = []


def _recorder(name: str) -> Any:
    def hook(self: Records, trainer: Any, *_: Any, **__: Any) -> None:
        self.seen.append((name, trainer.current_epoch, random_state()))
        if name in ("train_start", "train_epoch_start", "validation_start"):
            torch.rand(3)  # such as a weight that the hook initializes

    return hook


for _name in HOOKS:
    setattr(Records, f"on_{_name}", _recorder(_name))


class EpochSampler(SequentialSampler):
    """Sampler that records the epochs it receives."""

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class DrawsAtFirstRead(SequentialSampler):
    def __iter__(self) -> Any:
        yield from torch.randperm(NUM_SAMPLES).tolist()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from torch.rand(NUM_SAMPLES, 1, 4)


class Draws(pl.LightningModule):
    def __init__(self, **of_loader: Any) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)
        self.data = TensorDataset(torch.randn(NUM_SAMPLES, 4))
        self.of_loader = of_loader
        self.sampler = EpochSampler(self.data)
        self.sums: list[float] = []

    def step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.sums.append(float(batch[0].sum()))
        return nn.functional.dropout(self.net(batch[0]), 0.5, training=True).mean()

    training_step = validation_step = test_step = predict_step = step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        given = dict(self.of_loader)
        if kind := given.pop("sampler", None):
            given["sampler"] = kind(self.data)
        if stream := given.pop("stream", None):
            return DataLoader(stream(), batch_size=3)
        return DataLoader(self.data, batch_size=3, shuffle=kind is None, **given)

    def val_dataloader(self) -> Any:
        return [
            DataLoader(self.data, batch_size=4, sampler=self.sampler),
            DataLoader(self.data, batch_size=4, shuffle=True),
        ]

    test_dataloader = predict_dataloader = val_dataloader


WORKERS = {"num_workers": 1}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "without a sanity check": ({}, {"num_sanity_val_steps": 0}),
    "workers": (WORKERS, {}),
    "persistent workers": ({**WORKERS, "persistent_workers": True}, {}),
    "own order": ({"sampler": DrawsAtFirstRead}, {}),
    "part of an epoch": ({}, {"limit_train_batches": 2, "check_val_every_n_epoch": 2}),
    "validation within epochs": ({}, {"val_check_interval": 2}),
    "accumulation": ({}, {"accumulate_grad_batches": 2}),
    "the same batches": ({}, {"overfit_batches": 2}),
    "reload": ({}, {"reload_dataloaders_every_n_epochs": 1}),
    "reload every second epoch": ({}, {"reload_dataloaders_every_n_epochs": 2}),
    "reload with workers": (WORKERS, {"reload_dataloaders_every_n_epochs": 1}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_random_states_of_all_hooks_are_equal(name: str, tmp_path: Path) -> None:
    of_loader, keywords = CASES[name]
    runs = []
    for kind in (pl.Trainer, Trainer):
        torch.manual_seed(3)
        module, records = Draws(**of_loader), Records()
        trainer = make_trainer(kind, tmp_path, max_epochs=3, callbacks=[records], **keywords)
        with quiet_lightning():
            trainer.fit(module)
            trainer.validate(module, verbose=False)
            trainer.test(module, verbose=False)
            trainer.predict(module)
        runs.append((records.seen, module.sums, [each for each in module.sampler.epochs if each]))
    (seen, sums, epochs), (own_seen, own_sums, own_epochs) = runs
    assert own_seen == seen
    assert own_sums == pytest.approx(sums)
    if "overfit_batches" not in keywords:  # Lightning replaces the samplers of all loaders if one loader is shuffled
        assert own_epochs == epochs
    assert len({state for *_, state in seen}) > len(seen) / 3


@pytest.mark.parametrize("of_loader", [{"sampler": DrawsAtFirstRead}, {"stream": Stream}, {}], ids=str)
@pytest.mark.parametrize("stops_at", [2, 6])
def test_a_run_resumes_exactly_if_hooks_draw_before_the_first_batch(
    of_loader: dict[str, Any], stops_at: int, tmp_path: Path
) -> None:
    def fit(path: Any = None, **keywords: Any) -> tuple[Any, Draws]:
        torch.manual_seed(3)
        module = Draws(**of_loader)
        trainer = make_trainer(Trainer, tmp_path, callbacks=[Records()], limit_val_batches=0, **keywords)
        trainer.fit(module, ckpt_path=path)
        return trainer, module

    whole, first = fit(max_epochs=3)[1], fit(max_steps=stops_at)
    first[0].save_checkpoint(tmp_path / "saved")
    rest = fit(tmp_path / "saved", max_epochs=3)[1]
    assert first[1].sums + rest.sums == whole.sums
    assert len(set(whole.sums)) == len(whole.sums) == 12
    assert torch.equal(rest.net.weight, whole.net.weight)
