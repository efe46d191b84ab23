"""Options of ModelCheckpoint and contents of checkpoints, compared with Lightning: names, removed files, the epoch, the
order of hooks, and weights after an error.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from roomier import RoomierError, Trainer, checkpoint
from roomier.callbacks import ModelCheckpoint
from tests.lightning.both import make_trainer, quiet_lightning
from tests.lightning.modules import Regression, in_order, pl
from tests.lightning.rows import run_with

pytestmark = pytest.mark.more


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


@pytest.mark.parametrize("form", ["folder", "lightning"])
@pytest.mark.parametrize("base", [ModelCheckpoint, pl.callbacks.ModelCheckpoint])
def test_weights_are_saved_if_an_error_ends_the_fit(
    base: type, form: str, make_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    module = Fails()
    saves = base(tmp_path / "saves", save_on_exception=True)
    saves.format = form
    trainer = make_trainer(max_epochs=1, callbacks=[saves], enable_checkpointing=True)
    with pytest.raises(ValueError, match="bad batch"):
        trainer.fit(module, in_order())
    [saved] = (tmp_path / "saves").iterdir()
    assert saved.name == "on_exception-epoch=0-step=3" + (".ckpt" if form == "lightning" else "")
    loaded = [checkpoint.load_module(Fails, saved)]
    if form == "lightning":
        with quiet_lightning():
            loaded.append(Fails.load_from_checkpoint(saved))
    for each in loaded:
        for own, other in zip(each.parameters(), module.parameters(), strict=True):
            assert torch.equal(own, other)


def test_the_file_of_an_error_in_the_first_batch_of_an_epoch_names_this_epoch(tmp_path: Path) -> None:
    class FailsInEpoch1(Fails):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.current_epoch:
                raise ValueError("bad batch")

    for kind, base in ((Trainer, ModelCheckpoint), (pl.Trainer, pl.callbacks.ModelCheckpoint)):
        saves = base(tmp_path / base.__module__, save_on_exception=True, every_n_epochs=9)
        saves.format = "lightning"
        trainer = make_trainer(kind, tmp_path, max_epochs=2, callbacks=[saves], enable_checkpointing=True)
        with quiet_lightning(), pytest.raises(ValueError, match="bad batch"):
            trainer.fit(FailsInEpoch1(), in_order())
        [saved] = (tmp_path / base.__module__).iterdir()
        assert torch.load(saved, weights_only=False)["epoch"] == 1


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
    with pytest.raises(RoomierError, match="has only one shard"):
        trainer.fit(Regression(), in_order())


BOTH = [(pl.Trainer, pl.callbacks.ModelCheckpoint), (Trainer, ModelCheckpoint)]


def fitted(kind: Any, folder: Path, *callbacks: Any, make: Any = Regression, path: Any = None, **keywords: Any) -> Any:
    given = {"callbacks": list(callbacks), "enable_checkpointing": True, "max_epochs": 2, **keywords}
    return run_with(kind, lambda t, m: t.fit(m, in_order(), in_order(2), ckpt_path=path), make, folder, **given)[0]


@pytest.mark.parametrize(
    ("arguments", "extension"),
    [
        ({"every_n_epochs": 0}, ".ckpt"),
        ({"every_n_train_steps": 0}, ".ckpt"),
        ({"train_time_interval": timedelta(0), "save_top_k": -1}, ".ckpt"),
        ({"monitor": "val_loss", "save_top_k": -1}, ".ckpt"),
        ({"monitor": "val_loss", "save_top_k": 1, "mode": "max", "save_last": "link"}, ".ckpt"),
        ({"save_last": True}, ".pt"),
    ],
)
def test_files_and_attributes_equal_lightning(arguments: dict[str, Any], extension: str, tmp_path: Path) -> None:
    found = []
    for kind, base in BOTH:
        folder = tmp_path / kind.__module__
        saves = base(folder, **arguments)
        saves.format, saves.FILE_EXTENSION = "lightning", extension
        fitted(kind, tmp_path, saves)
        names = sorted(each.name for each in folder.iterdir()) if folder.exists() else []
        attributes = ("best_model_path", "last_model_path", "kth_best_model_path")
        found.append((names, *(Path(getattr(saves, name)).name for name in attributes)))
    assert found[1] == found[0]


def test_the_newest_checkpoint_is_kept_without_an_interval(tmp_path: Path) -> None:
    saves = ModelCheckpoint(tmp_path / "saves", every_n_epochs=0, save_last=True)
    fitted(Trainer, tmp_path, saves)
    assert saves.last_model_path == str(tmp_path / "saves" / "last")
    assert (tmp_path / "saves" / "last").resolve().name == "epoch=1-step=20"


@pytest.mark.parametrize("form", ["folder", "lightning"])
def test_the_file_that_was_passed_is_kept(form: str, tmp_path: Path) -> None:
    found: list[list[Any]] = []
    for kind, base in BOTH:
        folder, path = tmp_path / kind.__module__, None
        for max_epochs in (2, 4, 5):  # the third run resumes from the second, and does not remove the first file either
            saves = base(folder, monitor="step", mode="max")
            saves.format = form
            fitted(kind, tmp_path, saves, path=path, max_epochs=max_epochs)
            path = saves.best_model_path
        found.append(sorted(each.name.removesuffix(".ckpt") for each in folder.iterdir()))
    assert found[1] == found[0] == ["epoch=1-step=20", "epoch=3-step=40", "epoch=4-step=50"]


def test_the_passed_file_is_recognized_by_another_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    for max_epochs, path in ((1, None), (2, "link/a/../a/epoch=0-step=10"), (3, "a/epoch=1-step=20")):
        fitted(Trainer, tmp_path, ModelCheckpoint(tmp_path / "a"), path=path, max_epochs=max_epochs)
    assert len(list((tmp_path / "a").iterdir())) == 3


@pytest.mark.parametrize("form", ["folder", "lightning"])
def test_a_search_for_the_newest_checkpoint_does_not_keep_it(form: Any, tmp_path: Path) -> None:
    for max_epochs in (1, 2, 3):
        saves = ModelCheckpoint(save_last=True, format=form)
        fitted(Trainer, tmp_path, saves, path="last", max_epochs=max_epochs, logger=True)
    suffix = ".ckpt" if form == "lightning" else ""
    names = sorted(each.name for each in Path(str(saves.dirpath)).iterdir())
    assert names == [f"epoch=2-step=30{suffix}", f"last{suffix}"]


class Hooks(pl.Callback):
    """Callback that records the calls of its hooks and of the module's hooks, with the epoch."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self.calls.append(("on_save", checkpoint["epoch"], trainer.current_epoch, pl_module.current_epoch))

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self.calls.append(("on_load", checkpoint["epoch"]))

    def state_dict(self) -> dict[str, Any]:
        self.calls.append("state_dict")
        return {"size": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.calls.append(("load_state_dict", state_dict))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.calls.append(("end", trainer.current_epoch))


@pytest.mark.parametrize("form", ["folder", "lightning"])
@pytest.mark.parametrize("every_n_train_steps", [None, 4])
def test_hooks_and_epochs_equal_lightning(every_n_train_steps: int | None, form: str, tmp_path: Path) -> None:
    found = []
    for kind, base in BOTH:
        folder, first, again = tmp_path / kind.__module__, Hooks(), Hooks()
        saves = base(folder, save_top_k=-1, every_n_train_steps=every_n_train_steps)
        saves.format = form
        trainer = fitted(kind, tmp_path, saves, first)
        trainer.save_checkpoint(folder / "end.ckpt")
        read = torch.load if form == "lightning" or kind is pl.Trainer else checkpoint.load
        epochs = {each.name.removesuffix(".ckpt"): read(each)["epoch"] for each in folder.iterdir()}
        resumed = fitted(kind, tmp_path, again, path=saves.best_model_path, max_epochs=3)
        calls = [call for call in first.calls if call != "state_dict"]
        num_states = first.calls[: first.calls.index(("end", 2))].count("state_dict")
        found.append((calls, again.calls, epochs, num_states, resumed.current_epoch, resumed.global_step))
    assert found[1] == found[0]


def test_the_epoch_in_a_file_does_not_move_the_run(tmp_path: Path) -> None:
    """Earlier versions stored the number of completed epochs, and Lightning stores the index of the epoch."""
    saves = ModelCheckpoint(tmp_path / "saves", format="lightning")
    whole = fitted(Trainer, tmp_path, saves, max_epochs=1)
    content = torch.load(saves.best_model_path, weights_only=True)
    for epoch in (0, 1):
        torch.save({**content, "epoch": epoch}, tmp_path / "other.ckpt")
        seen: list[int] = []
        each = pl.callbacks.LambdaCallback(on_train_epoch_start=lambda t, m, seen=seen: seen.append(t.current_epoch))
        resumed = fitted(Trainer, tmp_path, each, path=tmp_path / "other.ckpt", max_epochs=3)
        assert (seen, resumed.global_step, whole.global_step) == ([1, 2], 30, 10)


class WithoutState(torch.optim.lr_scheduler.LambdaLR):
    def state_dict(self) -> Any:
        return None

    def load_state_dict(self, state_dict: Any) -> None:
        assert not state_dict


class SchedulerWithoutState(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [WithoutState(optimizer, lambda epoch: 0.5)]


@pytest.mark.parametrize("kind", [pl.Trainer, Trainer])
@pytest.mark.parametrize("form", ["folder", "lightning"])
def test_a_scheduler_without_a_state_is_resumed(kind: Any, form: str, tmp_path: Path) -> None:
    saves = (ModelCheckpoint if kind is Trainer else pl.callbacks.ModelCheckpoint)(tmp_path / "saves")
    saves.format = form
    fitted(kind, tmp_path, saves, make=SchedulerWithoutState, max_epochs=1)
    resumed = fitted(Trainer, tmp_path, make=SchedulerWithoutState, path=saves.best_model_path)
    assert resumed.global_step == 20


@pytest.mark.parametrize("form", ["folder", "lightning"])
def test_a_saved_checkpoint_has_the_form_of_the_callback(form: Any, tmp_path: Path) -> None:
    trainer = fitted(Trainer, tmp_path, ModelCheckpoint(tmp_path / "saves", format=form), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "mine")
    assert (tmp_path / "mine").is_file() is (form == "lightning")
    (tmp_path / "empty").touch()
    (tmp_path / "link.ckpt").symlink_to(tmp_path / "empty")
    for name in ("empty", "empty", "mine", "link.ckpt"):  # an empty file and an existing checkpoint are replaced
        trainer.save_checkpoint(tmp_path / name)
        assert (
            checkpoint.load_module(Regression, tmp_path / name).state_dict().keys() == Regression().state_dict().keys()
        )
    assert (tmp_path / "empty").is_file()
    trainer.save_checkpoint(tmp_path / "mine", format="lightning")  # replaces a folder
    assert torch.load(tmp_path / "mine")["global_step"] == 10


@pytest.mark.parametrize("form", ["folder", "lightning", None])
def test_a_file_that_is_not_a_checkpoint_is_not_replaced(form: Any, tmp_path: Path) -> None:
    trainer = fitted(Trainer, tmp_path, ModelCheckpoint(tmp_path / "saves"), max_epochs=1)
    torch.save({"state_dict": torch.ones(2)}, tmp_path / "data.ckpt")
    (tmp_path / "notes.txt").write_text("notes")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("notes")
    for name in ("data.ckpt", "notes.txt", "folder"):
        with pytest.raises(RoomierError, match="exists"):
            trainer.save_checkpoint(tmp_path / name, format=form)
    assert (tmp_path / "notes.txt").read_text() == "notes"
    assert torch.equal(torch.load(tmp_path / "data.ckpt")["state_dict"], torch.ones(2))
    with pytest.raises(RoomierError, match="format='zip'"):
        trainer.save_checkpoint(tmp_path / "new", format="zip")


def test_a_checkpoint_that_was_passed_by_a_relative_path_is_kept(tmp_path: Path, monkeypatch: Any) -> None:
    """Checkpoints of interruptions are removed after the next save, except the one that the user passed."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    quiet = {"default_root_dir": "../runs", "accelerator": "cpu", "enable_progress_bar": False, "logger": False}
    first = Trainer(max_steps=2, **quiet)
    first.fit(Regression(), in_order())
    saved = Path(first.checkpoint_callback.best_model_path)
    given = saved.rename(saved.with_name("interrupted-step=2"))
    other = Path(shutil.copytree(given, given.with_name("interrupted-step=1")))
    again = Trainer(max_steps=4, **quiet)
    again.fit(Regression(), in_order(), ckpt_path=f"../runs/version_0/checkpoints/{given.name}")
    assert again.global_step == 4
    assert given.is_dir()
    assert not other.exists()
