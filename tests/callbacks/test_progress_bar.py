"""ProgressBar: a bar in a terminal, lines in other outputs, and a small overhead."""

import io
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from roomier.callbacks import ProgressBar
from roomier.callbacks.progress import num_batches_left
from roomier.callbacks.progress_display import BarDisplay, Standing, duration_text, rate_text
from roomier.core.errors import RoomierError
from roomier.data import CombinedLoader
from roomier.trainer import Trainer

Make = Callable[..., Trainer]


def shown(**keywords: Any) -> tuple[ProgressBar, io.StringIO]:
    stream = io.StringIO()
    console = Console(file=stream, width=120, force_terminal=keywords.pop("terminal", False), **keywords)
    return ProgressBar(console=console), stream


def test_one_line_per_log_interval_and_validation_without_a_terminal(
    make_trainer: Make, scripted: Any, batches: Any
) -> None:
    bar, stream = shown()
    trainer = make_trainer(bar, max_epochs=2, log_every_n_steps=5, num_sanity_val_steps=1, logger=False)
    trainer.fit(scripted(), batches, batches[:3])
    lines = stream.getvalue().splitlines()
    starts = [" | ".join(line.split(" | ")[:2]) for line in lines]
    assert starts == [
        "sanity check | batch 1/1",
        "epoch 0/1 | step 5/20",
        "epoch 0/1 | step 10/20",
        "validation | batch 3/3",
        "epoch 1/1 | step 15/20",
        "epoch 1/1 | step 20/20",
        "validation | batch 3/3",
    ]
    assert re.search(r"\| [\d.]+ it/s \| [\d.]+( K)? samples/s \| ETA \d+:\d\d", lines[1])
    assert all("\x1b" not in line for line in lines), "no terminal control codes"


def test_combined_loaders_count_as_one(make_trainer: Make, scripted: Any, batches: Any) -> None:
    bar, stream = shown()
    joined = CombinedLoader([batches[:3], batches[:2]], "min_size")
    make_trainer(bar, max_steps=1, num_sanity_val_steps=-1, logger=False).fit(scripted(), batches, joined)
    assert stream.getvalue().startswith("sanity check | batch 2/2")


def test_accumulation_prints_one_line_per_log_interval(make_trainer: Make, scripted: Any, batches: Any) -> None:
    bar, stream = shown()
    make_trainer(bar, max_epochs=1, log_every_n_steps=1, accumulate_grad_batches=4, logger=False).fit(
        scripted(), batches
    )
    assert [line.split(" | ")[1] for line in stream.getvalue().splitlines()] == ["step 1/3", "step 2/3", "step 3/3"]


def test_prog_bar_metrics_are_shown(make_trainer: Make, scripted: Any, batches: Any) -> None:
    class Shown(scripted):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("acc", 0.25, prog_bar=True)
            self.log("hidden", 1.0)
            return super().training_step(batch, batch_idx)

    bar, stream = shown()
    make_trainer(bar, max_steps=2, log_every_n_steps=2, logger=False).fit(Shown(), batches)
    [line] = stream.getvalue().splitlines()
    assert line.endswith("| acc 0.25")


@pytest.mark.parametrize("terminal", [True, False])
def test_names_with_markup_and_control_codes_are_printed_literally(
    make_trainer: Make, scripted: Any, batches: Any, terminal: bool
) -> None:
    class Shown(scripted):  # type: ignore[misc]
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.log("acc[val]", 0.25, prog_bar=True)
            self.log("[/]", 0.5, prog_bar=True)
            self.trainer.progress_bar_metrics["\x1b[2J"] = 1.0

    bar, stream = shown(terminal=terminal)
    make_trainer(bar, max_steps=2, log_every_n_steps=2, logger=False).fit(Shown(), batches)
    assert r"acc[val] 0.25 [/] 0.5" in stream.getvalue()
    assert r"\x1b[2J 1" in stream.getvalue()
    assert "\x1b[2J" not in stream.getvalue()


def test_output_goes_to_standard_error(
    make_trainer: Make, scripted: Any, batches: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    make_trainer(ProgressBar(), max_steps=2, log_every_n_steps=1, logger=False).fit(scripted(), batches)
    out, err = capsys.readouterr()
    assert out == ""
    assert "step 2/2" in err


def test_test_and_predict_have_lines(make_trainer: Make, scripted: Any, batches: Any) -> None:
    class Tested(scripted):  # type: ignore[misc]
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_acc", 0.5, prog_bar=True)

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch)

    bar, stream = shown()
    trainer = make_trainer(bar, logger=False)
    trainer.test(Tested(), batches[:4])
    trainer.predict(Tested(), batches[:3])
    lines = stream.getvalue().splitlines()
    assert [" | ".join(line.split(" | ")[:2]) for line in lines] == ["test | batch 4/4", "predict | batch 3/3"]
    assert "test_acc 0.5" in lines[0]


def test_bar_in_a_terminal_is_closed(make_trainer: Make, scripted: Any, batches: Any) -> None:
    bar, stream = shown(terminal=True)
    bar.refresh_interval_s = 1e-9  # draw at each batch
    make_trainer(bar, max_epochs=2, log_every_n_steps=5, logger=False).fit(scripted(), batches, batches[:2])
    text = stream.getvalue()
    for words in ("epoch 0/1", "batch 7/10", "step 7/20", "validation", "batch 2/2", "it/s", "epoch 1/1", "step 20/20"):
        assert words in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1, "the cursor is hidden once and restored"


def test_bar_is_closed_when_training_fails(
    make_trainer: Make, scripted: Any, batches: Any, kill_at: Any, killed_error: Any
) -> None:
    bar, stream = shown(terminal=True)
    with pytest.raises(killed_error):
        make_trainer(bar, kill_at(3), max_epochs=2, logger=False).fit(scripted(), batches)
    assert stream.getvalue().count("\x1b[?25h") == 1


def test_printed_text_stays_in_a_pipe(
    make_trainer: Make, scripted: Any, batches: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    class Printing(scripted):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            print("data", batch_idx)
            return super().training_step(batch, batch_idx)

    bar, stream = shown(terminal=True)
    make_trainer(bar, max_steps=3, logger=False).fit(Printing(), batches)
    assert capsys.readouterr().out == "data 0\ndata 1\ndata 2\n"
    assert "data" not in stream.getvalue()


def test_bar_is_redrawn_by_the_clock(make_trainer: Make, scripted: Any, batches: Any) -> None:
    bar, stream = shown(terminal=True)
    bar.refresh_interval_s = 3600.0
    make_trainer(bar, max_epochs=1, log_every_n_steps=10, logger=False).fit(scripted(), batches)
    assert "batch 1/10" in stream.getvalue(), "the first batch is shown immediately"
    assert "batch 5/10" not in stream.getvalue()
    assert "batch 10/10" in stream.getvalue(), "a log step is shown"


def test_unknown_length_has_no_total() -> None:
    stream = io.StringIO()
    display = BarDisplay(Console(file=stream, force_terminal=True, width=120))
    display.draw(Standing("epoch 0", 3, float("inf"), "step 3"))
    display.close()
    display.close()
    assert "step 3 | batch 3" in stream.getvalue()
    assert "batch 3/" not in stream.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (4.2, "0:05"), (65, "1:05"), (3725.2, "1:02:06"), (90000, "25:00:00")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(("rate", "text"), [(1384.2, "1384"), (99.96, "100"), (12.345, "12.3"), (0.01234, "0.0123")])
def test_rates(rate: float, text: str) -> None:
    assert rate_text(rate) == text


def steps_shown(stream: io.StringIO) -> list[str]:
    return [part for line in stream.getvalue().splitlines() for part in line.split(" | ") if part.startswith("step ")]


def test_manual_optimization_has_no_total_number_of_steps(make_trainer: Make, scripted: Any, batches: Any) -> None:
    class ByHand(scripted):  # type: ignore[misc]
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for _ in range(2):
                self.optimizers().zero_grad()
                self.manual_backward(self.layer(batch).square().mean())
                self.optimizers().step()

    for limit in ({"max_epochs": 1}, {"max_steps": 20}):
        bar, stream = shown()
        make_trainer(bar, log_every_n_steps=10, logger=False, **limit).fit(ByHand(), batches)
        assert steps_shown(stream) == ["step 10", "step 20"]


def test_total_of_a_resumed_run_counts_the_actual_steps(
    make_trainer: Make, scripted: Any, batches: Any, tmp_path: Path
) -> None:
    trainer = make_trainer(max_epochs=1)
    trainer.fit(scripted(), batches)
    trainer.save_checkpoint(tmp_path / "one")
    bar, stream = shown()
    keywords = {"accumulate_grad_batches": 4, "log_every_n_steps": 1, "logger": False}
    trainer = make_trainer(bar, max_epochs=3, **keywords)
    trainer.fit(scripted(), batches, ckpt_path=tmp_path / "one")
    assert steps_shown(stream) == [f"step {step}/16" for step in range(11, 17)]
    assert trainer.global_step == trainer.num_steps_in_all == 16


def test_remaining_time_follows_from_the_remaining_batches(make_trainer: Make, scripted: Any, batches: Any) -> None:
    left: list[float] = []

    class Asks(scripted):  # type: ignore[misc]
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            left.append(num_batches_left(self.trainer, batch_idx + 1))

    make_trainer(max_epochs=2, accumulate_grad_batches=4, logger=False).fit(Asks(), batches)
    assert left[-10:] == [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]
    assert left[3] == 16
    left.clear()
    make_trainer(max_steps=4, logger=False).fit(Asks(), iter(batches))
    assert left == [3, 2, 1, 0]


def test_rate_excludes_validation_and_saving(
    make_trainer: Make, scripted: Any, batches: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr("roomier.callbacks.progress.time.monotonic", lambda: now_s)

    def wait(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    class Slow(scripted):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            wait(10)

        def on_save_checkpoint(self, checkpoint: Any) -> None:
            wait(10)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            wait(0.02)
            if batch_idx in (3, 6):
                self.trainer.save_checkpoint(tmp_path / f"{batch_idx}")

    bar, stream = shown()
    trainer = make_trainer(bar, max_epochs=1, val_check_interval=2, log_every_n_steps=1, logger=False)
    trainer.fit(Slow(), batches, batches[:1])
    trained = [line for line in stream.getvalue().splitlines() if line.startswith("epoch")]
    # Ten batches take 0.2 s. With validation and saving included, the rate would be below 1.
    rates = re.search(r"([\d.]+) it/s \| ([\d.]+) samples/s", trained[-1])
    assert rates is not None
    assert float(rates[1]) == pytest.approx(50, rel=0.15)
    assert float(rates[2]) == pytest.approx(float(rates[1]) * len(batches[0]), rel=0.02)


def test_batches_of_tokens_show_tokens_per_second(make_trainer: Make, scripted: Any) -> None:
    class Tokens(scripted):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(torch.ones(4, 2), batch_idx)

    bar, stream = shown()
    trainer = make_trainer(bar, max_steps=2, log_every_n_steps=2, logger=False)
    trainer.fit(Tokens(), [torch.ones(4, 5000, dtype=torch.int64)] * 2)
    assert re.search(r"it/s \| [\d.]+ [KMB] tokens/s", stream.getvalue())


def test_interval_must_be_positive() -> None:
    with pytest.raises(RoomierError, match="refresh_interval_s=0"):
        ProgressBar(refresh_interval_s=0)


@pytest.mark.parametrize("terminal", [False, True])
def test_overhead_of_a_step_without_redraw(make_trainer: Make, scripted: Any, batches: Any, terminal: bool) -> None:
    bar, _ = shown(terminal=terminal)
    bar.refresh_interval_s = 3600.0
    cost_s: list[float] = []

    class Measure(scripted):  # type: ignore[misc]
        def on_train_end(self) -> None: ...

        def on_train_epoch_end(self) -> None:
            bar._schedule_redraw()
            for _ in range(50):
                began_s = time.perf_counter()
                for _ in range(200):
                    bar.on_train_batch_end(self.trainer, self, None, None, 3)
                cost_s.append((time.perf_counter() - began_s) / 200)

    make_trainer(bar, max_epochs=1, log_every_n_steps=10**6, logger=False).fit(Measure(), batches)
    print(f"{min(cost_s) * 1e9:.0f} ns")
    assert min(cost_s) < 10e-6  # about 0.5 microseconds on an idle core; the bound includes a margin for a shared core
