"""Lightning can load files of ``export_lightning`` and resume from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from roomier import Trainer
from roomier.callbacks import EarlyStopping, ModelCheckpoint
from roomier.checkpoint.export.lightning_file import export_lightning
from roomier.checkpoint.lightning import LightningFile
from roomier.core.errors import CheckpointError, RoomierError
from tests.checkpoint.lightning_runs import OwnModule, fit_in_lightning, lightning_module, loader
from tests.ranks.pool import RankPool

TOLERANCE = 1e-6


def saved(folder: Path, make_trainer: Callable[..., Trainer], *callbacks: Any, **arguments: Any) -> Path:
    torch.manual_seed(3)
    trainer = make_trainer(max_epochs=2, callbacks=list(callbacks), enable_checkpointing=bool(callbacks))
    trainer.fit(OwnModule(**arguments), loader(), loader())
    trainer.save_checkpoint(folder / "own")
    return folder / "own"


@pytest.mark.parametrize("kind", ["each epoch", "each step", "sgd"])
def test_lightning_resumes_with_the_losses_of_roomier(
    tmp_path: Path, make_trainer: Callable[..., Trainer], kind: str
) -> None:
    path = saved(tmp_path, make_trainer, kind=kind)
    written = export_lightning(path, tmp_path / "out.ckpt")
    own, reference = OwnModule(kind=kind), lightning_module(kind=kind)

    make_trainer(max_epochs=4).fit(own, loader(), loader(), ckpt_path=path)
    fit_in_lightning(reference, 4, ckpt_path=written)

    assert len(own.losses) == 12
    assert reference.losses == pytest.approx(own.losses, abs=TOLERANCE)
    assert (reference.trainer.current_epoch, reference.trainer.global_step) == (4, 24)


def test_lightning_loads_the_module(tmp_path: Path, make_trainer: Callable[..., Trainer]) -> None:
    written = export_lightning(saved(tmp_path, make_trainer, width=5, lr=0.25), tmp_path / "out.ckpt")

    loaded = type(lightning_module()).load_from_checkpoint(written, weights_only=True)

    assert (loaded.lr, loaded.net[0].out_features) == (0.25, 5)
    for name, expected in LightningFile(written).state_dict.items():
        assert torch.equal(loaded.state_dict()[name], expected), name


def test_early_stopping_of_lightning_restores_the_best_score(
    tmp_path: Path, make_trainer: Callable[..., Trainer]
) -> None:
    import lightning.pytorch.callbacks as reference

    own, reached = EarlyStopping("val", patience=7), reference.EarlyStopping("val", patience=3)
    books = ModelCheckpoint(dirpath=tmp_path / "kept", monitor="val")
    written = export_lightning(saved(tmp_path, make_trainer, own, books), tmp_path / "out.ckpt")

    fit_in_lightning(lightning_module(), 2, ckpt_path=written, callbacks=[reached])

    assert float(reached.best_score) == pytest.approx(float(own.best_score))
    assert not any(key.startswith("ModelCheckpoint") for key in LightningFile(written).content["callbacks"])


@pytest.mark.more
def test_file_converted_twice_resumes_identically(tmp_path: Path, make_trainer: Callable[..., Trainer]) -> None:
    path = saved(tmp_path, make_trainer)
    written = export_lightning(path, tmp_path / "out.ckpt")
    runs = []

    for each in (path, written):
        runs.append(OwnModule())
        make_trainer(max_epochs=4).fit(runs[-1], loader(), loader(), ckpt_path=each)

    assert runs[0].losses == runs[1].losses


def test_progress_within_an_epoch_equals_lightnings(tmp_path: Path, make_trainer: Callable[..., Trainer]) -> None:
    torch.manual_seed(3)
    trainer = make_trainer(max_steps=8)
    trainer.fit(OwnModule(), loader())
    trainer.save_checkpoint(tmp_path / "own")

    written = LightningFile(export_lightning(tmp_path / "own", tmp_path / "out.ckpt"))

    position = written.position()
    assert (position.epoch, position.batch_idx, position.num_batches, position.global_step) == (1, 2, 8, 8)
    reference = lightning_module()
    fit_in_lightning(reference, 2, ckpt_path=written.path)
    assert len(reference.losses) == 4


def trained_on_ranks(path: Path) -> None:
    torch.manual_seed(3)
    quiet: dict[str, Any] = dict.fromkeys(
        ("enable_progress_bar", "enable_model_summary", "logger", "enable_checkpointing"), False
    )
    trainer = Trainer(strategy="zero3", devices=2, accelerator="cpu", max_epochs=1, **quiet)
    trainer.fit(OwnModule(), loader(2))
    trainer.save_checkpoint(path)


@pytest.mark.more
def test_checkpoint_of_two_ranks_is_unsharded(
    tmp_path: Path, on_ranks: RankPool, make_trainer: Callable[..., Trainer]
) -> None:
    on_ranks(2, trained_on_ranks, tmp_path / "own")
    written = export_lightning(tmp_path / "own", tmp_path / "out.ckpt")
    own, reference = OwnModule(), lightning_module()

    make_trainer(max_epochs=2).fit(own, loader(), ckpt_path=tmp_path / "own")
    fit_in_lightning(reference, 2, ckpt_path=written)

    assert reference.losses == pytest.approx(own.losses, abs=TOLERANCE)


def test_only_weights_are_exported_if_lightning_does_not_support_the_optimizer(
    tmp_path: Path, make_trainer: Callable[..., Trainer], capsys: pytest.CaptureFixture[str]
) -> None:
    class Named(OwnModule):
        def configure_optimizers(self) -> Any:
            return None

    trainer = make_trainer(max_steps=1, optimizer="adamw", learning_rate=0.1)
    trainer.fit(Named(), loader())
    trainer.save_checkpoint(tmp_path / "own")

    written = LightningFile(export_lightning(tmp_path / "own", tmp_path / "out.ckpt"))

    assert "was created by the Trainer" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match=r"saved only the weights"):
        written.position()


def test_existing_file_is_kept_and_no_temporary_file_remains(
    tmp_path: Path, make_trainer: Callable[..., Trainer]
) -> None:
    path = saved(tmp_path, make_trainer)
    (tmp_path / "out.ckpt").write_text("mine")

    with pytest.raises(RoomierError, match=r"output=.*already exists"):
        export_lightning(path, tmp_path / "out.ckpt")
    with pytest.raises(CheckpointError):
        export_lightning(tmp_path / "nothing", tmp_path / "other.ckpt")

    assert (tmp_path / "out.ckpt").read_text() == "mine"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out.ckpt", "own"]
