"""A device runs out of memory in a fit: the text of the error, and the state after it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import roomier
from roomier.callbacks import Callback, MemoryForecast
from roomier.core.errors import TrainingError
from roomier.models.gpt import GPT, GPTConfig
from roomier.planner.choosing.pricing import DryRuns
from roomier.planner.hardware.this_machine import this_machine
from roomier.planner.measured import out_of_memory
from roomier.planner.measured.out_of_memory import OutOfMemory
from roomier.planner.workload import Workload
from roomier.trainer import Trainer
from tests.ranks.pool import RankFailed, RankPool

Make = Callable[..., Trainer]
BATCH = torch.arange(64).view(4, 16) % 101
TORCH_SAYS = "CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has a total capacity of 39.39 GiB"


@pytest.fixture(autouse=True)
def _no_clock_decides_what_is_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOMIER_PLANNING_S", "36000")


class Greedy(roomier.Module):
    """Module that runs out of memory in its third step while it holds the graph of the step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gpt = GPT(GPTConfig(vocab_size=101, context=16, num_layers=2, num_heads=2, width=32, dropout=0.0))
        self.seen: weakref.ref[torch.Tensor] | None = None

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        logits, loss = self.gpt(batch, batch)
        if self.is_attached and self.global_step == 2 and type(loss) is torch.Tensor:
            self.seen = weakref.ref(logits)
            raise torch.OutOfMemoryError(TORCH_SAYS)
        return loss


def run_out(make_trainer: Make, module: roomier.Module, **keywords: Any) -> OutOfMemory:
    trainer = make_trainer(optimizer="adamw", learning_rate=1e-3, max_steps=5, **keywords)
    with pytest.raises(OutOfMemory) as caught:
        trainer.fit(module, [BATCH] * 5)
    return caught.value


def test_error_contains_measurement_forecast_and_a_suggestion(make_trainer: Make) -> None:
    module = Greedy()
    error = run_out(make_trainer, module)
    assert isinstance(error, TrainingError)
    assert isinstance(error, torch.OutOfMemoryError), "handlers of torch's error catch this error"
    assert type(error.__cause__) is torch.OutOfMemoryError
    assert str(error.__cause__) == TORCH_SAYS
    text = str(error)
    assert "strategy='single': ran out of memory in step 3 (CUDA out of memory. Tried to allocate 2.00 GiB." in text
    assert "Memory at that time: weights " in text
    assert "The forecast, computed after the error, is" in text
    assert "The nearest plan that fits, with a forecast of" in text
    assert "Trainer(" in text
    assert module.seen is not None
    assert module.seen() is None, "the memory of the failed step is freed"
    assert error.plan is not None
    prices = DryRuns(Workload.of(Greedy(), BATCH), this_machine())
    micro_batch = 4 // error.plan.batch.accumulate_grad_batches
    failed = make_trainer(optimizer="adamw").plan
    assert prices.estimate(error.plan, micro_batch).peak_bytes < 0.95 * prices.estimate(failed, 4).peak_bytes


class Failing(nn.Module):
    """Module that can run out of memory. Its hook replaces its input with a tensor that only this call references."""

    def __init__(self, seen: list[weakref.ref[torch.Tensor]]) -> None:
        super().__init__()
        self.is_full = False
        self.register_forward_pre_hook(partial(replace_input, seen))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_full:
            raise torch.OutOfMemoryError(TORCH_SAYS)
        return x


def replace_input(seen: list[weakref.ref[torch.Tensor]], module: nn.Module, args: Any) -> Any:
    replaced = args[0] * 1
    if type(replaced) is torch.Tensor:  # not in a dry run
        seen.append(weakref.ref(replaced))
    return (replaced,)


class GreedyWithHook(Greedy):
    """Module that runs out of memory in a submodule with a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[weakref.ref[torch.Tensor]] = []
        self.last = Failing(self.inputs)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        self.last.is_full = self.is_attached and self.global_step == 2
        logits, loss = self.gpt(batch, batch)
        return loss + 0 * self.last(logits).sum()


def test_the_inputs_of_modules_with_hooks_are_released(make_trainer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out_of_memory, "_advice", lambda *args: ("Do this", None))
    module = GreedyWithHook()
    error = run_out(make_trainer, module)
    assert "ran out of memory in step 3" in str(error)
    assert len(module.inputs) >= 3
    assert [each() for each in module.inputs] == [None] * len(module.inputs)


@pytest.mark.parametrize("part", ["_held", "_workload", "_machine", "confirm", "_advice"])
def test_error_is_raised_without_unavailable_details(
    make_trainer: Make, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("again")

    monkeypatch.setattr(out_of_memory, part, fail)
    if part != "_advice":
        monkeypatch.setattr(out_of_memory, "_advice", lambda *args: ("Do this", None))
    error = run_out(make_trainer, Greedy())
    assert "ran out of memory in step 3 (CUDA out of memory." in str(error)
    assert "again" not in str(error)
    assert error.__notes__ == ["roomier could not complete this message: OutOfMemoryError: again"]
    assert str(error.__cause__) == TORCH_SAYS


def test_callbacks_receive_the_error_of_torch(make_trainer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out_of_memory, "_advice", lambda *args: ("Do this", None))
    seen: list[BaseException] = []

    class Watching(Callback):
        def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
            seen.append(exception)

    error = run_out(make_trainer, Greedy(), callbacks=[MemoryForecast(at_step=3), Watching()])
    assert seen == [error.__cause__]
    assert "Do this" in str(error)


def test_out_of_memory_before_the_first_step_is_reported(make_trainer: Make) -> None:
    class Large(Greedy):
        def configure_optimizers(self) -> Any:
            raise torch.OutOfMemoryError(TORCH_SAYS)

    trainer = make_trainer(max_steps=5)
    with pytest.raises(OutOfMemory, match="ran out of memory while the model was built") as caught:
        trainer.fit(Large(), [BATCH] * 5)
    assert "accumulate_grad_batches" in str(caught.value)


def test_other_memory_errors_are_unchanged(make_trainer: Make) -> None:
    class Large(Greedy):
        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            raise MemoryError("of the host")

    with pytest.raises(MemoryError, match="of the host"):
        make_trainer(optimizer="adamw", max_steps=2).fit(Large(), [BATCH] * 2)


class GreedyOnOneRank(Greedy):
    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        if self.is_attached and self.global_step == 1 and self.trainer.global_rank == 1:
            raise torch.OutOfMemoryError(TORCH_SAYS)
        return self.gpt(batch, batch)[1]


def fit_on_ranks() -> None:
    out_of_memory._advice = lambda *args: ("Do this", None)  # type: ignore[assignment]
    trainer = Trainer(
        strategy="zero2",
        devices=2,
        accelerator="cpu",
        optimizer="adamw",
        max_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(GreedyOnOneRank(), [BATCH] * 8)


@pytest.mark.more
def test_one_rank_reports_without_waiting_for_the_others(on_ranks: RankPool) -> None:
    with pytest.raises(RankFailed) as caught:
        on_ranks(2, fit_on_ranks)
    assert caught.value.rank == 1
    assert "ran out of memory in step 2 on rank 1" in str(caught.value)
