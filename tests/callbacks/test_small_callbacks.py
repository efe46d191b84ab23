"""Timer, LambdaCallback, DeviceStatsMonitor, RichModelSummary, OnExceptionCheckpoint, and a custom callback."""

import inspect
import json
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roomier
from roomier import callbacks
from roomier.callbacks import (
    Callback,
    DeviceStatsMonitor,
    LambdaCallback,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    RichModelSummary,
    Timer,
)
from roomier.core.errors import RoomierError
from roomier.trainer import Trainer

Make = Callable[..., Trainer]
OFF = {"logger": False, "enable_checkpointing": False}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace the clock with a clock that advances by one second in each micro-batch."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    tick = lambda *_: now.__setitem__(0, now[0] + 1.0)  # noqa: E731
    return LambdaCallback(on_train_batch_start=tick, on_validation_batch_start=tick)


def test_hooks_of_public_callbacks_accept_the_arguments_by_name() -> None:
    bases = {name: inspect.signature(hook) for name, hook in vars(Callback).items() if name.startswith("on_")}
    for name in callbacks.__all__:
        for hook, base in bases.items():
            if isinstance(public := getattr(callbacks, name), type) and issubclass(public, Callback):
                inspect.signature(getattr(public, hook)).bind(**dict.fromkeys(base.parameters))


def test_timer_stops_training_at_the_step_or_epoch(make_trainer: Make, scripted: Any, batches: Any, clock: Any) -> None:
    for interval, num_steps in (("step", 3), ("epoch", 10)):
        timer = Timer(duration={"seconds": 3}, interval=interval)
        trainer = make_trainer(clock, timer, max_epochs=5, **OFF)
        trainer.fit(scripted(), batches)
        assert trainer.global_step == num_steps
        assert timer.time_elapsed() == num_steps
        assert timer.time_remaining() == 3 - num_steps


def test_timer_continues_in_a_resumed_run(
    make_trainer: Make, scripted: Any, batches: Any, clock: Any, tmp_path: Path, capsys: Any
) -> None:
    timer = Timer("00:00:00:04")
    trainer = make_trainer(clock, timer, max_steps=3, **OFF)
    trainer.fit(scripted(), batches)
    trainer.save_checkpoint(tmp_path / "c")
    for steps, more in ((4, 4), (4, 4)):
        timer = Timer(timedelta(seconds=4))
        trainer = make_trainer(clock, timer, max_epochs=5, **OFF)
        trainer.fit(scripted(), batches, ckpt_path=tmp_path / "c")
        assert trainer.global_step == steps
        assert timer.time_elapsed() == more
        trainer.save_checkpoint(tmp_path / "c")
    assert "training reached its maximum duration after 0:00:04, at step 4" in capsys.readouterr().err


def test_timer_measures_each_stage(make_trainer: Make, scripted: Any, batches: Any, clock: Any) -> None:
    timer = Timer()
    make_trainer(clock, timer, max_epochs=1, **OFF).fit(scripted(), batches, batches[:2])
    assert timer.time_elapsed() == 12
    assert timer.time_elapsed("validate") == 2
    assert timer.time_remaining() is None
    assert timer.start_time("test") is None


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"duration": "1:2"}, "is not a duration"),
        ({"duration": {"parsecs": 1}}, "is not a duration"),
        ({"interval": "batch"}, "Timer\\(interval\\)"),
    ],
)
def test_invalid_arguments_of_a_timer_are_rejected(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(RoomierError, match=named):
        Timer(**arguments)


def test_functions_are_called_as_hooks(make_trainer: Make, scripted: Any, batches: Any) -> None:
    calls: list[str] = []
    hooks = {
        name: lambda *_, name=name: calls.append(name)
        for name in ("setup", "on_train_start", "on_save_point", "on_train_end", "teardown", "on_fit_end")
    }
    callback = LambdaCallback(**hooks, on_train_batch_end=lambda trainer, *_: calls.append(str(trainer.global_step)))
    make_trainer(callback, LambdaCallback(), max_steps=1, **OFF).fit(scripted(), batches)
    assert calls == ["setup", "on_train_start", "1", "on_save_point", "on_train_end", "on_fit_end", "teardown"]


def test_invalid_hooks_are_rejected() -> None:
    with pytest.raises(RoomierError, match="on_train_epoch_end"):
        LambdaCallback(on_train_epoch_ends=print)
    with pytest.raises(RoomierError, match="LambdaCallback\\(on_fit_end\\)"):
        LambdaCallback(on_fit_end=3)  # type: ignore[arg-type]


def test_custom_callback_with_one_hook(make_trainer: Make, scripted: Any, batches: Any) -> None:
    output = []

    class MyNotifier(roomier.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            output.append(f"epoch {trainer.current_epoch} of {type(pl_module).__name__} started")

    class Quiet(scripted):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            hooks = vars(self.trainer.run.hooks)
            assert [name for name, called in hooks.items() if called] == ["on_train_epoch_start"]
            return self.layer(batch).square().mean()

    make_trainer(MyNotifier(), max_epochs=2, **OFF).fit(Quiet(), batches)
    assert output == ["epoch 0 of Quiet started", "epoch 1 of Quiet started"]


def test_host_statistics_are_logged_at_log_steps(make_trainer: Make, scripted: Any, batches: Any) -> None:
    trainer = make_trainer(DeviceStatsMonitor(), max_epochs=1, log_every_n_steps=4, accumulate_grad_batches=2)
    trainer.fit(scripted(), batches, batches[:1])
    rows = [json.loads(line) for line in (Path(trainer.log_dir) / "metrics.jsonl").read_text().splitlines()]
    prefix = "DeviceStatsMonitor.on_train_batch_"
    steps = {
        moment: [row["step"] for row in rows if f"{prefix}{moment}/cpu_vm_percent" in row]
        for moment in ("start", "end")
    }
    assert steps == {"start": [3], "end": [4]}
    [row] = [row for row in rows if "DeviceStatsMonitor.on_validation_end/cpu_percent" in row]
    assert 0 <= row["DeviceStatsMonitor.on_validation_end/cpu_percent"] <= 100


def test_statistics_require_a_logger_and_can_omit_the_host(make_trainer: Make, scripted: Any, batches: Any) -> None:
    with pytest.raises(RoomierError, match="requires a logger"):
        make_trainer(DeviceStatsMonitor(), **OFF).fit(scripted(), batches)
    trainer = make_trainer(DeviceStatsMonitor(cpu_stats=False), max_epochs=1, log_every_n_steps=1)
    trainer.fit(scripted(), batches)
    assert "DeviceStats" not in (Path(trainer.log_dir) / "metrics.jsonl").read_text()


class Shown(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        self.head = nn.Linear(2, 1)
        self.head.weight.requires_grad_(False)
        self.body[2].eval()
        self.example_input_array = torch.zeros(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_rich_summary_shows_sizes_modes_and_operations(make_trainer: Make, capsys: Any) -> None:
    model = Shown()
    trainer = make_trainer(RichModelSummary(max_depth=2), max_epochs=1, enable_model_summary=True, **OFF)
    torch.manual_seed(7)
    trainer.fit(model, [torch.ones(2, 4)])
    shown = capsys.readouterr().err
    rows = {line.split("│")[1].strip(): line.split("│") for line in shown.splitlines() if line.count("│") > 5}
    cells = {name: [cell.strip() for cell in row[2:-1]] for name, row in rows.items()}
    assert cells["body.0"] == ["Linear", "40", "160 B", "all", "train", "192", "[3, 4]", "[3, 8]"]
    assert cells["body.2"][4] == "eval"
    assert cells["body"][5] == "288"  # 2 * 3 * (4 * 8 + 8 * 2)
    assert cells["frozen"][1] == "2"
    assert cells["total"][5:] == ["300", "[3, 4]", "[3, 1]"]
    assert shown.count("body.0") == 1, "the rich summary replaces the plain summary"
    assert model.body[0].training
    assert not model.body[2].training


def test_rich_summary_without_example_has_no_sizes(
    make_trainer: Make, scripted: Any, batches: Any, capsys: Any
) -> None:
    make_trainer(RichModelSummary(), max_epochs=1, **OFF).fit(scripted(), batches)
    shown = capsys.readouterr().err
    assert "FLOPs" not in shown
    assert "layer" in shown


def test_error_saves_the_weights_and_names_the_checkpoint_to_resume(
    make_trainer: Make, scripted: Any, batches: Any, kill_at: Any, killed_error: Any, tmp_path: Path, capsys: Any
) -> None:
    model = scripted()
    callbacks = [OnExceptionCheckpoint(tmp_path / "e"), ModelCheckpoint(every_n_train_steps=2), kill_at(3)]
    with pytest.raises(killed_error):
        make_trainer(*callbacks, max_epochs=1).fit(model, batches)
    output = capsys.readouterr().err
    assert "KilledError in the step after 4" in output
    assert "to resume exactly, use" in output
    stored = roomier.checkpoint.load(tmp_path / "e" / "on_exception")
    assert torch.equal(stored["module"]["layer.weight"], model.layer.weight)
    assert stored["progress"]["global_step"] == 4
    fresh = scripted()
    make_trainer(max_epochs=1, limit_train_batches=0, **OFF).fit(
        fresh, batches, weights=tmp_path / "e" / "on_exception"
    )
    assert torch.equal(fresh.layer.weight, model.layer.weight)


def test_nonfinite_weights_and_successful_runs_are_not_saved(
    make_trainer: Make, scripted: Any, batches: Any, kill_at: Any, killed_error: Any, tmp_path: Path, capsys: Any
) -> None:
    make_trainer(OnExceptionCheckpoint(tmp_path / "e"), max_epochs=1, **OFF).fit(scripted(), batches)
    model = scripted()
    spoil = LambdaCallback(on_train_batch_start=lambda *_: model.layer.bias.data.fill_(torch.nan))
    with pytest.raises(killed_error):
        make_trainer(OnExceptionCheckpoint(tmp_path / "e"), spoil, kill_at(2), max_epochs=1, **OFF).fit(model, batches)
    assert "layer.bias is not finite" in capsys.readouterr().err or not (tmp_path / "e").exists()
    assert not (tmp_path / "e").exists()


def break_off(root: Path, strategy: str) -> str:
    class Fails(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_rank == 1 and batch_idx == 1:
                raise ValueError("rank 1 fails")
            if batch_idx == 1:
                raise KeyboardInterrupt  # simulates a launcher that ends the process

    model = Shown()
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=2,
        max_epochs=1,
        default_root_dir=root,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[OnExceptionCheckpoint(root / "e"), Fails()],
    )
    try:
        trainer.fit(model, [torch.ones(2, 4)] * 6)
    except (ValueError, RoomierError, SystemExit) as error:
        return str(error)
    return "no error"


@pytest.mark.more
def test_each_failed_rank_saves_without_waiting(on_ranks: Any, tmp_path: Path) -> None:
    assert "rank 1 fails" in on_ranks(2, break_off, tmp_path, "ddp")[1]
    names = sorted(path.name for path in (tmp_path / "e").iterdir())
    assert names == ["on_exception", "on_exception-rank=1"]
    both = [roomier.checkpoint.load(tmp_path / "e" / name)["module"] for name in names]
    torch.testing.assert_close(*both, rtol=0, atol=0)
    assert all("each rank has only one shard" in output for output in on_ranks(2, break_off, tmp_path, "zero3"))
