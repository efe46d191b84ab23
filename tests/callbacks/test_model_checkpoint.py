"""ModelCheckpoint in real runs of ten steps per epoch: saved steps, names, and kept checkpoints."""

import math
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from roomier import checkpoint
from roomier.api.callback import Callback
from roomier.callbacks import ModelCheckpoint
from roomier.core.errors import CheckpointError, RoomierError
from roomier.trainer import Trainer

Make = Callable[..., Trainer]


def names(folder: str | Path | None) -> list[str]:
    """Return the checkpoints in ``folder`` in the order of their steps, after checking that each is complete."""
    assert folder is not None
    found = [path for path in Path(folder).iterdir() if path.is_dir() and not path.is_symlink()]
    for path in found:
        checkpoint.verify(path)
    return sorted((path.name for path in found), key=lambda name: (int(name.split("step=")[-1].split("-")[0]), name))


class Spy(Callback):
    """Callback that records the state of ``saver`` after each save point."""

    def __init__(self, saver: ModelCheckpoint) -> None:
        self.saver = saver
        self.states: dict[int, dict[str, Any]] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.states[trainer.global_step] = self.saver.state_dict()


# When it saves ------------------------------------------------------------------------------------------------------


def test_newest_epoch_is_kept_by_default(make_trainer: Make, scripted: Any, batches: Any) -> None:
    saver = ModelCheckpoint()
    trainer = make_trainer(saver, max_epochs=3)
    trainer.fit(scripted(), batches)
    assert saver.dirpath == os.path.join(os.path.abspath(trainer.log_dir), "checkpoints")
    assert names(saver.dirpath) == ["epoch=2-step=30"]
    assert saver.best_model_path == os.path.join(saver.dirpath, "epoch=2-step=30")
    assert (saver.best_model_score, saver.best_k_models, saver.kth_best_model_path) == (None, {}, "")
    assert saver.last_model_path == ""


def test_unavailable_metric_in_the_name_is_reported(
    make_trainer: Make, scripted: Any, batches: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    saver = ModelCheckpoint(filename="{val_los:.2f}-{step}")
    make_trainer(saver, max_epochs=1).fit(scripted(), batches, batches[:1])
    assert names(saver.dirpath) == ["val_los=none-step=10"]
    assert "'val_los' is not available, so names contain 'val_los=none'. Did you mean 'val_loss'?" in (
        capsys.readouterr().err
    )


def test_metric_in_the_name_is_none_before_the_first_validation(
    make_trainer: Make, scripted: Any, batches: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    saver = ModelCheckpoint(filename="{val_loss:.1f}-{step}", every_n_train_steps=4, save_top_k=-1)
    make_trainer(saver, max_steps=12).fit(scripted([3.0]), batches, batches[:1])
    assert names(saver.dirpath) == ["val_loss=none-step=4", "val_loss=none-step=8", "val_loss=3.0-step=12"]
    assert capsys.readouterr().err.count("so names contain 'val_loss=none'") == 1


def test_best_two_of_five_epochs_are_kept(make_trainer: Make, scripted: Any, batches: Any) -> None:
    saver = ModelCheckpoint(monitor="val_loss", save_top_k=2, filename="{epoch}-{val_loss:.1f}-{step}")
    make_trainer(saver, max_epochs=5).fit(scripted([3.0, 5.0, 4.0, 4.0, 1.0]), batches, batches[:1])
    assert names(saver.dirpath) == ["epoch=0-val_loss=3.0-step=10", "epoch=4-val_loss=1.0-step=50"]
    assert os.path.basename(saver.best_model_path) == "epoch=4-val_loss=1.0-step=50"
    assert os.path.basename(saver.kth_best_model_path) == "epoch=0-val_loss=3.0-step=10"
    assert saver.best_model_score == torch.tensor(1.0)
    assert saver.kth_value == torch.tensor(3.0)
    assert saver.current_score == torch.tensor(1.0)
    assert [score.item() for score in saver.best_k_models.values()] == [3.0, 1.0]


def test_mode_max_keeps_the_largest_value(make_trainer: Make, scripted: Any, batches: Any) -> None:
    saver = ModelCheckpoint(monitor="val_loss", mode="max")
    make_trainer(saver, max_epochs=4).fit(scripted([3.0, 5.0, 5.0, 4.0]), batches, batches[:1])
    assert names(saver.dirpath) == ["epoch=1-step=20"]


def test_save_last_keeps_and_links_the_newest(make_trainer: Make, scripted: Any, batches: Any) -> None:
    saver = ModelCheckpoint(monitor="val_loss", save_last=True)
    make_trainer(saver, max_epochs=4).fit(scripted([3.0, 1.0, 2.0, 4.0]), batches, batches[:1])
    assert saver.dirpath is not None
    assert names(saver.dirpath) == ["epoch=1-step=20", "epoch=3-step=40"]
    assert os.readlink(os.path.join(saver.dirpath, "last")) == "epoch=3-step=40", (
        "the link is relative, so the folder can be moved"
    )
    assert saver.last_model_path == os.path.join(saver.dirpath, "last")
    assert os.path.basename(saver.best_model_path) == "epoch=1-step=20"


def test_every_n_train_steps_with_all_kept(make_trainer: Make, scripted: Any, batches: Any) -> None:
    saver = ModelCheckpoint(every_n_train_steps=4, save_top_k=-1)
    make_trainer(saver, max_epochs=2, accumulate_grad_batches=1).fit(scripted(), batches)
    assert names(saver.dirpath) == [
        *("epoch=0-step=4", "epoch=0-step=8"),
        *("epoch=1-step=12", "epoch=1-step=16", "epoch=1-step=20"),  # 20 is the last step of epoch 1
    ]


def test_every_n_train_steps_counts_optimizer_steps(make_trainer: Make, scripted: Any, batches: Any) -> None:
    saver = ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)
    make_trainer(saver, max_epochs=1, accumulate_grad_batches=2).fit(scripted(), batches)  # 5 steps
    assert names(saver.dirpath) == ["epoch=0-step=2", "epoch=0-step=4"]


def test_every_n_epochs(make_trainer: Make, scripted: Any, batches: Any) -> None:
    saver = ModelCheckpoint(every_n_epochs=2, save_top_k=-1)
    make_trainer(saver, max_epochs=5).fit(scripted(), batches)
    assert names(saver.dirpath) == ["epoch=1-step=20", "epoch=3-step=40"]


def test_each_of_several_validations_per_epoch_saves(make_trainer: Make, scripted: Any, batches: Any) -> None:
    saver = ModelCheckpoint(save_top_k=-1)
    make_trainer(saver, max_epochs=2, val_check_interval=0.5).fit(scripted(), batches, batches[:1])
    assert names(saver.dirpath) == ["epoch=0-step=5", "epoch=0-step=10", "epoch=1-step=15", "epoch=1-step=20"]
    at_the_end = ModelCheckpoint(save_top_k=-1, save_on_train_epoch_end=True)
    make_trainer(at_the_end, max_epochs=2, val_check_interval=0.5).fit(scripted(), batches, batches[:1])
    assert names(at_the_end.dirpath) == ["epoch=0-step=10", "epoch=1-step=20"]


def test_train_time_interval_saves(make_trainer: Make, scripted: Any, batches: Any) -> None:
    always = ModelCheckpoint(train_time_interval=timedelta(microseconds=1), save_top_k=-1)
    make_trainer(always, max_steps=3).fit(scripted(), batches)
    assert names(always.dirpath) == ["epoch=0-step=1", "epoch=0-step=2", "epoch=0-step=3"]
    hourly = ModelCheckpoint(train_time_interval="00:01:00:00", save_top_k=-1)
    make_trainer(hourly, max_epochs=2).fit(scripted(), batches)
    assert names(hourly.dirpath) == ["epoch=1-step=20"], "only the end is saved, because no checkpoint exists"


def test_run_that_ends_within_an_epoch_saves_its_end(make_trainer: Make, scripted: Any, batches: Any) -> None:
    plain = ModelCheckpoint()
    make_trainer(plain, max_steps=15).fit(scripted(), batches)
    assert names(plain.dirpath) == ["epoch=1-step=15"]
    ranked = ModelCheckpoint(monitor="val_loss")
    make_trainer(ranked, max_steps=15).fit(scripted([2.0]), batches, batches[:1])
    assert names(ranked.dirpath) == ["epoch=0-step=10"], "step 15 was not validated, so it is not ranked"
    with_last = ModelCheckpoint(monitor="val_loss", save_last=True)
    make_trainer(with_last, max_steps=15).fit(scripted([2.0]), batches, batches[:1])
    assert names(with_last.dirpath) == ["epoch=0-step=10", "epoch=1-step=15"]
    assert os.path.basename(with_last.best_model_path) == "epoch=0-step=10"
    never_validated = ModelCheckpoint(monitor="val_loss")
    make_trainer(never_validated, max_steps=5).fit(scripted(), batches, batches[:1])
    assert names(never_validated.dirpath) == ["epoch=0-step=5"], "otherwise the run would be lost"
    nothing = ModelCheckpoint(save_top_k=0)
    make_trainer(nothing, max_steps=15).fit(scripted(), batches)
    assert nothing.dirpath is not None
    assert not os.path.exists(nothing.dirpath)


def test_epoch_that_ends_with_the_run_is_ranked(make_trainer: Make, scripted: Any, batches: Any) -> None:
    for limit in ({"max_steps": 20}, {"max_epochs": 2}, {"max_epochs": 2, "max_steps": 20}):
        saver = ModelCheckpoint(monitor="val_loss")
        make_trainer(saver, **limit).fit(scripted([2.0, 1.0]), batches, batches[:1])
        assert names(saver.dirpath) == ["epoch=1-step=20"]
        assert saver.best_model_score == torch.tensor(1.0)


def test_sanity_check_and_fast_dev_run_do_not_save(make_trainer: Make, scripted: Any, batches: Any) -> None:
    saver = ModelCheckpoint(save_on_train_epoch_end=False, save_top_k=-1)
    make_trainer(saver, max_epochs=1, num_sanity_val_steps=1).fit(scripted(), batches, batches[:1])
    assert names(saver.dirpath) == ["epoch=0-step=10"]
    trainer = make_trainer(ModelCheckpoint(every_n_train_steps=1), fast_dev_run=3)
    trainer.fit(scripted(), batches, batches[:1])
    assert len(os.listdir(trainer.default_root_dir)) == 1, "only the run folder of the first run"


def test_save_weights_only(make_trainer: Make, scripted: Any, batches: Any) -> None:
    saver = ModelCheckpoint(save_weights_only=True)
    make_trainer(saver, max_epochs=1).fit(scripted(), batches)
    stored = checkpoint.peek(saver.best_model_path)
    assert "module" in stored
    assert "optimizers" not in stored


# The metric --------------------------------------------------------------------------------------------------------


def test_nan_is_never_best(make_trainer: Make, scripted: Any, batches: Any, capsys: pytest.CaptureFixture[str]) -> None:
    saver = ModelCheckpoint(monitor="val_loss", save_top_k=2)
    make_trainer(saver, max_epochs=4).fit(scripted([math.nan, 2.0, math.nan, 3.0]), batches, batches[:1])
    assert names(saver.dirpath) == ["epoch=1-step=20", "epoch=3-step=40"]
    assert saver.best_model_score == torch.tensor(2.0)
    assert capsys.readouterr().err.count("val_loss is NaN") == 1


def test_run_without_ranked_checkpoints_saves_its_end(make_trainer: Make, scripted: Any, batches: Any) -> None:
    never_finite = ModelCheckpoint(monitor="val_loss")
    make_trainer(never_finite, max_epochs=2).fit(scripted([math.nan]), batches, batches[:1])
    assert names(never_finite.dirpath) == ["epoch=1-step=20"]
    assert never_finite.best_model_path == ""
    not_validated = ModelCheckpoint(monitor="val_loss", every_n_train_steps=4)
    make_trainer(not_validated, max_steps=8).fit(scripted(), batches, batches[:1])
    assert names(not_validated.dirpath) == ["epoch=0-step=8"]


def test_monitor_must_be_logged_and_the_error_suggests_a_name(make_trainer: Make, scripted: Any, batches: Any) -> None:
    with pytest.raises(RoomierError) as caught:
        make_trainer(ModelCheckpoint(monitor="val_los"), max_epochs=1).fit(scripted(), batches, batches[:1])
    for words in ("ModelCheckpoint(monitor)='val_los'", "train_loss", "val_loss", "Did you mean 'val_loss'?"):
        assert words in str(caught.value)


def test_missing_metric_before_the_first_validation_prints_a_notice(
    make_trainer: Make, scripted: Any, batches: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    saver = ModelCheckpoint(monitor="val_loss", every_n_train_steps=4, save_top_k=-1)
    make_trainer(saver, max_epochs=2).fit(scripted([2.0, 1.0]), batches, batches[:1])
    assert names(saver.dirpath) == ["epoch=1-step=12", "epoch=1-step=16", "epoch=1-step=20"]
    assert capsys.readouterr().err.count("'val_loss' is not logged before the first validation") == 1
    assert [score.item() for score in saver.best_k_models.values()] == [2.0, 2.0, 1.0], (
        "step 20 is saved after its validation"
    )


# Ledger and files ---------------------------------------------------------------------------------------------------


def test_checkpoint_contains_the_ledger_after_its_save(make_trainer: Make, scripted: Any, batches: Any) -> None:
    saver = ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True)
    spy = Spy(saver)
    make_trainer(spy, saver, max_epochs=4).fit(scripted([3.0, 2.0, 5.0, 1.0]), batches, batches[:1])
    saved = checkpoint.load(saver.last_model_path)["callbacks"][saver.state_key]
    assert saved == saver.state_dict()
    older = checkpoint.load(os.path.join(str(saver.dirpath), "epoch=1-step=20"))["callbacks"][saver.state_key]
    assert older == spy.states[20]
    assert older["kept"] == [["epoch=0-step=10", 3.0], ["epoch=1-step=20", 2.0]]


def test_failed_save_keeps_the_ledger_and_the_previous_checkpoint(
    make_trainer: Make, scripted: Any, batches: Any, tmp_path: Path
) -> None:
    class InTheWay(Callback):
        def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                (tmp_path / "saves" / "epoch=1-step=20").mkdir()
                (tmp_path / "saves" / "epoch=1-step=20" / "thesis.tex").write_text("precious")

    saver = ModelCheckpoint(dirpath=tmp_path / "saves", monitor="val_loss")
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        make_trainer(InTheWay(), saver, max_epochs=3).fit(scripted([3.0, 2.0]), batches, batches[:1])
    assert saver.best_model_path == str(tmp_path / "saves" / "epoch=0-step=10")
    assert saver.best_model_score == torch.tensor(3.0)
    checkpoint.verify(saver.best_model_path)
    assert (tmp_path / "saves" / "epoch=1-step=20" / "thesis.tex").read_text() == "precious"


def test_constant_name_is_replaced_for_top_k_one(make_trainer: Make, scripted: Any, batches: Any) -> None:
    saver = ModelCheckpoint(monitor="val_loss", filename="best")
    make_trainer(saver, max_epochs=3).fit(scripted([3.0, 2.0, 5.0]), batches, batches[:1])
    assert os.listdir(str(saver.dirpath)) == ["best"]
    assert checkpoint.peek(saver.best_model_path)["progress"]["global_step"] == 20


def test_constant_name_gets_version_numbers_for_top_k_two(make_trainer: Make, scripted: Any, batches: Any) -> None:
    saver = ModelCheckpoint(monitor="val_loss", filename="best", save_top_k=2)
    make_trainer(saver, max_epochs=3).fit(scripted([3.0, 2.0, 1.0]), batches, batches[:1])
    assert sorted(os.listdir(str(saver.dirpath))) == ["best", "best-v1"]
    assert [os.path.basename(path) for path in saver.best_k_models] == ["best-v1", "best"]
    off = ModelCheckpoint(monitor="val_loss", filename="best", save_top_k=2, enable_version_counter=False)
    make_trainer(off, max_epochs=3).fit(scripted([3.0, 2.0, 1.0]), batches, batches[:1])
    assert os.listdir(str(off.dirpath)) == ["best"]
    assert list(off.best_k_models) == [os.path.join(str(off.dirpath), "best")]


def test_two_callbacks_share_a_folder(make_trainer: Make, scripted: Any, batches: Any, tmp_path: Path) -> None:
    best = ModelCheckpoint(dirpath=tmp_path, monitor="val_loss")
    newest = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=10)
    make_trainer(best, newest, max_epochs=3).fit(scripted([1.0, 2.0, 3.0]), batches, batches[:1])
    assert best.best_model_path == str(tmp_path / "epoch=0-step=10")
    assert newest.best_model_path == str(tmp_path / "epoch=2-step=30")
    for saver in (best, newest):
        checkpoint.verify(saver.best_model_path)


def test_failed_link_prints_a_notice_and_training_continues(
    make_trainer: Make, scripted: Any, batches: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "last").mkdir()
    saver = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    make_trainer(saver, max_epochs=2).fit(scripted(), batches)
    assert saver.last_model_path == str(tmp_path / "epoch=1-step=20")
    assert (tmp_path / "last").is_dir()
    assert "cannot create the link" in capsys.readouterr().err


# Arguments ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"monitor": 3}, "ModelCheckpoint(monitor)=3"),
        ({"mode": "lowest"}, "ModelCheckpoint(mode)='lowest'"),
        ({"save_top_k": -2}, "ModelCheckpoint(save_top_k)=-2"),
        ({"save_top_k": True}, "ModelCheckpoint(save_top_k)=True"),
        ({"save_top_k": 2}, "must be at most 1 if monitor is not set"),
        ({"save_last": "yes"}, "ModelCheckpoint(save_last)='yes'"),
        ({"save_last": True, "filename": "last"}, "name of the link"),
        ({"every_n_epochs": -1}, "ModelCheckpoint(every_n_epochs)=-1"),
        ({"every_n_train_steps": 2.5}, "ModelCheckpoint(every_n_train_steps)=2.5"),
        ({"every_n_train_steps": 2, "every_n_epochs": 1}, "cannot be combined"),
        ({"train_time_interval": "soon"}, "is not a duration"),
        ({"filename": "a/b"}, "not a path"),
    ],
)
def test_invalid_arguments_are_rejected(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(RoomierError) as caught:
        ModelCheckpoint(**arguments)
    assert words in str(caught.value)


def test_two_callbacks_with_the_same_state_key_are_rejected(make_trainer: Make) -> None:
    with pytest.raises(RoomierError, match="state_key"):
        make_trainer(ModelCheckpoint(save_top_k=-1), ModelCheckpoint())
    assert ModelCheckpoint().state_key != ModelCheckpoint(monitor="val_loss").state_key
    assert ModelCheckpoint().state_key != ModelCheckpoint(every_n_train_steps=5).state_key
