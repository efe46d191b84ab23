"""ModelCheckpoint after a kill: the resumed run has the ledger and folders of an uninterrupted run."""

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
from tests.covering import few

Make = Callable[..., Trainer]
SCORES = [4.0, 2.0, 3.0, 1.0, 5.0]


def folders(dirpath: str | Path | None) -> list[str]:
    return sorted(path.name for path in Path(str(dirpath)).iterdir() if not path.is_symlink())


def ledger(saver: ModelCheckpoint) -> dict[str, Any]:
    return {name: value for name, value in saver.state_dict().items() if name != "dirpath"}


def saver_of(**keywords: Any) -> ModelCheckpoint:
    return ModelCheckpoint(**{"monitor": "val_loss", "save_top_k": 2, "save_last": True, **keywords})


@pytest.mark.parametrize("killed_after", few([29, 44, 11, 20, 33], 2))
def test_ledger_and_folders_equal_an_uninterrupted_run(
    make_trainer: Make, scripted: Any, batches: Any, kill_at: Any, killed_error: Any, tmp_path: Path, killed_after: int
) -> None:
    straight = saver_of()
    make_trainer(straight, max_epochs=5, default_root_dir=tmp_path / "straight").fit(
        scripted(SCORES), batches, batches[:1]
    )

    killed = saver_of()
    with pytest.raises(killed_error):
        make_trainer(kill_at(killed_after), killed, max_epochs=5).fit(scripted(SCORES), batches, batches[:1])
    resumed = saver_of()
    trainer = make_trainer(resumed, max_epochs=5)
    trainer.fit(scripted(SCORES), batches, batches[:1], ckpt_path="last")
    assert resumed.dirpath == killed.dirpath, "the run resumes in its folder"
    assert ledger(resumed) == ledger(straight)
    assert (
        folders(resumed.dirpath)
        == folders(straight.dirpath)
        == ["epoch=1-step=20", "epoch=3-step=40", "epoch=4-step=50"]
    )


@pytest.mark.parametrize("at_epoch_end", [True, False])
def test_signal_between_validation_and_save_point_loses_no_checkpoint(
    make_trainer: Make, scripted: Any, batches: Any, tmp_path: Path, at_epoch_end: bool
) -> None:
    class Terminate(Callback):
        def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
            if trainer.global_step == 20:
                os.kill(os.getpid(), signal.SIGTERM)

    def saver() -> ModelCheckpoint:
        return saver_of(save_top_k=-1, save_on_train_epoch_end=at_epoch_end)

    straight, killed, resumed = saver(), saver(), saver()
    make_trainer(straight, max_epochs=3, default_root_dir=tmp_path / "straight").fit(
        scripted(SCORES), batches, batches[:1]
    )
    with pytest.raises(SystemExit):
        make_trainer(Terminate(), killed, max_epochs=3).fit(scripted(SCORES), batches, batches[:1])
    make_trainer(resumed, max_epochs=3).fit(scripted(SCORES), batches, batches[:1], ckpt_path="last")
    assert ledger(resumed) == ledger(straight)
    assert set(folders(straight.dirpath)) <= set(folders(resumed.dirpath))


def test_checkpoints_of_the_killed_run_are_replaced_without_version_number(
    make_trainer: Make, scripted: Any, batches: Any, kill_at: Any, killed_error: Any
) -> None:
    killed = saver_of(save_top_k=-1)
    with pytest.raises(killed_error):
        make_trainer(kill_at(35), killed, max_epochs=5).fit(scripted(SCORES), batches, batches[:1])
    future = Path(str(killed.dirpath)) / "epoch=2-step=30"
    saved_at_ns = (future / "run.json").stat().st_mtime_ns

    resumed = saver_of(save_top_k=-1)
    first = os.path.join(str(killed.dirpath), "epoch=0-step=10")
    make_trainer(resumed, max_epochs=3).fit(scripted(SCORES), batches, batches[:1], ckpt_path=first)
    assert folders(resumed.dirpath) == ["epoch=0-step=10", "epoch=1-step=20", "epoch=2-step=30"]
    assert (future / "run.json").stat().st_mtime_ns > saved_at_ns


def test_removal_prevented_by_a_kill_is_completed(
    make_trainer: Make, scripted: Any, batches: Any, kill_at: Any, killed_error: Any, tmp_path: Path
) -> None:
    class KeepCopy(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                shutil.copytree(os.path.join(str(killed.dirpath), "epoch=0-step=10"), tmp_path / "copy")

    killed = ModelCheckpoint()
    with pytest.raises(killed_error):
        make_trainer(KeepCopy(), kill_at(22), killed, max_epochs=5).fit(scripted(), batches)
    assert folders(killed.dirpath) == ["epoch=1-step=20"]
    # Restore the state from before the removal.
    shutil.copytree(tmp_path / "copy", os.path.join(str(killed.dirpath), "epoch=0-step=10"))

    resumed = ModelCheckpoint()
    last = os.path.join(str(killed.dirpath), "epoch=1-step=20")
    with pytest.raises(killed_error):
        make_trainer(kill_at(25), resumed, max_epochs=5).fit(scripted(), batches, ckpt_path=last)
    assert folders(resumed.dirpath) == ["epoch=1-step=20"]


def test_resumed_checkpoint_is_kept_until_a_newer_one_exists(
    make_trainer: Make, scripted: Any, batches: Any, kill_at: Any, killed_error: Any
) -> None:
    killed = ModelCheckpoint()
    with pytest.raises(killed_error):
        make_trainer(kill_at(15), killed, max_epochs=5).fit(scripted(), batches)
    for step in (18, 19):  # the run is killed twice before the next save
        again = ModelCheckpoint()
        with pytest.raises(killed_error):
            make_trainer(kill_at(step), again, max_epochs=5).fit(scripted(), batches, ckpt_path="last")
        assert folders(again.dirpath) == ["epoch=0-step=10"]
        assert again.best_model_path.endswith("epoch=0-step=10")
    done = ModelCheckpoint()
    make_trainer(done, max_epochs=2).fit(scripted(), batches, ckpt_path="last")
    assert folders(done.dirpath) == ["epoch=1-step=20"]


def test_checkpoints_of_another_run_are_never_replaced_or_removed(
    make_trainer: Make, scripted: Any, batches: Any, kill_at: Any, killed_error: Any, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    make_trainer(ModelCheckpoint(dirpath=shared, save_top_k=-1), max_epochs=3).fit(scripted(), batches)
    foreign = folders(shared)
    assert foreign == ["epoch=0-step=10", "epoch=1-step=20", "epoch=2-step=30"]
    before = {name: (shared / name / "run.json").read_bytes() for name in foreign}

    killed = ModelCheckpoint(dirpath=shared)
    with pytest.raises(killed_error):
        make_trainer(kill_at(15), killed, max_epochs=3).fit(scripted(), batches)
    assert killed.best_model_path == str(shared / "epoch=0-step=10-v1")
    resumed = ModelCheckpoint(dirpath=shared)
    make_trainer(resumed, max_epochs=3).fit(scripted(), batches, ckpt_path=killed.best_model_path)
    assert folders(shared) == sorted([*foreign, "epoch=0-step=10-v1", "epoch=2-step=30-v1"])
    assert {name: (shared / name / "run.json").read_bytes() for name in foreign} == before


def test_moved_run_folder_is_found(
    make_trainer: Make, scripted: Any, batches: Any, kill_at: Any, killed_error: Any, tmp_path: Path
) -> None:
    killed = saver_of()
    with pytest.raises(killed_error):
        make_trainer(kill_at(35), killed, max_epochs=5).fit(scripted(SCORES), batches, batches[:1])
    os.rename(tmp_path / "runs", tmp_path / "moved")
    resumed = saver_of()
    trainer = make_trainer(resumed, max_epochs=5, default_root_dir=tmp_path / "moved")
    trainer.fit(scripted(SCORES), batches, batches[:1], ckpt_path="last")
    checkpoints = tmp_path / "moved" / "version_0" / "checkpoints"
    assert resumed.dirpath == str(checkpoints)
    assert folders(checkpoints) == ["epoch=1-step=20", "epoch=3-step=40", "epoch=4-step=50"]
    assert os.readlink(checkpoints / "last") == "epoch=4-step=50"


def test_checkpoints_of_an_earlier_folder_are_ranked_but_not_removed(
    make_trainer: Make, scripted: Any, batches: Any, kill_at: Any, killed_error: Any, tmp_path: Path
) -> None:
    killed = saver_of(save_last=False, save_top_k=1)
    with pytest.raises(killed_error):
        make_trainer(kill_at(25), killed, max_epochs=5).fit(scripted(SCORES), batches, batches[:1])
    resumed = saver_of(save_last=False, save_top_k=1)
    trainer = make_trainer(resumed, max_epochs=3, default_root_dir=tmp_path / "elsewhere")
    trainer.fit(scripted(SCORES), batches, batches[:1], ckpt_path=killed.best_model_path)
    assert resumed.best_model_path == killed.best_model_path, "3.0 is not better than 2.0"
    better = saver_of(save_last=False, save_top_k=1)
    trainer = make_trainer(better, max_epochs=4, default_root_dir=tmp_path / "elsewhere")
    trainer.fit(scripted(SCORES), batches, batches[:1], ckpt_path=killed.best_model_path)
    assert os.path.basename(better.best_model_path) == "epoch=3-step=40"
    checkpoint.verify(killed.best_model_path)


def test_deleted_checkpoint_is_removed_from_the_ledger(
    make_trainer: Make,
    scripted: Any,
    batches: Any,
    kill_at: Any,
    killed_error: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    killed = saver_of()
    with pytest.raises(killed_error):
        make_trainer(kill_at(35), killed, max_epochs=5).fit(scripted(SCORES), batches, batches[:1])
    checkpoint.remove(os.path.join(str(killed.dirpath), "epoch=1-step=20"))  # the best checkpoint
    resumed = saver_of()
    make_trainer(resumed, max_epochs=5).fit(scripted(SCORES), batches, batches[:1], ckpt_path="last")
    assert "removed missing checkpoints from the ledger: epoch=1-step=20" in capsys.readouterr().err
    assert [os.path.basename(path) for path in resumed.best_k_models] == ["epoch=2-step=30", "epoch=3-step=40"]
