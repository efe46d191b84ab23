"""Attributes of Lightning's Trainer that projects read: loops, precision, accelerator, progress bars, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from roomier import RoomierError, Trainer
from roomier.callbacks import ProgressBar
from tests.lightning.both import quiet_lightning
from tests.lightning.modules import Regression, in_order, pl
from tests.lightning.rows import run_with

pytestmark = pytest.mark.more


def loop_values(trainer: Any) -> dict[str, Any]:
    loop = trainer.fit_loop
    return {
        "max_epochs": loop.max_epochs,
        "min_epochs": loop.min_epochs,
        "max_batches": loop.max_batches,
        "global_step": loop.epoch_loop.global_step,
        "batch_idx": loop.epoch_loop.batch_idx,
        "total_batch_idx": loop.epoch_loop.total_batch_idx,
        "of_fit_loop": (loop.batch_idx, loop.total_batch_idx),
        "ready": loop.epoch_loop.batch_progress.current.ready,
        "total_ready": loop.epoch_loop.batch_progress.total.ready,
        "epochs": loop.epoch_progress.current.ready,
        "epochs_completed": loop.epoch_progress.current.completed,
        "precision": trainer.precision_plugin.precision,
        "accelerator": type(trainer.accelerator),
        "scaler": getattr(trainer.precision_plugin, "scaler", None),
    }


class Looks(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.seen.append(("start", loop_values(trainer)))

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.seen.append(("end", loop_values(trainer)))


def test_loop_attributes_equal_lightnings(tmp_path: Path) -> None:
    seen = []
    for kind in (Trainer, pl.Trainer):
        looks = Looks()
        run_with(kind, lambda t, m: t.fit(m, in_order(4)), Regression, tmp_path, callbacks=[looks], min_epochs=1)
        seen.append(looks.seen)
    assert len(seen[0]) == 2 * 2 * 4
    assert seen[0] == seen[1]


def test_the_number_of_epochs_can_be_set_through_the_loop(make_trainer: Callable[..., Trainer]) -> None:
    trainer = make_trainer(max_epochs=1)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(Regression(), in_order(2))
    assert (trainer.max_epochs, trainer.current_epoch) == (3, 3)
    with pytest.raises(AttributeError, match="cannot be set"):
        trainer.fit_loop.epoch_progress = 3
    with pytest.raises(RoomierError, match="max_epochs"):
        trainer.fit_loop.max_epochs = "many"


@pytest.mark.parametrize(("precision", "dtype"), [("32-true", torch.float32), ("bf16-true", torch.bfloat16)])
@pytest.mark.parametrize("is_empty", [None, True])
def test_init_module_uses_the_device_and_the_dtype(
    precision: str, dtype: torch.dtype, is_empty: bool | None, make_trainer: Callable[..., Trainer]
) -> None:
    trainer, layers = make_trainer(precision=precision), []
    peer = pl.Trainer(accelerator="cpu", precision=precision, logger=False)
    for each in (trainer, peer):
        torch.manual_seed(1)
        with each.init_module(empty_init=is_empty):
            layers.append(nn.Linear(4, 4))
        drawn = torch.rand(1)
        assert torch.get_default_dtype() is torch.float32
        layers[-1].drawn = drawn
    assert {each.weight.dtype for each in layers} == {dtype}
    assert torch.equal(layers[0].drawn, layers[1].drawn)  # both draw, or skip, the same numbers
    if not is_empty:
        assert torch.equal(layers[0].weight, layers[1].weight)
    x = torch.ones(2, 4)
    assert trainer.precision_plugin.convert_input(x).dtype == peer.precision_plugin.convert_input(x).dtype
    with trainer.precision_plugin.forward_context():
        assert torch.get_default_dtype() is dtype


def test_keys_that_projects_read_in_on_save_checkpoint(tmp_path: Path) -> None:
    class Reads(Regression):
        def on_save_checkpoint(self, checkpoint: Any) -> None:
            names = ("epoch", "global_step", "state_dict", "optimizer_states", "lr_schedulers", "loops", "callbacks")
            assert all(name in checkpoint for name in (*names, "pytorch-lightning_version"))
            self.found = {
                "epoch": checkpoint["epoch"],
                "global_step": checkpoint["global_step"],
                "names": sorted(checkpoint["state_dict"]),
                "rates": [each["param_groups"][0]["lr"] for each in checkpoint["optimizer_states"]],
                "last_epochs": [each["last_epoch"] for each in checkpoint["lr_schedulers"]],
                "ready": checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["ready"],
                "version": checkpoint["pytorch-lightning_version"].split(".")[0],
            }
            checkpoint["own"] = 1

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    found = []
    for kind in (Trainer, pl.Trainer):
        module = Reads()

        def call(trainer: Any, module: Any, name: str = kind.__module__) -> None:
            trainer.fit(module, in_order(4))
            trainer.save_checkpoint(tmp_path / name)

        run_with(kind, call, lambda: module, tmp_path)  # noqa: B023
        found.append(module.found)
    assert found[0] == found[1]


class OwnMetrics(pl.callbacks.TQDMProgressBar):
    def get_metrics(self, trainer: Any, pl_module: Any) -> Any:
        return {**super().get_metrics(trainer, pl_module), "own": 7.0}


class OwnBar(ProgressBar):
    def get_metrics(self, trainer: Any, pl_module: Any) -> Any:
        return {**super().get_metrics(trainer, pl_module), "own": 7.0}


@pytest.mark.parametrize("kind", [OwnMetrics, OwnBar])
def test_metrics_of_a_progress_bar_are_shown(kind: type, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keywords: dict[str, Any] = {"enable_progress_bar": True, "callbacks": [kind()], "log_every_n_steps": 1}
    trainer, _, _ = run_with(Trainer, lambda t, m: t.fit(m, in_order(3), in_order(2)), Regression, tmp_path, **keywords)
    text = capsys.readouterr().err
    assert "own" in text
    assert "get_metrics are not called" not in text
    bar = trainer.progress_bar_callback
    assert bar.get_metrics(trainer, trainer.lightning_module)["own"] == 7.0


def test_numbers_of_batches_of_progress_bars_equal_lightnings(tmp_path: Path) -> None:
    class Reads(pl.Callback):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            bar = trainer.progress_bar_callback
            names = sorted(bar.get_metrics(trainer, pl_module).keys() - {"v_num"})
            self.seen.append((bar.total_train_batches, bar.total_val_batches, names))

    seen = []
    for kind in (Trainer, pl.Trainer):
        reads = Reads()
        keywords: dict[str, Any] = {"enable_progress_bar": True, "callbacks": [reads], "max_epochs": 3}
        keywords.update(check_val_every_n_epoch=2, num_sanity_val_steps=0)
        with quiet_lightning():
            run_with(kind, lambda t, m: t.fit(m, in_order(3), in_order(2)), Regression, tmp_path, **keywords)
        seen.append(reads.seen)
    # Lightning does not know the number of validation batches before the first validation.
    assert [(each[0], each[2]) for each in seen[0]] == [(each[0], each[2]) for each in seen[1]]
    assert [each[:2] for each in seen[0]] == [(3, 0), (3, 2), (3, 0)]
    assert ProgressBar().total_val_batches == 0
