"""Resuming a run: its position, the restored state, and runs without steps or checkpoints to resume."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from roomier import Callback, CheckpointError, Module, Trainer, checkpoint
from roomier.callbacks import EarlyStopping, ModelCheckpoint
from roomier.checkpoint.commit import committed_folder

Make = Callable[..., Any]


# Ends of a run ------------------------------------------------------------------------------------------------------


def test_the_last_step_is_saved_within_an_epoch(runs: Any, net: Any, shuffled: Make) -> None:
    trainer = runs.fit("run", net, shuffled, max_steps=7)
    folder = Path(trainer.log_dir) / "checkpoints"
    assert [path.name for path in checkpoint.list_complete(folder)] == ["epoch=0-step=7"]
    assert checkpoint.peek(folder / "epoch=0-step=7")["progress"]["batch_idx"] == 7


def test_the_newest_checkpoint_is_saved_in_addition_to_the_best(
    runs: Any, net: Any, shuffled: Make, val_batches: Make
) -> None:
    saver = ModelCheckpoint(monitor="val_loss", save_last=True)
    runs.fit("run", net, shuffled, val_batches, max_steps=15, callbacks=[saver])
    assert os.path.basename(saver.last_model_path) == "last"
    assert os.path.basename(saver.best_model_path) == "epoch=0-step=11"
    assert Path(saver.dirpath, "last").resolve().name == "epoch=1-step=15"


def test_resuming_a_finished_run_prints_a_notice(
    runs: Any, net: Any, shuffled: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    for limits in ({"max_steps": 7}, {"max_epochs": 2}):
        folder = next(iter(limits))
        runs.fit(folder, net, shuffled, **limits)
        before, rows = runs.last_state(folder), runs.rows(folder)
        written_ns = os.stat(checkpoint.find_last(runs.root / folder)).st_mtime_ns
        capfd.readouterr()
        trained = Recorder()
        trainer = runs.fit(folder, net, shuffled, ckpt_path="last", callbacks=[trained], **limits)
        assert "nothing to train: the run is at step" in capfd.readouterr().err
        assert trained.hooks == ["on_fit_start", "on_fit_end"]
        assert trainer.global_step == before["progress"]["global_step"]
        assert runs.rows(folder) == rows
        assert os.stat(checkpoint.find_last(runs.root / folder)).st_mtime_ns == written_ns
        assert all(torch.equal(value, before["module"][name]) for name, value in trainer.model.state_dict().items())


class Recorder(Callback):
    def __init__(self) -> None:
        self.hooks: list[str] = []

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
        self.hooks.append("on_fit_start")

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        self.hooks.append("on_train_start")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        self.hooks.append("on_train_epoch_end")

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None:
        self.hooks.append("on_train_end")

    def on_fit_end(self, trainer: Trainer, pl_module: Module) -> None:
        self.hooks.append("on_fit_end")


def test_last_without_a_checkpoint_starts_a_new_run_with_a_notice(
    runs: Any, net: Any, shuffled: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = runs.fit("run", net, shuffled, max_steps=2, ckpt_path="last")
    assert trainer.global_step == 2
    assert "no complete checkpoint" in capfd.readouterr().err


def test_an_evaluation_of_last_without_a_checkpoint_is_an_error(net: Any, shuffled: Make, tmp_path: Path) -> None:
    trainer = Trainer(default_root_dir=tmp_path / "empty", limit_val_batches=1)
    with pytest.raises(CheckpointError, match=r"ckpt_path='last'.*empty contains none.*default_root_dir"):
        trainer.validate(net(), shuffled(), ckpt_path="last")


def test_a_checkpoint_with_only_weights_cannot_be_resumed(runs: Any, net: Any, shuffled: Make) -> None:
    saver = ModelCheckpoint(save_weights_only=True)
    runs.fit("run", net, shuffled, max_steps=2, callbacks=[saver])
    with pytest.raises(CheckpointError, match="weights only"):
        runs.fit("run", net, shuffled, max_steps=4, ckpt_path="last")


# Explicit saves -----------------------------------------------------------------------------------------------------


def test_a_save_after_a_fit_that_ended_within_an_epoch_can_be_resumed(runs: Any, net: Any, shuffled: Make) -> None:
    """The end of the fit logs the incomplete epoch. The resumed run still logs one mean for the full epoch."""
    runs.fit("straight", net, shuffled, max_steps=18)
    trainer = runs.fit("saved", net, shuffled, max_steps=7, enable_checkpointing=False)
    trainer.save_checkpoint(runs.root / "explicit")
    runs.fit("resumed", net, shuffled, max_steps=18, ckpt_path=runs.root / "explicit")
    assert runs.differences("straight", "resumed", with_ledger=False) == []
    assert runs.rows("resumed") == [row for row in runs.rows("straight") if row["step"] > 7]


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_end", "on_train_epoch_end"])
def test_a_save_from_a_hook_can_be_resumed(hook: str, runs: Any, net: Any, shuffled: Make, val_batches: Make) -> None:
    class SaveOnce(Callback):
        def __init__(self, was_saved: bool = False) -> None:
            self.was_saved = was_saved

    def save(self: Any, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step >= 4 and not trainer.sanity_checking and not self.was_saved:
            self.was_saved = True
            trainer.save_checkpoint(runs.root / "from_hook")

    setattr(SaveOnce, hook, save)
    validated = {"make_val": val_batches, "val_check_interval": 4}
    runs.fit("straight", net, shuffled, max_steps=18, callbacks=[SaveOnce()], **validated)
    first = checkpoint.peek(runs.root / "from_hook")["progress"]["global_step"]
    assert first == (11 if hook == "on_train_epoch_end" else 4)
    done = [SaveOnce(was_saved=True)]
    runs.fit("resumed", net, shuffled, max_steps=18, ckpt_path=runs.root / "from_hook", callbacks=done, **validated)
    assert runs.differences("straight", "resumed", with_ledger=False) == []
    assert runs.rows("resumed") == [row for row in runs.rows("straight") if row["step"] > first]


def test_an_outdated_link_after_a_kill_is_corrected(runs: Any, net: Any, shuffled: Make) -> None:
    """The link is corrected even if no steps remain, because the kill can happen after the last save."""

    def saving() -> dict[str, Any]:
        return {"callbacks": [ModelCheckpoint(every_n_train_steps=5, save_last=True)], "max_steps": 10}

    trainer = runs.fit("run", net, shuffled, **saving())
    link = Path(trainer.log_dir) / "checkpoints" / "last"
    assert os.readlink(link) == "epoch=0-step=10"
    link.unlink()
    link.symlink_to("epoch=0-step=5")
    runs.fit("run", net, shuffled, ckpt_path="last", **saving())
    assert os.readlink(link) == "epoch=0-step=10"


def test_last_clears_leftovers_of_a_killed_save(runs: Any, net: Any, shuffled: Make) -> None:
    trainer = runs.fit("run", net, shuffled, max_steps=2)
    folder = Path(trainer.log_dir) / "checkpoints"
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    with committed_folder(folder / "alive", 0) as aside:
        ours = aside.with_name(aside.name.replace("alive", "step=1").replace(str(os.getpid()), str(killed.pid)))
        ours.mkdir()
        runs.fit("run", net, shuffled, max_steps=2, ckpt_path="last")
        assert not ours.exists(), "the process that created it is dead"
        assert aside.exists(), "the folder of a running save is kept"


# State of callbacks -------------------------------------------------------------------------------------------------


def test_a_run_stopped_early_resumes_exactly(runs: Any, net: Any, shuffled: Make, val_batches: Make) -> None:
    runs.fit("straight", net, shuffled, val_batches, max_epochs=4)
    stopper = EarlyStopping("val_loss", stopping_threshold=1e9)  # after the first validation
    stopped = runs.fit("resumed", net, shuffled, val_batches, max_epochs=4, callbacks=[stopper])
    assert stopped.global_step == 11
    runs.fit("resumed", net, shuffled, val_batches, max_epochs=4, ckpt_path="last")
    assert runs.differences("straight", "resumed") == []
    assert runs.rows("resumed") == runs.rows("straight")


def test_patience_is_counted_across_a_resume(runs: Any, net: Any, shuffled: Make, val_batches: Make) -> None:
    def waits() -> dict[str, Any]:
        # No validation is better than the first by 10, so the run stops at the fourth validation.
        return {"callbacks": [EarlyStopping("val_loss", min_delta=10.0, patience=3)], "val_check_interval": 3}

    assert runs.fit("straight", net, shuffled, val_batches, max_steps=50, **waits()).global_step == 14
    runs.fit("resumed", net, shuffled, val_batches, max_steps=7, **waits())
    trainer = runs.fit("resumed", net, shuffled, val_batches, max_steps=50, ckpt_path="last", **waits())
    assert trainer.global_step == 14
    assert trainer.early_stopping_callback.wait_count == 3
    assert runs.differences("straight", "resumed", with_ledger=False) == []


def test_the_ledger_is_equal_to_the_ledger_of_an_undisturbed_run(
    runs: Any, net: Any, shuffled: Make, val_batches: Make
) -> None:
    def saving() -> dict[str, Any]:
        best = ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True)
        every = ModelCheckpoint(dirpath=None, every_n_train_steps=4, filename="every-{step}", save_top_k=-1)
        return {"callbacks": [best, every], "val_check_interval": 3}

    straight = runs.fit("straight", net, shuffled, val_batches, max_steps=36, **saving())
    for stop in (12, 24, 36):  # the undisturbed run also saves at these steps
        resumed = runs.fit("resumed", net, shuffled, val_batches, max_steps=stop, ckpt_path="last", **saving())
    for one, other in zip(straight.checkpoint_callbacks, resumed.checkpoint_callbacks, strict=True):
        assert one.best_k_models.keys() != {}
        ranks = [{Path(path).name: float(score) for path, score in each.best_k_models.items()} for each in (one, other)]
        assert ranks[0] == ranks[1]
        assert Path(one.best_model_path).name == Path(other.best_model_path).name
    folders = [Path(trainer.log_dir) / "checkpoints" for trainer in (straight, resumed)]
    names = [sorted(path.name for path in folder.iterdir()) for folder in folders]
    assert names[0] == names[1]


# Data and validation ------------------------------------------------------------------------------------------------


class Numbers(Dataset[Tensor]):
    """Dataset that records the samples that were read. Sample i is i."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Tensor:
        self.read.append(index)
        return torch.full((3,), float(index))


def test_resume_with_another_batch_size_reads_each_sample_one_time(runs: Any, net: Any) -> None:
    before, after = Numbers(48), Numbers(48)
    runs.fit("run", net, lambda: DataLoader(before, batch_size=4, shuffle=True), max_steps=5)
    trainer = runs.fit(
        "run", net, lambda: DataLoader(after, batch_size=7, shuffle=True), max_epochs=1, ckpt_path="last"
    )
    assert len(before.read) == 20
    assert sorted(before.read + after.read) == list(range(48))
    assert (trainer.current_epoch, trainer.global_step) == (1, 5 + 4)


@pytest.mark.parametrize(
    "options",
    [
        {"num_sanity_val_steps": 2},
        {"num_sanity_val_steps": 0, "val_check_interval": 3},
        {"val_check_interval": 1, "inference_mode": False},
    ],
    ids=str,
)
def test_validation_does_not_change_training(
    options: dict[str, Any], runs: Any, net: Any, shuffled: Make, noisy: Any
) -> None:
    """The validation draws from every generator, shuffles, and logs."""
    runs.fit("without", net, shuffled, max_steps=18)
    runs.fit("with", net, shuffled, lambda: DataLoader(noisy(6), batch_size=2, shuffle=True), max_steps=18, **options)
    differing = [each for each in runs.differences("without", "with", with_ledger=False) if "val_loss" not in each]
    assert differing == []


# Hooks ----------------------------------------------------------------------------------------------------------


def test_random_numbers_drawn_by_hooks_at_the_start_have_no_effect(runs: Any, net: Any, shuffled: Make) -> None:
    class Draws(Callback):
        def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
            torch.rand(5)

        def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
            torch.rand(5)

    for name, stops in (("straight", (18,)), ("resumed", (5, 11, 18))):
        for stop in stops:
            runs.fit(name, net, shuffled, max_steps=stop, ckpt_path="last", callbacks=[Draws()])
    assert runs.differences("straight", "resumed", with_ledger=False) == []


def test_a_hook_before_training_does_not_change_the_workers_of_the_first_epoch(runs: Any) -> None:
    """The workers of epoch 0 have a copy of the dataset from before ``on_train_start``, also after a resume."""

    class Counts(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
            trainer.train_dataloader.dataset.offset = 1.0

        def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, i: int) -> None:
            read.append(float(batch[0]))

    read: list[float] = []
    options: dict[str, Any] = {"ckpt_path": "last", "callbacks": [Counts()]}
    for stop in (2, 6, 8):
        runs.fit("run", Line, lambda: DataLoader(Offset(), num_workers=1), max_steps=stop, **options)
    assert read == [0.0] * 4 + [1.0] * 4


class Offset(Dataset[Tensor]):
    offset = 0.0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((1,), self.offset)


class Line(Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(1, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.line(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)
