"""Bad steps that are skipped, are undone by a rollback, or end the run, including on several ranks and after a
resume."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import roomier
from roomier.callbacks import (
    BackboneFinetuning,
    LambdaCallback,
    ModelCheckpoint,
    SpikeGuard,
    StochasticWeightAveraging,
    Timer,
)
from roomier.core.errors import RoomierError, TrainingError
from roomier.trainer import Trainer
from tests.covering import few

Make = Callable[..., Trainer]
OFF = {"logger": False, "enable_checkpointing": False}


class Net(roomier.Module):
    """Module with running statistics and logged metrics."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.layer, self.norm, self.head = (
            nn.Linear(2, 4),
            nn.BatchNorm1d(4) if norm else nn.Identity(),
            nn.Linear(4, 1),
        )
        self.register_buffer("constant", torch.ones(3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.head(self.norm(self.layer(batch)))).square().mean()
        loss = loss + (self.head(self.layer(batch)) ** 2).mean()  # not normalized, so that the size of a batch matters
        self.log("seen", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def batches(*bad: int, value: float = float("nan"), num: int = 10) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    all_of_them = [torch.randn(4, 2, generator=generator) for _ in range(num)]
    return [torch.full_like(each, value) if n in bad else each for n, each in enumerate(all_of_them)]


def without(data: list[Tensor], *left_out: int) -> list[Tensor]:
    return [each for number, each in enumerate(data) if number not in left_out]


def fitted(make: Make, data: Any, *callbacks: Any, **keywords: Any) -> tuple[Net, Trainer]:
    torch.manual_seed(1)
    model = Net()
    trainer = make(*callbacks, **{"max_epochs": 2, **OFF, **keywords})
    trainer.fit(model, data)
    return model, trainer


def same(one: tuple[Net, Trainer], other: tuple[Net, Trainer]) -> None:
    for name, value in one[0].state_dict().items():
        assert torch.equal(value, other[0].state_dict()[name]), name
    for first, second in zip(one[1].optimizers[0].state.values(), other[1].optimizers[0].state.values(), strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert one[1].global_step == other[1].global_step
    assert one[1].optimizers[0].param_groups[0]["lr"] == other[1].optimizers[0].param_groups[0]["lr"]
    assert one[1].callback_metrics["seen_epoch"] == other[1].callback_metrics["seen_epoch"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e4])
def test_skipped_step_has_no_effect(make_trainer: Make, value: float, capsys: Any) -> None:
    guard = SpikeGuard(warmup=3)
    guarded = fitted(make_trainer, batches(4, 7, value=value), guard)
    same(guarded, fitted(make_trainer, without(batches(), 4, 7)))
    assert guard.num_bad_steps == 4
    output = capsys.readouterr().err
    assert "in batch 4 of epoch 0; the step is skipped" in output
    assert "in batch 7 of epoch 1" in output


@pytest.mark.parametrize("value", [float("nan"), 1e4])
@pytest.mark.parametrize("monitor", [("loss", "grad_norm"), ("grad_norm", "loss")])
def test_loss_scale_handles_infinite_gradients_and_bad_batches_are_skipped(
    make_trainer: Make, value: float, monitor: tuple[str, ...]
) -> None:
    guard, keywords = SpikeGuard(warmup=3, monitor=monitor), {"precision": "16-mixed", "max_epochs": 1}
    guarded = fitted(make_trainer, batches(8, value=value), guard, **keywords)
    plain = fitted(make_trainer, without(batches(), 8), **keywords)
    same(guarded, plain)
    assert guard.num_bad_steps == 1
    assert guarded[1].scaler.num_skipped == plain[1].scaler.num_skipped > 0
    assert guarded[1].scaler.factor == plain[1].scaler.factor


def test_full_window_is_skipped_and_reported(make_trainer: Make, capsys: Any) -> None:
    data = DataLoader(torch.cat(batches(5)), batch_size=4)
    guarded = fitted(make_trainer, data, SpikeGuard(), accumulate_grad_batches=2)
    same(guarded, fitted(make_trainer, without(batches(), 4, 5), accumulate_grad_batches=2))
    assert "in micro-batches 4 to 5 (samples 16, 17, 18, 19, 20, 21, 22, 23) of epoch 0" in capsys.readouterr().err


def test_samples_of_a_shuffled_loader_are_reported(make_trainer: Make, capsys: Any) -> None:
    data = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
    data[13] = torch.nan
    make_trainer(SpikeGuard(), max_epochs=3, **OFF).fit(Net(norm=False), DataLoader(data, batch_size=1, shuffle=True))
    output = [line for line in capsys.readouterr().err.splitlines() if "SpikeGuard" in line]
    assert len(output) == 3
    assert all("(samples 13) of epoch" in line for line in output)


def test_guard_does_not_change_training_without_bad_steps(make_trainer: Make) -> None:
    for action in ("skip", "rollback", "stop"):
        same(fitted(make_trainer, batches(), SpikeGuard(action)), fitted(make_trainer, batches()))


def test_too_many_bad_steps_end_the_run(make_trainer: Make) -> None:
    with pytest.raises(
        TrainingError, match="3 of the last 50 steps are bad, more than max_skips: loss is nan, in batch 5"
    ):
        fitted(make_trainer, batches(1, 3, 5), SpikeGuard(max_skips=2, window=50))


def test_old_bad_steps_do_not_count(make_trainer: Make) -> None:
    _, trainer = fitted(make_trainer, batches(0, 9), SpikeGuard(max_skips=2, window=5, warmup=2))
    assert trainer.global_step == 16


@pytest.mark.parametrize("every", [1, 4])
def test_resumed_run_judges_like_an_uninterrupted_run(make_trainer: Make, tmp_path: Path, every: int) -> None:
    def run(path: Path | None, *callbacks: Any) -> tuple[Net, Trainer]:
        torch.manual_seed(1)
        model, trainer = Net(), make_trainer(SpikeGuard(warmup=3), *callbacks, max_epochs=2, **OFF)
        trainer.fit(model, batches(4, 7, value=1e4), ckpt_path=path)
        return model, trainer

    straight = run(None)
    stop = LambdaCallback(on_train_batch_end=lambda t, *_: setattr(t, "should_stop", t.global_step == every))
    _, trainer = run(None, stop)
    trainer.save_checkpoint(tmp_path / "c")
    resumed = run(tmp_path / "c")
    same(straight, resumed)
    guards = [each[1].callbacks[0] for each in (straight, resumed)]
    assert guards[0].state_dict() == guards[1].state_dict()


def test_rollback_repeats_every_step_except_bad_steps(make_trainer: Make, tmp_path: Path, capsys: Any) -> None:
    data = batches(5, 12, num=16)
    guard = SpikeGuard("rollback")
    saves = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=3, save_top_k=-1)
    keywords = {"max_epochs": 1, "log_every_n_steps": 4}
    guarded = fitted(make_trainer, data, guard, saves, **keywords, enable_checkpointing=True)
    same(guarded, fitted(make_trainer, without(batches(num=16), 5, 12), **keywords))
    assert guard.num_bad_steps == 2
    output = capsys.readouterr().err
    assert "the run returns to step 3" in output
    assert "in batch 5 of epoch 0" in output


def test_checkpoints_contain_no_bad_step(make_trainer: Make, tmp_path: Path) -> None:
    saves = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1, save_top_k=-1)
    fitted(
        make_trainer,
        batches(5),
        SpikeGuard("rollback"),
        saves,
        max_epochs=1,
        log_every_n_steps=50,
        enable_checkpointing=True,
    )
    for path in tmp_path.glob("epoch*"):
        stored = roomier.checkpoint.load(path)
        assert all(value.isfinite().all() for value in stored["module"].values()), path
    assert stored["callbacks"]["SpikeGuard"]["num_bad_steps"] in (0, 1)


class BadOnce(Net):
    """Module with a NaN loss in the first batch of epoch 1. BackboneFinetuning freezes the first layer."""

    backbone = property(lambda self: self.layer)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * torch.nan if (self.current_epoch, batch_idx) == (1, 0) else loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam([each for each in self.parameters() if each.requires_grad], lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)]


def rolled_back_and_skipped(make: Make, folder: Path, make_callback: Callable[[], Any]) -> list[tuple[Net, Trainer]]:
    """Run a rollback from epoch 1 to epoch 0, and a run that skips the same step before its update."""
    runs: list[tuple[Net, Trainer]] = []
    for action in ("rollback", "skip"):
        torch.manual_seed(1)
        saves = ModelCheckpoint(dirpath=folder / action, every_n_train_steps=4)
        trainer = make(SpikeGuard(action), make_callback(), saves, max_epochs=3, logger=False)
        model = BadOnce()
        trainer.fit(model, batches())
        runs.append((model, trainer))
    return runs


@pytest.mark.parametrize(
    "make_callback",
    [lambda: BackboneFinetuning(1), lambda: StochasticWeightAveraging(0.02, 2, annealing_epochs=2)],
    ids=["unfreezing", "averaging"],
)
def test_changes_after_the_checkpoint_are_undone_by_a_rollback(
    make_trainer: Make, tmp_path: Path, make_callback: Any, capsys: Any
) -> None:
    back, skipped = rolled_back_and_skipped(make_trainer, tmp_path, make_callback)
    assert "the run returns to step 8" in capsys.readouterr().err
    same(back, skipped)
    rates = [[group["lr"] for group in each[1].optimizers[0].param_groups] for each in (back, skipped)]
    assert rates[0] == rates[1]
    assert back[1].lr_scheduler_configs[0].scheduler.base_lrs == skipped[1].lr_scheduler_configs[0].scheduler.base_lrs


def test_timer_continues_after_a_rollback(make_trainer: Make, tmp_path: Path, monkeypatch: Any) -> None:
    now_s = 0.0

    def passes(*_: Any) -> None:
        nonlocal now_s
        now_s += 1.0

    monkeypatch.setattr("roomier.callbacks.timer.time", SimpleNamespace(monotonic=lambda: now_s))
    timer, clock = Timer(), LambdaCallback(on_train_batch_end=passes)
    saves = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=4)
    model = BadOnce()
    make_trainer(clock, timer, SpikeGuard("rollback"), saves, max_epochs=2, logger=False).fit(model, batches())
    assert timer.time_elapsed() == now_s > 20


def test_rollback_requires_a_checkpoint_and_stop_does_not(make_trainer: Make) -> None:
    with pytest.raises(
        TrainingError, match="loss is nan, in batch 5 of epoch 0, but the run has no checkpoint to return to"
    ):
        fitted(make_trainer, batches(5), SpikeGuard("rollback"))
    with pytest.raises(TrainingError, match="loss is nan, in batch 5 of epoch 0"):
        fitted(make_trainer, batches(5), SpikeGuard("stop"))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"action": "skipp"}, "skip"),
        ({"factor": 0.5}, "must be a finite number above 1"),
        ({"window": 0}, "SpikeGuard\\(window\\)"),
        ({"warmup": 200}, "must be at most window=100"),
        ({"max_skips": -1}, "max_skips"),
        ({"monitor": "accuracy"}, "monitor"),
        ({"monitor": ()}, "monitor"),
    ],
)
def test_invalid_arguments_are_rejected(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(RoomierError, match=named):
        SpikeGuard(**arguments)


def test_unsupported_modules_are_rejected(make_trainer: Make) -> None:
    class ByHand(Net):
        automatic_optimization = False

    class Steps(Net):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            optimizer.step(closure=optimizer_closure)

    for model, named in ((ByHand(), "manual optimization"), (Steps(), "within the update")):
        with pytest.raises(RoomierError, match=named):
            make_trainer(SpikeGuard(), max_epochs=1, **OFF).fit(model, batches())
    with pytest.raises(RoomierError, match="cannot access gradients"):
        make_trainer(SpikeGuard(), max_epochs=1, step_in_backward=True, **OFF).fit(Net(), batches())


def fit_on_ranks(root: Path, devices: int, strategy: str, action: str, *bad: int) -> int:
    torch.manual_seed(1)
    model = Net(norm=False)
    data = torch.randn(48, 2, generator=torch.Generator().manual_seed(0))
    data[list(bad)] = torch.nan
    guard = SpikeGuard(action)
    callbacks = [guard]
    if action == "rollback":
        callbacks.append(ModelCheckpoint(dirpath=root / f"saves-{strategy}", every_n_train_steps=2))
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=devices,
        max_epochs=1,
        default_root_dir=root,
        logger=False,
        log_every_n_steps=3,
        enable_checkpointing=action == "rollback",
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    trainer.fit(model, DataLoader(data, batch_size=4 // devices))
    trainer.save_checkpoint(root / f"{strategy}-{action}")
    return guard.num_bad_steps


@pytest.mark.parametrize("strategy", ["zero3", pytest.param("ddp", marks=pytest.mark.slow)])
@pytest.mark.parametrize("action", few(["skip", "rollback"]))
def test_all_ranks_decide_identically(on_ranks: Any, tmp_path: Path, strategy: str, action: str, capsys: Any) -> None:
    assert fit_on_ranks(tmp_path, 1, "single", action, 21) == 1
    assert on_ranks(2, fit_on_ranks, tmp_path, 2, strategy, action, 21) == [1, 1]
    output = capsys.readouterr().out
    assert "samples 20, 21, 22, 23" in output
    straight = [roomier.checkpoint.load(tmp_path / f"{name}-{action}") for name in ("single", strategy)]
    assert [each["progress"]["global_step"] for each in straight] == [11, 11]
    torch.testing.assert_close(straight[0]["module"], straight[1]["module"], rtol=1e-4, atol=1e-5)


def fit_across_an_unfreeze(root: Path, strategy: str, action: str) -> None:
    torch.manual_seed(1)
    saves = ModelCheckpoint(dirpath=root / f"saves-{action}", every_n_train_steps=4)
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=2,
        max_epochs=3,
        default_root_dir=root,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[SpikeGuard(action), BackboneFinetuning(1), saves],
    )
    trainer.fit(BadOnce(norm=False), DataLoader(torch.cat(batches()), batch_size=2))
    trainer.save_checkpoint(root / action)


@pytest.mark.more
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_rollback_across_an_unfreeze_on_ranks(on_ranks: Any, tmp_path: Path, strategy: str, capsys: Any) -> None:
    for action in ("rollback", "skip"):
        on_ranks(2, fit_across_an_unfreeze, tmp_path, strategy, action)
    assert "returns to step 8" in capsys.readouterr().out
    back, skipped = (roomier.checkpoint.load(tmp_path / action) for action in ("rollback", "skip"))
    torch.testing.assert_close(back["module"], skipped["module"], rtol=0, atol=0)
    states = (each["optimizers"][0]["state"] for each in (back, skipped))
    torch.testing.assert_close(*states, rtol=0, atol=0)
