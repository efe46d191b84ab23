"""MemoryForecast prints, logs and stores the forecast and the measurement without changing the run."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import roomier
from roomier.callbacks import Callback, MemoryAnatomy, MemoryForecast
from roomier.callbacks import forecast as forecast_module
from roomier.callbacks import tracked_step as tracked
from roomier.core.errors import RoomierError
from roomier.models.gpt import GPT, GPTConfig
from roomier.planner.measured.record import ForecastRecord, read_record
from roomier.planner.memory import predict
from roomier.trainer import Trainer, report
from tests.covering import few
from tests.planner import page_examples
from tests.ranks.pool import RankPool

Make = Callable[..., Trainer]
TOKENS = torch.arange(128).view(4, 32) % 100
BATCH = {"input_ids": TOKENS, "targets": TOKENS}


class Language(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gpt = GPT(GPTConfig(vocab_size=100, context=32, num_layers=2, num_heads=2, width=64, dropout=0.1))

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.gpt(**batch)[1]


@pytest.fixture
def fit(make_trainer: Make) -> Callable[..., Trainer]:
    def run(*callbacks: Callback, module: nn.Module | None = None, **keywords: Any) -> Trainer:
        given = {"optimizer": "adamw", "learning_rate": 1e-3, "max_steps": 4, "enable_checkpointing": False}
        trainer = make_trainer(*callbacks, **{**given, **keywords})
        torch.manual_seed(1)
        trainer.fit(module or Language(), [BATCH] * 8)
        return trainer

    return run


def record_of(callback: MemoryForecast) -> ForecastRecord:
    assert callback.record is not None
    return callback.record


def test_forecast_is_printed_logged_and_stored(fit: Callable[..., Trainer], capsys: pytest.CaptureFixture[str]) -> None:
    callback = MemoryForecast()
    trainer = fit(callback, accumulate_grad_batches=2)
    found = record_of(callback)
    assert f"roomier: {found.line()}\n" in capsys.readouterr().err
    folder = Path(trainer.log_dir)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    [row] = [row for row in rows if "memory/forecast_bytes" in row]
    assert row["step"] == found.step == 2
    assert (row["memory/forecast_bytes"], row["memory/measured_bytes"]) == (found.forecast_bytes, found.measured_bytes)
    kept = read_record(folder)
    assert kept.as_dict() == found.as_dict()
    assert kept.forecast.plan == trainer.plan
    assert kept.forecast.micro_batch == 4


@pytest.mark.parametrize(
    "keywords",
    few([{"precision": "bf16-mixed"}, {"step_in_backward": True}, {"activation_checkpointing": "full"}, {}], 2),
    ids=str,
)
def test_forecast_equals_the_measurement(fit: Callable[..., Trainer], keywords: dict[str, Any]) -> None:
    callback = MemoryForecast()
    fit(callback, **keywords)
    found = record_of(callback)
    assert abs(found.error) < 0.02
    forecast, measured = found.forecast.bytes_by_kind, found.worst.peak.peak
    for kind, count in forecast.items():
        assert measured[kind] == pytest.approx(count, abs=0.02 * found.measured_bytes)
    assert {each.phase for each in found.worst.timeline} >= {"forward", "backward", "update"}
    assert any("blocks.1" in each.place for each in found.worst.timeline)


def test_tracking_does_not_change_training(fit: Callable[..., Trainer]) -> None:
    weights = []
    for callbacks in (
        [],
        [MemoryForecast()],
        [MemoryAnatomy(at_step=2)],
        [MemoryForecast(at_step=3), MemoryAnatomy(at_step=3, every_n_steps=2)],
    ):
        module = Language()
        fit(*callbacks, module=module, max_steps=6, gradient_clip_val=0.5)
        weights.append(nn.utils.parameters_to_vector(module.parameters()))
    for tracked_weights in weights[1:]:
        assert torch.equal(tracked_weights, weights[0])


@pytest.mark.more
def test_one_tracker_serves_forecast_and_anatomy(fit: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    begin = tracked.TrackedStep.__init__

    def counted(self: Any, step: int) -> None:
        made.append(step)
        begin(self, step)

    monkeypatch.setattr(tracked.TrackedStep, "__init__", counted)
    for callbacks in ((MemoryAnatomy(at_step=3), MemoryForecast()), (MemoryForecast(), MemoryAnatomy(at_step=3))):
        fit(*callbacks)
        anatomy, forecast = sorted(callbacks, key=lambda each: isinstance(each, MemoryForecast))
        assert isinstance(anatomy, MemoryAnatomy)
        assert isinstance(forecast, MemoryForecast)
        assert anatomy.peak is not None
        assert record_of(forecast).step == 3
        assert sum(anatomy.peak.whole.values()) == record_of(forecast).measured_bytes
    assert made == [3, 3]


def default_callbacks(trainer: Trainer) -> list[str]:
    return [type(each).__name__ for each in trainer.callbacks if isinstance(each, MemoryForecast)]


def test_default_callback_tracks_only_large_runs(
    fit: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert default_callbacks(fit()) == []
    monkeypatch.setattr(report, "LARGE_BYTES", 10**6)
    assert len(default_callbacks(fit(max_steps=1))) == 1
    assert "ended before step" not in capsys.readouterr().err
    large = fit()
    assert len(default_callbacks(large)) == 1
    assert (Path(large.log_dir) / "forecast.json").is_file()
    assert default_callbacks(fit(fast_dev_run=True)) == []
    monkeypatch.setattr(report, "LARGE_BYTES", 10**7)
    large.fit(large.model or Language(), [BATCH] * 2)
    assert default_callbacks(large) == [], "the callback of the first fit is not added to the second"


def test_default_callback_skips_compiled_runs(make_trainer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "LARGE_BYTES", 10**6)
    for compiled, num_callbacks in ((False, 1), (True, 0)):
        trainer = make_trainer(compile=compiled, optimizer="adamw")
        report.prepare_forecast(trainer, Language())
        assert len(default_callbacks(trainer)) == num_callbacks


def test_model_without_formula_is_trained_without_a_forecast(
    fit: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(report, "LARGE_BYTES", 10**6)
    monkeypatch.setattr(predict, "predict", fail)
    trainer = fit(max_steps=1)
    assert default_callbacks(trainer) == []
    assert trainer.global_step == 1


def test_activation_budget_is_tracked_after_its_measurement(
    fit: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = page_examples.forecast("ddp", 1.0, 0.1, 0.1)
    monkeypatch.setattr(forecast_module, "_forecast", lambda trainer, workload: (planned, ""))
    callback = MemoryForecast()
    fit(callback, activation_checkpointing=0.5, max_steps=6)
    assert record_of(callback).step == 4
    with pytest.raises(RoomierError, match="at_step=2: must be at least 4"):
        fit(MemoryForecast(at_step=2), activation_checkpointing=0.5)


@pytest.mark.parametrize("step", [1, 0, True, 2.5])
def test_invalid_step_is_rejected(step: Any) -> None:
    with pytest.raises(RoomierError, match=f"at_step={step}"):
        MemoryForecast(at_step=step)


@pytest.mark.parametrize("callback", [MemoryForecast, MemoryAnatomy])
def test_run_that_ends_before_the_tracked_step_prints_a_notice(
    fit: Callable[..., Trainer], capsys: pytest.CaptureFixture[str], callback: Any
) -> None:
    fit(callback(at_step=9))
    assert "ended before step 9" in capsys.readouterr().err


def test_failed_forecast_does_not_end_the_run(fit: Callable[..., Trainer], capsys: pytest.CaptureFixture[str]) -> None:
    class Peculiar(Language):
        """Module that reads a tensor's value in the middle of its step, so a dry run cannot forecast the step."""

        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            loss = super().training_step(batch)
            if type(loss) is not torch.Tensor:
                raise ZeroDivisionError("mine")
            return loss

    callback = MemoryForecast()
    trainer = fit(callback, module=Peculiar())
    assert trainer.global_step == 4
    assert callback.record is None
    assert "memory: there is no forecast" in capsys.readouterr().err


@pytest.mark.parametrize("callback", [MemoryForecast, MemoryAnatomy])
def test_error_in_the_tracked_step_stops_the_tracking(fit: Callable[..., Trainer], callback: Any) -> None:
    class Failing(Language):
        def training_step(self, batch: Any) -> torch.Tensor:
            if self.global_step == 1:
                raise KeyError("mine")
            return super().training_step(batch)

    with pytest.raises(KeyError, match="mine"):
        fit(callback(), module=Failing())
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    assert _get_current_dispatch_mode() is None


class Made(roomier.Module):
    """Module that creates its model in ``configure_model``, where it can be sharded immediately."""

    def configure_model(self) -> None:
        if not hasattr(self, "gpt"):
            config = GPTConfig(vocab_size=101, context=16, num_layers=3, num_heads=2, width=32, dropout=0.0)
            self.gpt = GPT(config)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.gpt(batch, batch)[1]


def forecast_on_ranks(root: Path, strategy: str) -> tuple[dict[str, Any], str]:
    callback = MemoryForecast()
    trainer = Trainer(
        strategy=strategy,
        devices=2,
        accelerator="cpu",
        optimizer="adamw",
        max_steps=3,
        default_root_dir=root,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    )
    trainer.fit(Made(), [torch.arange(64).view(4, 16) % 101] * 8)
    return record_of(callback).as_dict(), trainer.log_dir


class Writing(Made):
    """Only rank 0 has an attribute that cannot be copied, such as a log writer."""

    def setup(self, stage: str) -> None:
        if self.global_rank == 0:
            self.writer = threading.Lock()


def default_callbacks_on_ranks(root: Path) -> list[list[str]]:
    report.LARGE_BYTES = 10**4
    trainer = Trainer(
        strategy="zero3",
        devices=2,
        accelerator="cpu",
        optimizer="adamw",
        max_steps=3,
        default_root_dir=root,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    found = []
    for module in (Writing(), Made()):
        trainer.fit(module, [torch.arange(64).view(4, 16) % 101] * 8)
        found.append(default_callbacks(trainer))
    return found


@pytest.mark.more
def test_all_ranks_add_the_same_default_callbacks(on_ranks: RankPool, tmp_path: Path) -> None:
    for writing, made in on_ranks(2, default_callbacks_on_ranks, tmp_path):
        assert writing == []
        assert len(made) == 1


@pytest.mark.more
@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "zero3"])
def test_forecast_is_compared_with_the_rank_of_the_highest_peak(
    on_ranks: RankPool, tmp_path: Path, strategy: str
) -> None:
    (first, folder), (second, _) = on_ranks(2, forecast_on_ranks, tmp_path, strategy)
    assert first == second
    assert [each["rank"] for each in first["measured"]] == [0, 1]
    assert first["measured_bytes"] == max(each["peak_bytes"] for each in first["measured"])
    assert abs(first["error"]) < 0.03
    assert json.loads((Path(folder) / "forecast.json").read_text()) == first
