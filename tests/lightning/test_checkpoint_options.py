"""Options of ModelCheckpoint: counters that serve as metrics, missing metrics in names, and weights after an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from roomier import RoomierError, Trainer, checkpoint
from roomier.callbacks import ModelCheckpoint
from tests.lightning.modules import Regression, in_order, pl
from tests.lightning.rows import run_with


@pytest.mark.parametrize(("monitor", "mode"), [("step", "max"), ("step", "min"), ("epoch", "max"), ("epoch", "min")])
def test_counters_rank_checkpoints_as_in_lightning(monitor: str, mode: str, tmp_path: Path) -> None:
    names = []
    for kind, base in ((Trainer, ModelCheckpoint), (pl.Trainer, pl.callbacks.ModelCheckpoint)):
        folder = tmp_path / base.__module__
        saves = base(folder, monitor=monitor, mode=mode, save_top_k=2, filename="{epoch}-{step}")
        keywords: dict[str, Any] = {"max_epochs": 4, "callbacks": [saves], "enable_checkpointing": True}
        run_with(kind, lambda t, m: t.fit(m, in_order(), in_order(2)), Regression, tmp_path, **keywords)
        names.append(sorted(each.name.removesuffix(".ckpt") for each in folder.iterdir()))
        assert Path(saves.best_model_path).name.removesuffix(".ckpt") == names[-1][-1 if mode == "max" else 0]
    assert names[0] == names[1]
    assert len(names[0]) == 2


def test_a_name_with_an_unavailable_metric_produces_one_notice(
    make_trainer: Callable[..., Trainer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saves = ModelCheckpoint(tmp_path / "saves", filename="{epoch}-{nothing:.2f}", save_top_k=-1)
    make_trainer(max_epochs=3, callbacks=[saves], enable_checkpointing=True).fit(Regression(), in_order(), in_order(2))
    assert sorted(each.name for each in (tmp_path / "saves").iterdir()) == [
        f"epoch={epoch}-nothing=none" for epoch in range(3)
    ]
    text = capsys.readouterr().err
    assert text.count("the metric 'nothing' is not available, so names contain 'nothing=none'") == 1


class Fails(Regression):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.fails_at:
            raise ValueError("bad batch")

    fails_at = 3


@pytest.mark.parametrize("base", [ModelCheckpoint, pl.callbacks.ModelCheckpoint])
def test_weights_are_saved_if_an_error_ends_the_fit(
    base: type, make_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    module = Fails()
    saves = base(tmp_path / "saves", save_on_exception=True)
    trainer = make_trainer(max_epochs=1, callbacks=[saves], enable_checkpointing=True)
    with pytest.raises(ValueError, match="bad batch"):
        trainer.fit(module, in_order())
    [saved] = (tmp_path / "saves").iterdir()
    assert saved.name == "on_exception-epoch=0-step=3"
    loaded = checkpoint.load_module(Fails, saved)
    for own, other in zip(loaded.parameters(), module.parameters(), strict=True):
        assert torch.equal(own, other)


def test_nothing_is_saved_after_an_error_without_a_new_step(
    make_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    class FailsFirst(Fails):
        fails_at = 0

    class FailsAfterSave(Fails):
        fails_at = 4

    for module, number in ((FailsFirst(), 0), (FailsAfterSave(), 1)):
        folder = tmp_path / type(module).__name__
        saves = ModelCheckpoint(folder, save_on_exception=True, every_n_train_steps=4)
        with pytest.raises(ValueError, match="bad batch"):
            make_trainer(max_epochs=1, callbacks=[saves], enable_checkpointing=True).fit(module, in_order())
        assert len(list(folder.glob("*"))) == number
        assert not list(folder.glob("on_exception*"))


def test_sharded_parameters_are_rejected(tmp_path: Path) -> None:
    trainer = Trainer(
        accelerator="cpu", strategy="zero3", devices=1, default_root_dir=tmp_path, logger=False,
        enable_progress_bar=False, callbacks=[ModelCheckpoint(save_on_exception=True)],
    )  # fmt: skip
    with pytest.raises(RoomierError, match="no rank can save the shard"):
        trainer.fit(Regression(), in_order())
