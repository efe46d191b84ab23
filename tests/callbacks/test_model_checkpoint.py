"""ModelCheckpoint in real runs of ten steps an epoch: when it saves, under which names, and what it keeps."""

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
    """The checkpoints in ``folder``, in the order of their steps; every one must be complete."""
    assert folder is not None
    found = [path for path in Path(folder).iterdir() if path.is_dir() and not path.is_symlink()]
    for path in found:
        checkpoint.verify(path)
    return sorted((path.name for path in found), key=lambda name: (int(name.split("step=")[-1].split("-")[0]), name))


class Spy(Callback):
    """Notes the state of ``saver`` after each save point."""

    def __init__(self, saver: ModelCheckpoint) -> None:
        self.saver = saver
        self.states: dict[int, dict[str, Any]] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.states[trainer.global_step] = self.saver.state_dict()


# When and what ------------------------------------------------------------------------------------------------------


def test_by_default_the_newest_epoch_is_kept(make_trainer: Make, scripted: Any, batches: Any) -> None:
    saver = ModelCheckpoint()
    trainer = make_trainer(saver, max_epochs=3)
    trainer.fit(scripted(), batches)
    assert saver.dirpath == os.path.join(os.path.abspath(trainer.log_dir), "checkpoints")
    assert names(saver.dirpath) == ["epoch=2-step=30"]
    assert saver.best_model_path == os.path.join(saver.dirpath, "epoch=2-step=30")
    assert (saver.best_model_score, saver.best_k_models, saver.kth_best_model_path) == (None, {}, "")
    assert saver.last_model_path == ""


def test_a_metric_in_the_name_that_is_not_logged_is_refused(make_trainer: Make, scripted: Any, batches: Any) -> None:
    saver = ModelCheckpoint(filename="{epoch}-{val_los:.2f}")
    with pytest.raises(RoomierError, match=r"ModelCheckpoint\(filename\)='val_los'.*Did you mean 'val_loss'"):
        make_trainer(saver, max_epochs=1).fit(scripted(), batches, batches[:1])
    with pytest.raises(RoomierError, match=r"ModelCheckpoint\(filename\)='val_loss'.*there is no validation data"):
        make_trainer(ModelCheckpoint(filename="{val_loss}"), max_epochs=1).fit(scripted(), batches)


def test_a_name_before_the_first_validation_reads_none_and_that_is_told_once(
    make_trainer: Make, scripted: Any, batches: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    saver = ModelCheckpoint(filename="{val_loss:.1f}-{step}", every_n_train_steps=4, save_top_k=-1)
    make_trainer(saver, max_steps=12).fit(scripted([3.0]), batches, batches[:1])
    assert names(saver.dirpath) == ["val_loss=none-step=4", "val_loss=none-step=8", "val_loss=3.0-step=12"]
    assert capsys.readouterr().err.count("until then the name reads none") == 1


def test_the_best_two_of_five_epochs_stay(make_trainer: Make, scripted: Any, batches: Any) -> None:
    saver = ModelCheckpoint(monitor="val_loss", save_top_k=2, filename="{epoch}-{val_loss:.1f}-{step}")
    make_trainer(saver, max_epochs=5).fit(scripted([3.0, 5.0, 4.0, 4.0, 1.0]), batches, batches[:1])
    assert names(saver.dirpath) == ["epoch=0-val_loss=3.0-step=10", "epoch=4-val_loss=1.0-step=50"]
    assert os.path.basename(saver.best_model_path) == "epoch=4-val_loss=1.0-step=50"
    assert os.path.basename(saver.kth_best_model_path) == "epoch=0-val_loss=3.0-step=10"
    assert saver.best_model_score == torch.tensor(1.0)
    assert saver.kth_value == torch.tensor(3.0)
    assert saver.current_score == torch.tensor(1.0)
    assert [score.item() for score in saver.best_k_models.values()] == [3.0, 1.0]


def test_mode_max_keeps_the_largest(make_trainer: Make, scripted: Any, batches: Any) -> None:
    saver = ModelCheckpoint(monitor="val_loss", mode="max")
    make_trainer(saver, max_epochs=4).fit(scripted([3.0, 5.0, 5.0, 4.0]), batches, batches[:1])
    assert names(saver.dirpath) == ["epoch=1-step=20"]


def test_the_newest_stays_beside_the_best_and_is_linked(make_trainer: Make, scripted: Any, batches: Any) -> None:
    saver = ModelCheckpoint(monitor="val_loss", save_last=True)
    make_trainer(saver, max_epochs=4).fit(scripted([3.0, 1.0, 2.0, 4.0]), batches, batches[:1])
    assert saver.dirpath is not None
    assert names(saver.dirpath) == ["epoch=1-step=20", "epoch=3-step=40"]
    assert os.readlink(os.path.join(saver.dirpath, "last")) == "epoch=3-step=40", "relative: the folder may be moved"
    assert saver.last_model_path == os.path.join(saver.dirpath, "epoch=3-step=40")
    assert os.path.basename(saver.best_model_path) == "epoch=1-step=20"


def test_every_n_steps_with_all_kept(make_trainer: Make, scripted: Any, batches: Any) -> None:
    saver = ModelCheckpoint(every_n_train_steps=4, save_top_k=-1)
    make_trainer(saver, max_epochs=2, accumulate_grad_batches=1).fit(scripted(), batches)
    assert names(saver.dirpath) == [
        *("epoch=0-step=4", "epoch=0-step=8"),
        *("epoch=1-step=12", "epoch=1-step=16", "epoch=1-step=20"),  # 20 is the last step of epoch 1
    ]


def test_steps_are_optimizer_steps(make_trainer: Make, scripted: Any, batches: Any) -> None:
    saver = ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)
    make_trainer(saver, max_epochs=1, accumulate_grad_batches=2).fit(scripted(), batches)  # 5 steps
    assert names(saver.dirpath) == ["epoch=0-step=2", "epoch=0-step=4"]


def test_every_n_epochs(make_trainer: Make, scripted: Any, batches: Any) -> None:
    saver = ModelCheckpoint(every_n_epochs=2, save_top_k=-1)
    make_trainer(saver, max_epochs=5).fit(scripted(), batches)
    assert names(saver.dirpath) == ["epoch=1-step=20", "epoch=3-step=40"]


def test_with_several_validations_an_epoch_each_is_a_moment(make_trainer: Make, scripted: Any, batches: Any) -> None:
    saver = ModelCheckpoint(save_top_k=-1)
    make_trainer(saver, max_epochs=2, val_check_interval=0.5).fit(scripted(), batches, batches[:1])
    assert names(saver.dirpath) == ["epoch=0-step=5", "epoch=0-step=10", "epoch=1-step=15", "epoch=1-step=20"]
    at_the_end = ModelCheckpoint(save_top_k=-1, save_on_train_epoch_end=True)
    make_trainer(at_the_end, max_epochs=2, val_check_interval=0.5).fit(scripted(), batches, batches[:1])
    assert names(at_the_end.dirpath) == ["epoch=0-step=10", "epoch=1-step=20"]


def test_time_passing_is_a_moment(make_trainer: Make, scripted: Any, batches: Any) -> None:
    always = ModelCheckpoint(train_time_interval=timedelta(microseconds=1), save_top_k=-1)
    make_trainer(always, max_steps=3).fit(scripted(), batches)
    assert names(always.dirpath) == ["epoch=0-step=1", "epoch=0-step=2", "epoch=0-step=3"]
    hourly = ModelCheckpoint(train_time_interval="00:01:00:00", save_top_k=-1)
    make_trainer(hourly, max_epochs=2).fit(scripted(), batches)
    assert names(hourly.dirpath) == ["epoch=1-step=20"], "only the end of a run that had saved nothing"


def test_a_run_that_ends_within_an_epoch_keeps_its_end(make_trainer: Make, scripted: Any, batches: Any) -> None:
    plain = ModelCheckpoint()
    make_trainer(plain, max_steps=15).fit(scripted(), batches)
    assert names(plain.dirpath) == ["epoch=1-step=15"]
    ranked = ModelCheckpoint(monitor="val_loss")
    make_trainer(ranked, max_steps=15).fit(scripted([2.0]), batches, batches[:1])
    assert names(ranked.dirpath) == ["epoch=0-step=10"], "step 15 was not validated: it has no rank"
    with_last = ModelCheckpoint(monitor="val_loss", save_last=True)
    make_trainer(with_last, max_steps=15).fit(scripted([2.0]), batches, batches[:1])
    assert names(with_last.dirpath) == ["epoch=0-step=10", "epoch=1-step=15"]
    assert os.path.basename(with_last.best_model_path) == "epoch=0-step=10"
    never_validated = ModelCheckpoint(monitor="val_loss")
    make_trainer(never_validated, max_steps=5).fit(scripted(), batches, batches[:1])
    assert names(never_validated.dirpath) == ["epoch=0-step=5"], "else the whole run would be lost"
    nothing = ModelCheckpoint(save_top_k=0)
    make_trainer(nothing, max_steps=15).fit(scripted(), batches)
    assert nothing.dirpath is not None
    assert not os.path.exists(nothing.dirpath)


def test_an_epoch_that_ends_with_the_run_is_ranked(make_trainer: Make, scripted: Any, batches: Any) -> None:
    for limit in ({"max_steps": 20}, {"max_epochs": 2}, {"max_epochs": 2, "max_steps": 20}):
        saver = ModelCheckpoint(monitor="val_loss")
        make_trainer(saver, **limit).fit(scripted([2.0, 1.0]), batches, batches[:1])
        assert names(saver.dirpath) == ["epoch=1-step=20"]
        assert saver.best_model_score == torch.tensor(1.0)


def test_a_sanity_check_and_a_development_run_save_nothing(make_trainer: Make, scripted: Any, batches: Any) -> None:
    saver = ModelCheckpoint(save_on_train_epoch_end=False, save_top_k=-1)
    make_trainer(saver, max_epochs=1, num_sanity_val_steps=1).fit(scripted(), batches, batches[:1])
    assert names(saver.dirpath) == ["epoch=0-step=10"]
    trainer = make_trainer(ModelCheckpoint(every_n_train_steps=1), fast_dev_run=3)
    trainer.fit(scripted(), batches, batches[:1])
    assert len(os.listdir(trainer.default_root_dir)) == 1, "the run folder of the first one"


def test_weights_alone(make_trainer: Make, scripted: Any, batches: Any) -> None:
    saver = ModelCheckpoint(save_weights_only=True)
    make_trainer(saver, max_epochs=1).fit(scripted(), batches)
    stored = checkpoint.peek(saver.best_model_path)
    assert "module" in stored
    assert "optimizers" not in stored


# The metric --------------------------------------------------------------------------------------------------------


def test_nan_is_never_the_best(
    make_trainer: Make, scripted: Any, batches: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    saver = ModelCheckpoint(monitor="val_loss", save_top_k=2)
    make_trainer(saver, max_epochs=4).fit(scripted([math.nan, 2.0, math.nan, 3.0]), batches, batches[:1])
    assert names(saver.dirpath) == ["epoch=1-step=20", "epoch=3-step=40"]
    assert saver.best_model_score == torch.tensor(2.0)
    assert capsys.readouterr().err.count("val_loss is NaN") == 1


def test_a_run_of_which_nothing_could_be_ranked_keeps_its_end(make_trainer: Make, scripted: Any, batches: Any) -> None:
    never_finite = ModelCheckpoint(monitor="val_loss")
    make_trainer(never_finite, max_epochs=2).fit(scripted([math.nan]), batches, batches[:1])
    assert names(never_finite.dirpath) == ["epoch=1-step=20"]
    assert never_finite.best_model_path == ""
    not_validated = ModelCheckpoint(monitor="val_loss", every_n_train_steps=4)
    make_trainer(not_validated, max_steps=8).fit(scripted(), batches, batches[:1])
    assert names(not_validated.dirpath) == ["epoch=0-step=8"]


def test_a_metric_nobody_logs_is_an_error_that_names_the_nearest(
    make_trainer: Make, scripted: Any, batches: Any
) -> None:
    with pytest.raises(RoomierError) as caught:
        make_trainer(ModelCheckpoint(monitor="val_los"), max_epochs=1).fit(scripted(), batches, batches[:1])
    for words in ("ModelCheckpoint(monitor)='val_los'", "train_loss", "val_loss", "Did you mean 'val_loss'?"):
        assert words in str(caught.value)


def test_before_the_first_validation_a_missing_metric_is_only_told(
    make_trainer: Make, scripted: Any, batches: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    saver = ModelCheckpoint(monitor="val_loss", every_n_train_steps=4, save_top_k=-1)
    make_trainer(saver, max_epochs=2).fit(scripted([2.0, 1.0]), batches, batches[:1])
    assert names(saver.dirpath) == ["epoch=1-step=12", "epoch=1-step=16", "epoch=1-step=20"]
    assert capsys.readouterr().err.count("'val_loss' is not logged before the first validation") == 1
    assert [score.item() for score in saver.best_k_models.values()] == [2.0, 2.0, 1.0], "20 comes after its validation"


# Books and files ----------------------------------------------------------------------------------------------------


def test_a_checkpoint_holds_the_books_as_they_are_after_it(make_trainer: Make, scripted: Any, batches: Any) -> None:
    saver = ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True)
    spy = Spy(saver)
    make_trainer(spy, saver, max_epochs=4).fit(scripted([3.0, 2.0, 5.0, 1.0]), batches, batches[:1])
    saved = checkpoint.load(saver.last_model_path)["callbacks"][saver.state_key]
    assert saved == saver.state_dict()
    older = checkpoint.load(os.path.join(str(saver.dirpath), "epoch=1-step=20"))["callbacks"][saver.state_key]
    assert older == spy.states[20]
    assert older["kept"] == [["epoch=0-step=10", 3.0], ["epoch=1-step=20", 2.0]]


def test_a_save_that_fails_leaves_the_books_and_the_old_checkpoint(
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


def test_one_name_for_the_best_is_replaced(make_trainer: Make, scripted: Any, batches: Any) -> None:
    saver = ModelCheckpoint(monitor="val_loss", filename="best")
    make_trainer(saver, max_epochs=3).fit(scripted([3.0, 2.0, 5.0]), batches, batches[:1])
    assert os.listdir(str(saver.dirpath)) == ["best"]
    assert checkpoint.peek(saver.best_model_path)["progress"]["global_step"] == 20


def test_one_name_for_several_gets_version_numbers(make_trainer: Make, scripted: Any, batches: Any) -> None:
    saver = ModelCheckpoint(monitor="val_loss", filename="best", save_top_k=2)
    make_trainer(saver, max_epochs=3).fit(scripted([3.0, 2.0, 1.0]), batches, batches[:1])
    assert sorted(os.listdir(str(saver.dirpath))) == ["best", "best-v1"]
    assert [os.path.basename(path) for path in saver.best_k_models] == ["best-v1", "best"]
    off = ModelCheckpoint(monitor="val_loss", filename="best", save_top_k=2, enable_version_counter=False)
    make_trainer(off, max_epochs=3).fit(scripted([3.0, 2.0, 1.0]), batches, batches[:1])
    assert os.listdir(str(off.dirpath)) == ["best"]
    assert list(off.best_k_models) == [os.path.join(str(off.dirpath), "best")]


def test_two_of_them_in_one_folder_do_not_touch_each_other(
    make_trainer: Make, scripted: Any, batches: Any, tmp_path: Path
) -> None:
    best = ModelCheckpoint(dirpath=tmp_path, monitor="val_loss")
    newest = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=10)
    make_trainer(best, newest, max_epochs=3).fit(scripted([1.0, 2.0, 3.0]), batches, batches[:1])
    assert best.best_model_path == str(tmp_path / "epoch=0-step=10")
    assert newest.best_model_path == str(tmp_path / "epoch=2-step=30")
    for saver in (best, newest):
        checkpoint.verify(saver.best_model_path)


def test_a_link_that_cannot_be_made_is_told_and_training_goes_on(
    make_trainer: Make, scripted: Any, batches: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "last").mkdir()
    saver = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    make_trainer(saver, max_epochs=2).fit(scripted(), batches)
    assert saver.last_model_path == str(tmp_path / "epoch=1-step=20")
    assert (tmp_path / "last").is_dir()
    assert "no link" in capsys.readouterr().err


# Arguments ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"monitor": 3}, "ModelCheckpoint(monitor)=3"),
        ({"mode": "lowest"}, "ModelCheckpoint(mode)='lowest'"),
        ({"save_top_k": -2}, "ModelCheckpoint(save_top_k)=-2"),
        ({"save_top_k": True}, "ModelCheckpoint(save_top_k)=True"),
        ({"save_top_k": 2}, "there is no monitor"),
        ({"save_last": "yes"}, "ModelCheckpoint(save_last)='yes'"),
        ({"save_last": True, "filename": "last"}, "name of the link"),
        ({"every_n_epochs": -1}, "ModelCheckpoint(every_n_epochs)=-1"),
        ({"every_n_train_steps": 2.5}, "ModelCheckpoint(every_n_train_steps)=2.5"),
        ({"every_n_train_steps": 2, "every_n_epochs": 1}, "exclude each other"),
        ({"train_time_interval": "soon"}, "is not a duration"),
        ({"filename": "a/b"}, "is a path"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(RoomierError) as caught:
        ModelCheckpoint(**arguments)
    assert words in str(caught.value)


def test_two_of_one_kind_are_refused(make_trainer: Make) -> None:
    with pytest.raises(RoomierError, match="state_key"):
        make_trainer(ModelCheckpoint(save_top_k=-1), ModelCheckpoint())
    assert ModelCheckpoint().state_key != ModelCheckpoint(monitor="val_loss").state_key
    assert ModelCheckpoint().state_key != ModelCheckpoint(every_n_train_steps=5).state_key
