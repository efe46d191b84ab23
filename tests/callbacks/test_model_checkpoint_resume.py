"""ModelCheckpoint after a kill: the resumed run's books and folders are those of the run that was never cut off."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roomier import checkpoint
from roomier.api.callback import Callback
from roomier.callbacks import ModelCheckpoint
from roomier.trainer import Trainer

Make = Callable[..., Trainer]
SCORES = [4.0, 2.0, 3.0, 1.0, 5.0]


def folders(dirpath: str | Path | None) -> list[str]:
    return sorted(path.name for path in Path(str(dirpath)).iterdir() if not path.is_symlink())


def books(saver: ModelCheckpoint) -> dict[str, Any]:
    return {name: value for name, value in saver.state_dict().items() if name != "dirpath"}


def saver_of(**keywords: Any) -> ModelCheckpoint:
    return ModelCheckpoint(**{"monitor": "val_loss", "save_top_k": 2, "save_last": True, **keywords})


@pytest.mark.parametrize("killed_after", [11, 20, 29, 33, 44])
def test_books_and_folders_are_those_of_an_uninterrupted_run(
    make_trainer: Make, scripted: Any, batches: Any, kill_at: Any, killed_error: Any, tmp_path: Path, killed_after: int
) -> None:
    whole = saver_of()
    make_trainer(whole, max_epochs=5, default_root_dir=tmp_path / "whole").fit(scripted(SCORES), batches, batches[:1])

    cut = saver_of()
    with pytest.raises(killed_error):
        make_trainer(kill_at(killed_after), cut, max_epochs=5).fit(scripted(SCORES), batches, batches[:1])
    resumed = saver_of()
    trainer = make_trainer(resumed, max_epochs=5)
    trainer.fit(scripted(SCORES), batches, batches[:1], ckpt_path="last")
    assert resumed.dirpath == cut.dirpath, "the run goes on in its folder"
    assert books(resumed) == books(whole)
    assert (
        folders(resumed.dirpath) == folders(whole.dirpath) == ["epoch=1-step=20", "epoch=3-step=40", "epoch=4-step=50"]
    )


@pytest.mark.parametrize("at_epoch_end", [True, False])
def test_a_signal_between_a_validation_and_its_save_point_loses_no_save(
    make_trainer: Make, scripted: Any, batches: Any, tmp_path: Path, at_epoch_end: bool
) -> None:
    class Terminate(Callback):
        def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
            if trainer.global_step == 20:
                os.kill(os.getpid(), signal.SIGTERM)

    def saver() -> ModelCheckpoint:
        return saver_of(save_top_k=-1, save_on_train_epoch_end=at_epoch_end)

    whole, cut, resumed = saver(), saver(), saver()
    make_trainer(whole, max_epochs=3, default_root_dir=tmp_path / "whole").fit(scripted(SCORES), batches, batches[:1])
    with pytest.raises(SystemExit):
        make_trainer(Terminate(), cut, max_epochs=3).fit(scripted(SCORES), batches, batches[:1])
    make_trainer(resumed, max_epochs=3).fit(scripted(SCORES), batches, batches[:1], ckpt_path="last")
    assert books(resumed) == books(whole)
    assert set(folders(whole.dirpath)) <= set(folders(resumed.dirpath))


def test_the_killed_future_is_replaced_without_a_version_number(
    make_trainer: Make, scripted: Any, batches: Any, kill_at: Any, killed_error: Any
) -> None:
    cut = saver_of(save_top_k=-1)
    with pytest.raises(killed_error):
        make_trainer(kill_at(35), cut, max_epochs=5).fit(scripted(SCORES), batches, batches[:1])
    future = Path(str(cut.dirpath)) / "epoch=2-step=30"
    saved_at_ns = (future / "run.json").stat().st_mtime_ns

    resumed = saver_of(save_top_k=-1)
    first = os.path.join(str(cut.dirpath), "epoch=0-step=10")
    make_trainer(resumed, max_epochs=3).fit(scripted(SCORES), batches, batches[:1], ckpt_path=first)
    assert folders(resumed.dirpath) == ["epoch=0-step=10", "epoch=1-step=20", "epoch=2-step=30"]
    assert (future / "run.json").stat().st_mtime_ns > saved_at_ns


def test_a_removal_that_a_kill_prevented_is_made_up_for(
    make_trainer: Make, scripted: Any, batches: Any, kill_at: Any, killed_error: Any, tmp_path: Path
) -> None:
    class KeepCopy(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                shutil.copytree(os.path.join(str(cut.dirpath), "epoch=0-step=10"), tmp_path / "copy")

    cut = ModelCheckpoint()
    with pytest.raises(killed_error):
        make_trainer(KeepCopy(), kill_at(22), cut, max_epochs=5).fit(scripted(), batches)
    assert folders(cut.dirpath) == ["epoch=1-step=20"]
    shutil.copytree(tmp_path / "copy", os.path.join(str(cut.dirpath), "epoch=0-step=10"))  # as before the removal

    resumed = ModelCheckpoint()
    last = os.path.join(str(cut.dirpath), "epoch=1-step=20")
    with pytest.raises(killed_error):
        make_trainer(kill_at(25), resumed, max_epochs=5).fit(scripted(), batches, ckpt_path=last)
    assert folders(resumed.dirpath) == ["epoch=1-step=20"]


def test_the_checkpoint_a_run_resumed_from_stays_until_a_newer_one_is_there(
    make_trainer: Make, scripted: Any, batches: Any, kill_at: Any, killed_error: Any
) -> None:
    cut = ModelCheckpoint()
    with pytest.raises(killed_error):
        make_trainer(kill_at(15), cut, max_epochs=5).fit(scripted(), batches)
    for step in (18, 19):  # killed again and again before the next save
        again = ModelCheckpoint()
        with pytest.raises(killed_error):
            make_trainer(kill_at(step), again, max_epochs=5).fit(scripted(), batches, ckpt_path="last")
        assert folders(again.dirpath) == ["epoch=0-step=10"]
        assert again.best_model_path.endswith("epoch=0-step=10")
    done = ModelCheckpoint()
    make_trainer(done, max_epochs=2).fit(scripted(), batches, ckpt_path="last")
    assert folders(done.dirpath) == ["epoch=1-step=20"]


def test_another_runs_checkpoints_are_never_replaced_nor_removed(
    make_trainer: Make, scripted: Any, batches: Any, kill_at: Any, killed_error: Any, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    make_trainer(ModelCheckpoint(dirpath=shared, save_top_k=-1), max_epochs=3).fit(scripted(), batches)
    theirs = folders(shared)
    assert theirs == ["epoch=0-step=10", "epoch=1-step=20", "epoch=2-step=30"]
    before = {name: (shared / name / "run.json").read_bytes() for name in theirs}

    cut = ModelCheckpoint(dirpath=shared)
    with pytest.raises(killed_error):
        make_trainer(kill_at(15), cut, max_epochs=3).fit(scripted(), batches)
    assert cut.best_model_path == str(shared / "epoch=0-step=10-v1")
    resumed = ModelCheckpoint(dirpath=shared)
    make_trainer(resumed, max_epochs=3).fit(scripted(), batches, ckpt_path=cut.best_model_path)
    assert folders(shared) == [*theirs, "epoch=2-step=30-v1"]
    assert {name: (shared / name / "run.json").read_bytes() for name in theirs} == before


def test_a_moved_run_folder_is_found(
    make_trainer: Make, scripted: Any, batches: Any, kill_at: Any, killed_error: Any, tmp_path: Path
) -> None:
    cut = saver_of()
    with pytest.raises(killed_error):
        make_trainer(kill_at(35), cut, max_epochs=5).fit(scripted(SCORES), batches, batches[:1])
    os.rename(tmp_path / "runs", tmp_path / "moved")
    resumed = saver_of()
    trainer = make_trainer(resumed, max_epochs=5, default_root_dir=tmp_path / "moved")
    trainer.fit(scripted(SCORES), batches, batches[:1], ckpt_path="last")
    checkpoints = tmp_path / "moved" / "version_0" / "checkpoints"
    assert resumed.dirpath == str(checkpoints)
    assert folders(checkpoints) == ["epoch=1-step=20", "epoch=3-step=40", "epoch=4-step=50"]
    assert os.readlink(checkpoints / "last") == "epoch=4-step=50"


def test_checkpoints_of_an_earlier_folder_rank_but_stay(
    make_trainer: Make, scripted: Any, batches: Any, kill_at: Any, killed_error: Any, tmp_path: Path
) -> None:
    cut = saver_of(save_last=False, save_top_k=1)
    with pytest.raises(killed_error):
        make_trainer(kill_at(25), cut, max_epochs=5).fit(scripted(SCORES), batches, batches[:1])
    resumed = saver_of(save_last=False, save_top_k=1)
    trainer = make_trainer(resumed, max_epochs=3, default_root_dir=tmp_path / "elsewhere")
    trainer.fit(scripted(SCORES), batches, batches[:1], ckpt_path=cut.best_model_path)
    assert resumed.best_model_path == cut.best_model_path, "3.0 is not better than 2.0"
    better = saver_of(save_last=False, save_top_k=1)
    trainer = make_trainer(better, max_epochs=4, default_root_dir=tmp_path / "elsewhere")
    trainer.fit(scripted(SCORES), batches, batches[:1], ckpt_path=cut.best_model_path)
    assert os.path.basename(better.best_model_path) == "epoch=3-step=40"
    checkpoint.verify(cut.best_model_path)


def test_a_checkpoint_somebody_deleted_is_struck_off(
    make_trainer: Make,
    scripted: Any,
    batches: Any,
    kill_at: Any,
    killed_error: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cut = saver_of()
    with pytest.raises(killed_error):
        make_trainer(kill_at(35), cut, max_epochs=5).fit(scripted(SCORES), batches, batches[:1])
    checkpoint.remove(os.path.join(str(cut.dirpath), "epoch=1-step=20"))  # the best so far
    resumed = saver_of()
    make_trainer(resumed, max_epochs=5).fit(scripted(SCORES), batches, batches[:1], ckpt_path="last")
    assert "struck off: epoch=1-step=20" in capsys.readouterr().err
    assert [os.path.basename(path) for path in resumed.best_k_models] == ["epoch=2-step=30", "epoch=3-step=40"]
