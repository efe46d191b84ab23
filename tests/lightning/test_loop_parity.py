"""Rules of the loop that a user of Lightning's Trainer relies on, compared with Lightning."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

import roomier
from roomier import Trainer
from tests.covering import few
from tests.lightning.both import make_trainer, numbers, quiet_lightning
from tests.lightning.modules import Regression, in_order, pl, samples, shuffled
from tests.lightning.rows import Rows

KINDS = (pl.Trainer, Trainer)


def of_both(run: Callable[[Any], Any]) -> list[Any]:
    """Return the results of ``run`` with Lightning's Trainer and with roomier's."""
    with quiet_lightning():
        return [run(kind) for kind in KINDS]


def callbacks_of(kind: Any) -> Any:
    return roomier.callbacks if kind is Trainer else pl.callbacks


class ByHand(Regression):
    """Module that steps twice per batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()


@pytest.mark.parametrize("where", ["training_step", "validation_step", "setup"])
def test_a_keyboard_interrupt_of_user_code_ends_the_process(where: str, tmp_path: Path) -> None:
    class Interrupts(Regression):
        pass

    def interrupt(self: Any, *_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    setattr(Interrupts, where, interrupt)

    class Watches(pl.Callback):
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self.seen = type(exception), trainer.current_epoch

    def run(kind: Any) -> Any:
        watch = Watches()
        trainer = make_trainer(kind, tmp_path, max_epochs=1, callbacks=[watch])
        with patch("signal.signal"), pytest.raises(SystemExit) as end:  # Lightning ignores later signals
            trainer.fit(Interrupts(), in_order(), in_order())
        return end.value.code, (trainer.interrupted, trainer.state.status.value, trainer.global_step, watch.seen)

    (code, expected), (own_code, own) = of_both(run)
    assert own == expected
    assert (code, own_code) == (1, 130)  # the exit code of a process that Ctrl-C ends


def test_a_fit_without_an_optimizer_updates_nothing(tmp_path: Path, capsys: Any) -> None:
    class Frozen(Regression):
        def configure_optimizers(self) -> None:
            return None

    def run(kind: Any) -> Any:
        torch.manual_seed(1)
        module = Frozen()
        before = [each.clone() for each in module.parameters()]
        trainer = make_trainer(kind, tmp_path, max_epochs=2)
        trainer.fit(module, in_order(), in_order())
        assert all(map(torch.equal, before, module.parameters()))
        return {"step": trainer.global_step, "epoch": trainer.current_epoch, **numbers(trainer.callback_metrics)}

    expected, own = of_both(run)
    assert own == pytest.approx(expected)
    assert own["step"] == 20
    assert "Frozen.configure_optimizers returned None" in capsys.readouterr().err


@pytest.mark.parametrize("loader", [list, lambda: DataLoader([], 2), lambda: DataLoader(samples(), 99, drop_last=True)])
def test_a_fit_without_training_batches_ends_before_its_first_step(loader: Any, tmp_path: Path, capsys: Any) -> None:
    class Names(pl.Callback):
        def __init__(self) -> None:
            self.names: list[str] = []

        def on_train_start(self, *_: Any) -> None:
            self.names.append("train")

        def on_validation_start(self, *_: Any) -> None:
            self.names.append("validation")

        def on_fit_end(self, *_: Any) -> None:
            self.names.append("end")

    def run(kind: Any) -> Any:
        names = Names()
        trainer = make_trainer(kind, tmp_path, max_epochs=2, callbacks=[names])
        trainer.fit(Regression(), loader(), in_order())
        return trainer.global_step, trainer.num_training_batches, trainer.state.status.value, names.names

    expected, own = of_both(run)
    assert own == expected == (0, 0, "finished", ["validation", "end"])
    assert "nothing to train: train_dataloaders yields no batches" in capsys.readouterr().err


def test_evaluations_return_the_columns_of_the_loggers(tmp_path: Path) -> None:
    class Logs(Regression):
        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("both", self.loss(batch), on_step=True, on_epoch=True)
            self.log("step", 2.0, on_step=True, on_epoch=False)
            self.log("hidden", 3.0, logger=False)
            self.log("epoch", self.loss(batch))

        validation_step = test_step

        def on_test_epoch_end(self) -> None:
            self.log("last", 4.0)

    def run(kind: Any) -> Any:
        torch.manual_seed(1)
        module, trainer = Logs(), make_trainer(kind, tmp_path)
        tested = [trainer.test(module, loaders, verbose=False) for loaders in (in_order(), [in_order(), in_order(2)])]
        return [*tested, trainer.validate(module, in_order(), verbose=False)]

    expected, own = of_both(run)
    for metrics, of_lightning in zip(own, expected, strict=True):
        assert metrics == [pytest.approx(each) for each in of_lightning]
    assert own[0][0].keys() == {"both_epoch", "epoch", "last"}


@pytest.mark.parametrize("keywords", few([{"accumulate_grad_batches": 2}, {}, {"limit_val_batches": 0}]), ids=str)
def test_gradients_are_zeroed_once_per_step(keywords: dict[str, Any], tmp_path: Path) -> None:
    def run(kind: Any) -> Any:
        trainer = make_trainer(kind, tmp_path, max_epochs=2, **keywords)
        with patch("torch.optim.AdamW.zero_grad") as zero_grad:
            trainer.fit(Regression(), in_order(), in_order())
        return trainer.global_step, zero_grad.call_count

    expected, own = of_both(run)
    assert own == expected
    assert own[0] == own[1] >= 10


def test_gradients_from_before_a_fit_are_zeroed(tmp_path: Path) -> None:
    def run(kind: Any) -> Any:
        torch.manual_seed(1)
        module = Regression()
        module.net(torch.ones(3, 4)).sum().backward()
        make_trainer(kind, tmp_path, max_epochs=1).fit(module, in_order(), in_order())
        return module.net[0].weight.detach()

    expected, own = of_both(run)
    torch.testing.assert_close(own, expected)


def test_step_passes_arguments_to_the_optimizer(tmp_path: Path) -> None:
    class Taking(torch.optim.SGD):
        given: list[Any]

        def step(self, closure: Any = None, **options: Any) -> Any:  # type: ignore[override]
            self.given.append(options)
            return super().step(closure)

    class Passes(ByHand):
        def configure_optimizers(self) -> Any:
            self.optimizer = Taking(self.parameters(), lr=0.1)
            self.optimizer.given = []
            return [self.optimizer], [StepLR(self.optimizer, 1)]

        def training_step(self, batch: Any, batch_idx: int) -> None:
            def closure() -> Any:
                self.optimizers().zero_grad()
                loss = self.loss(batch)
                self.manual_backward(loss)
                return loss

            self.optimizers().step(closure=closure, kind="a")
            self.optimizers().step(kind="b", number=batch_idx)
            self.lr_schedulers().step()

    def run(kind: Any) -> Any:
        torch.manual_seed(1)
        module, trainer = Passes(), make_trainer(kind, tmp_path, max_epochs=1, limit_train_batches=2)
        trainer.fit(module, in_order())
        return module.optimizer.given, trainer.global_step, module.optimizer.param_groups[0]["lr"]

    expected, own = of_both(run)
    assert own == expected
    assert own[0][-1] == {"kind": "b", "number": 1}


class Scheduled(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [StepLR(optimizer, 1)]


@pytest.mark.parametrize("module", few([Scheduled, Regression, ByHand]))
@pytest.mark.parametrize("interval", [None, "step", "epoch"])
def test_learning_rates_are_recorded_as_often(module: Any, interval: Any, tmp_path: Path) -> None:
    def run(kind: Any) -> Any:
        monitor = callbacks_of(kind).LearningRateMonitor(interval, log_momentum=True, log_weight_decay=True)
        trainer = make_trainer(kind, tmp_path, logger=Rows(), callbacks=[monitor], log_every_n_steps=3, max_epochs=2)
        trainer.fit(module(), in_order())
        lasts = monitor.last_momentum_values, monitor.last_weight_decay_values
        rows = [row for _, row in trainer.logger.rows if any(name.startswith("lr-") for name in row)]
        return monitor.lrs, lasts, len(rows)

    expected, own = of_both(run)
    assert own == expected


def test_loggers_are_the_loggers_that_were_passed(tmp_path: Path) -> None:
    logger = roomier.loggers.TensorBoardLogger(tmp_path / "board")
    trainer = make_trainer(Trainer, tmp_path, logger=logger, max_epochs=1, log_every_n_steps=1)
    assert trainer.loggers == [logger]
    trainer.fit(Regression(), in_order())
    assert (Path(trainer.log_dir) / "metrics.jsonl").exists()
    for each in make_trainer(Trainer, tmp_path, logger=None).loggers:
        each.log_graph(Regression())  # does nothing, as in Lightning


def test_a_progress_bar_has_its_trainer(tmp_path: Path) -> None:
    bar = roomier.callbacks.ProgressBar()
    with pytest.raises(TypeError, match="reference has not been set yet"):
        _ = bar.trainer
    trainer = make_trainer(Trainer, tmp_path, callbacks=[bar], enable_progress_bar=True, max_epochs=1)
    trainer.fit(Regression(), in_order())
    assert bar.trainer is trainer


class Locked(Regression):
    """Module that cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class ReadsValues(Regression):
    """Module whose step reads the memory of its batch, so it cannot run without values."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * float(batch[0].numpy().size > 0)


@pytest.mark.parametrize("module", few([ReadsValues, Locked, ByHand]))
def test_auto_trains_a_model_that_the_planner_cannot_run(module: Any, tmp_path: Path, capsys: Any) -> None:
    trainer = make_trainer(Trainer, tmp_path, strategy="auto", max_epochs=1)
    trainer.fit(module(), in_order(), in_order())
    assert trainer.global_step == (20 if module is ByHand else 10)
    assert trainer.plan.parallel.strategy == "single"
    assert "strategy='auto' uses 'single', because no forecast is possible" in capsys.readouterr().err
    with pytest.raises(roomier.RoomierError):
        make_trainer(Trainer, tmp_path, strategy="auto", memory_budget="1GiB").fit(module(), in_order())


def test_overfit_batches_reads_both_loaders_in_order(tmp_path: Path) -> None:
    class Sums(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.sums: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.sums.append(float(batch[0].sum()))
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.sums.append(float(batch[0].sum()))

    def run(kind: Any) -> Any:
        module, trainer = Sums(), make_trainer(kind, tmp_path, max_epochs=2, overfit_batches=2)
        trainer.fit(module, shuffled(), shuffled(seed=1))
        return module.sums, trainer.num_val_batches

    expected, own = of_both(run)
    assert own == expected


class ReadsIterator(Regression):
    """Module whose steps receive the iterator of the loader."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[Any] = []
        self.num_reads = 1

    def training_step(self, dataloader_iter: Any) -> Any:
        for _ in range(self.num_reads):
            batch, batch_idx, dataloader_idx = next(dataloader_iter)
            self.read.append((batch_idx, dataloader_idx, float(batch[0].sum())))
        loss = self.loss(batch)
        self.log("train_loss", loss, batch_size=len(batch[0]))
        return loss

    def validation_step(self, dataloader_iter: Any) -> Any:
        batch, batch_idx, dataloader_idx = next(dataloader_iter)
        self.read.append((batch_idx, dataloader_idx, float(batch[0].sum())))
        self.log("val_loss", self.loss(batch), batch_size=len(batch[0]))

    test_step = validation_step

    def predict_step(self, dataloader_iter: Any) -> Any:
        return self(next(dataloader_iter)[0][0])


def test_steps_read_an_iterator(tmp_path: Path) -> None:
    def run(kind: Any) -> Any:
        torch.manual_seed(1)
        module, trainer = ReadsIterator(), make_trainer(kind, tmp_path, max_epochs=2)
        trainer.fit(module, shuffled(), in_order(2))
        tested = trainer.test(module, in_order(3), verbose=False)
        return module.read, tested, torch.cat(trainer.predict(module, in_order(3)))

    (read, tested, predicted), (own_read, own_tested, own_predicted) = of_both(run)
    assert own_read == read
    assert own_tested == [pytest.approx(each) for each in tested]
    torch.testing.assert_close(own_predicted, predicted)


def test_a_run_of_steps_that_read_an_iterator_resumes_exactly(tmp_path: Path) -> None:
    def fit(path: Any = None, **keywords: Any) -> tuple[Any, ReadsIterator]:
        torch.manual_seed(1)
        module, trainer = ReadsIterator(), make_trainer(Trainer, tmp_path, **keywords)
        trainer.fit(module, shuffled(), ckpt_path=path)
        return trainer, module

    whole, (trainer, first) = fit(max_epochs=2)[1], fit(max_steps=13)
    trainer.save_checkpoint(tmp_path / "saved")
    rest = fit(tmp_path / "saved", max_epochs=2)[1]
    assert first.read + rest.read == whole.read


@pytest.mark.parametrize(("num_reads", "problem"), [(2, "reads more than one batch"), (0, "did not read the batch")])
def test_a_step_that_cannot_resume_exactly_is_rejected(num_reads: int, problem: str, tmp_path: Path) -> None:
    class Reads(ReadsIterator):
        def training_step(self, dataloader_iter: Any) -> Any:
            return super().training_step(dataloader_iter) if num_reads else None

    module = Reads()
    module.num_reads = num_reads
    with pytest.raises(roomier.TrainingError, match=f"training_step='dataloader_iter': {problem}"):
        make_trainer(Trainer, tmp_path, max_epochs=1).fit(module, in_order())
