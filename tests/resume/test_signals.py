"""SIGTERM and Ctrl-C finish the step, save and exit. The resumed run is equal to an undisturbed run."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from roomier import Callback, Trainer
from roomier.callbacks import EarlyStopping, ModelCheckpoint
from tests.covering import chosen, covering, few

Make = Callable[..., Any]


class Sender(Callback):
    """Callback that sends a signal to this process from the hook ``where``, after ``step`` optimizer steps.

    Args:
        nth: number of the call of the hook that sends the signal, counted from 1. None never sends.
    """

    def __init__(self, where: str, step: int, nth: int | None, number: signal.Signals) -> None:
        self.step, self.nth, self.number = step, nth, number
        setattr(self, where, self.send)

    def send(self, trainer: Trainer, *_: Any) -> None:
        if self.nth is None or trainer.global_step < self.step:
            return
        self.nth -= 1
        if self.nth == 0:
            os.kill(os.getpid(), self.number)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.randn(22, 3))


@dataclass
class Moment:
    """Time of the signal.

    Attributes:
        where, step, nth: arguments of Sender.
        saved_step: number of optimizer steps that are complete when the process exits.
    """

    where: str
    step: int
    saved_step: int
    nth: int = 1
    number: signal.Signals = signal.SIGTERM
    options: dict[str, Any] = field(default_factory=dict)
    loader: Make | None = None


def unknown_length() -> DataLoader[Tensor]:
    return DataLoader(Stream(), batch_size=2)


ACCUMULATING = {"accumulate_grad_batches": 4}
OFTEN = {"val_check_interval": 3}

# 11 training batches and 3 validation batches per epoch. By default, validation runs at the end of the epoch.
MOMENTS = {
    "within a step": Moment("on_before_backward", 4, 5),
    "Ctrl-C within a step": Moment("on_before_backward", 4, 5, number=signal.SIGINT),
    "after a step": Moment("on_train_batch_end", 4, 4),
    "before the first step": Moment("on_train_start", 0, 1),
    "in the last step of an epoch": Moment("on_before_backward", 10, 11),
    "in the first step of an epoch": Moment("on_train_epoch_start", 11, 12),
    "in an accumulation": Moment("on_train_batch_end", 1, 2, nth=2, options=ACCUMULATING),
    "in the smaller last accumulation": Moment("on_train_batch_end", 2, 3, nth=3, options=ACCUMULATING),
    "in a validation within an epoch": Moment("on_validation_batch_end", 3, 3, options=OFTEN),
    "after the last batch of a validation": Moment("on_validation_batch_end", 3, 3, nth=3, options=OFTEN),
    "at the end of a validation within an epoch": Moment("on_validation_end", 6, 6, options=OFTEN),
    "in the validation of an epoch's end": Moment("on_validation_batch_end", 11, 11, nth=2),
    "in the validation of the last epoch's end": Moment("on_validation_start", 22, 22, options={"max_steps": 22}),
    "in a validation of the last step": Moment("on_validation_start", 36, 36, options={"max_steps": 36, **OFTEN}),
    "at the end of an epoch": Moment("on_train_epoch_end", 11, 11),
    "while callbacks save": Moment("on_save_point", 5, 5),
    "without a length, within a step": Moment("on_before_backward", 4, 5, loader=unknown_length),
    "without a length, in the validation at the end": Moment("on_validation_start", 11, 11, loader=unknown_length),
    "without a length, at the end of an epoch": Moment("on_train_epoch_end", 11, 11, loader=unknown_length),
}


IN_MAKE_TEST = {
    "within a step",
    "in the smaller last accumulation",
    "at the end of a validation within an epoch",
    "in the validation of the last epoch's end",
    "at the end of an epoch",
    "while callbacks save",
    "without a length, in the validation at the end",
}


@pytest.mark.parametrize("name", chosen(MOMENTS, IN_MAKE_TEST))
def test_the_resumed_run_is_equal_to_the_undisturbed_run(
    name: str, runs: Any, net: Any, shuffled: Make, val_batches: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    moment = MOMENTS[name]

    def run(folder: str, nth: int | None, **options: Any) -> None:
        watching = [
            EarlyStopping("val_loss", patience=50),
            ModelCheckpoint(monitor="val_loss", save_top_k=2),
            ModelCheckpoint(every_n_train_steps=3, save_top_k=-1, filename="every-{step}"),
            Sender(moment.where, moment.step, nth, moment.number),
        ]
        limits = {"max_steps": 18, **moment.options}
        runs.fit(folder, net, moment.loader or shuffled, val_batches, callbacks=watching, **limits, **options)

    run("straight", None)
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(SystemExit) as left:
        run("stopped", moment.nth)
    assert left.value.code == 128 + moment.number
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    told = capfd.readouterr().err
    assert f"{moment.number.name}: the run ends after this step" in told
    assert f"stopped by {moment.number.name} at step {moment.saved_step}, saved at" in told
    assert "Resume with trainer.fit(..., ckpt_path='last')" in told
    assert runs.last_state("stopped")["progress"]["global_step"] == moment.saved_step

    run("stopped", None, ckpt_path="last")
    assert runs.differences("straight", "stopped") == []
    assert runs.rows("stopped") == runs.rows("straight")
    assert saved_names(runs.root / "stopped") == saved_names(runs.root / "straight")


def saved_names(root: Path) -> list[str]:
    """Return the names of the checkpoints that callbacks saved, without checkpoints of interruptions."""
    names = [path.name for path in root.glob("version_*/checkpoints/*")]
    return sorted(name for name in names if not name.startswith("interrupted-"))


class SenderToAll(Sender):
    """Callback that sends the signal to this process and its workers, as a terminal or a job scheduler does."""

    def send(self, trainer: Trainer, *_: Any) -> None:
        if self.nth is None or trainer.global_step < self.step:
            return
        self.nth = None
        workers = [child.pid for child in psutil.Process().children()]
        assert workers
        pids = [str(pid) for pid in (os.getpid(), *workers)]
        subprocess.run(["kill", f"-{self.number.name.removeprefix('SIG')}", *pids], check=True)
        time.sleep(0.2)  # enough time to detect a worker that exits


@pytest.mark.parametrize(
    ("moment", "number"),
    few(covering([("on_before_backward", 2), ("on_validation_batch_start", 3)], [signal.SIGTERM, signal.SIGINT])),
)
def test_workers_ignore_a_signal_to_all_processes_of_the_job(
    moment: tuple[str, int], number: signal.Signals, runs: Any, net: Any, noisy: Any
) -> None:
    where, saved_step = moment

    def loader() -> DataLoader[Tensor]:
        return DataLoader(noisy(), batch_size=2, shuffle=True, num_workers=1)

    def run(folder: str, nth: int | None, **options: Any) -> None:
        sender = SenderToAll(where, 1, nth, number)
        runs.fit(folder, net, loader, loader, callbacks=[sender], max_steps=5, **ACCUMULATING, **options)

    run("straight", None)
    with pytest.raises(SystemExit) as left:
        run("stopped", 1, num_sanity_val_steps=0)
    assert left.value.code == 128 + number
    assert runs.last_state("stopped")["progress"]["global_step"] == saved_step
    run("stopped", None, ckpt_path="last")
    assert runs.differences("straight", "stopped") == []


def test_the_checkpoint_of_an_interruption_is_kept_until_the_next_checkpoint(
    runs: Any, net: Any, shuffled: Make
) -> None:
    def kept() -> list[str]:
        (folder,) = (runs.root / "run").glob("version_*/checkpoints")
        return sorted(path.name for path in folder.iterdir())

    for step in (2, 4, 6):
        sender = Sender("on_train_batch_end", step, 1, signal.SIGTERM)
        with pytest.raises(SystemExit):
            runs.fit("run", net, shuffled, max_steps=18, ckpt_path="last", callbacks=[sender])
        assert kept() == [f"interrupted-step={step}"]
    runs.fit("run", net, shuffled, max_steps=12, ckpt_path="last")
    assert kept() == ["epoch=1-step=12"]


def test_a_checkpoint_outside_the_run_folder_is_reported(
    runs: Any, net: Any, shuffled: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    saver = ModelCheckpoint(dirpath=runs.root / "elsewhere", every_n_train_steps=4)
    sender = Sender("on_train_batch_end", 4, 1, signal.SIGTERM)
    with pytest.raises(SystemExit):
        runs.fit("run", net, shuffled, max_steps=18, callbacks=[sender, saver])
    saved = runs.root / "elsewhere" / "epoch=0-step=4"
    assert f"ckpt_path={str(saved)!r}" in capfd.readouterr().err
    trainer = runs.fit("run", net, shuffled, max_steps=18, ckpt_path=saved)
    assert trainer.global_step == 18


def test_a_checkpoint_with_only_weights_does_not_count_as_a_saved_run(runs: Any, net: Any, shuffled: Make) -> None:
    saver = ModelCheckpoint(save_weights_only=True, every_n_train_steps=4)
    with pytest.raises(SystemExit):
        runs.fit(
            "run",
            net,
            shuffled,
            max_steps=18,
            callbacks=[saver, Sender("on_train_batch_end", 4, 1, signal.SIGTERM)],
        )
    assert "optimizers" in runs.last_state("run")


def test_without_checkpointing_a_notice_reports_that_no_checkpoint_was_saved(
    runs: Any, net: Any, shuffled: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    sender = Sender("on_train_batch_end", 4, 1, signal.SIGTERM)
    with pytest.raises(SystemExit):
        runs.fit("run", net, shuffled, max_steps=18, callbacks=[sender], enable_checkpointing=False)
    assert "at step 4. No checkpoint was saved, because checkpoints are disabled" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("where", "options", "message"),
    [
        ("on_fit_start", {"num_sanity_val_steps": 0}, "before the first step. There is no state to save"),
        ("on_sanity_check_start", {}, "during an evaluation; its metrics so far are dropped"),
        ("on_train_end", {}, "was received after training had ended: the run is complete"),
    ],
)
def test_before_and_after_training(
    where: str,
    options: dict[str, Any],
    message: str,
    runs: Any,
    net: Any,
    shuffled: Make,
    val_batches: Make,
    capfd: pytest.CaptureFixture[str],
) -> None:
    sender = Sender(where, 0, 1, signal.SIGTERM)
    with pytest.raises(SystemExit) as left:
        runs.fit("run", net, shuffled, val_batches, max_steps=3, callbacks=[sender], **options)
    assert left.value.code == 143
    assert message in capfd.readouterr().err


def test_a_signal_in_the_last_step_finishes_the_run_first(
    runs: Any, net: Any, shuffled: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    for folder, nth in (("straight", None), ("stopped", 1)):
        sender = Sender("on_before_backward", 17, nth, signal.SIGTERM)
        if nth is None:
            runs.fit(folder, net, shuffled, max_steps=18, callbacks=[sender])
        else:
            with pytest.raises(SystemExit) as left:
                runs.fit(folder, net, shuffled, max_steps=18, callbacks=[sender])
    assert left.value.code == 143
    assert "the run is complete" in capfd.readouterr().err
    assert runs.differences("straight", "stopped") == []
    assert runs.rows("stopped") == runs.rows("straight")


def test_a_signal_ends_a_separate_validation(
    runs: Any, net: Any, val_batches: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    sender = Sender("on_validation_batch_end", 0, 1, signal.SIGINT)
    trainer = Trainer(default_root_dir=runs.root, accelerator="cpu", callbacks=[sender], enable_progress_bar=False)
    with pytest.raises(SystemExit) as left:
        trainer.validate(net(), val_batches())
    assert left.value.code == 130
    assert "during an evaluation" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("second", "kind"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)], ids=["TERM", "INT"]
)
def test_a_second_signal_exits_immediately(
    second: signal.Signals, kind: type[BaseException], runs: Any, net: Any, shuffled: Make
) -> None:
    class Impatient(Callback):
        last_hook = ""

        def on_before_backward(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 4:
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), second)

        def on_after_backward(self, trainer: Trainer, *_: Any) -> None:
            assert trainer.global_step < 4, "the step continued"

    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    every = ModelCheckpoint(every_n_train_steps=3)
    with pytest.raises(kind):
        runs.fit("run", net, shuffled, max_steps=18, callbacks=[Impatient(), every])
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert runs.last_state("run")["progress"]["global_step"] == 3, "the earlier checkpoint still exists"
