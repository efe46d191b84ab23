"""Plans in which the planner chooses the number of stages."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import roomier
from roomier.callbacks import SpikeGuard, WeightAveraging
from roomier.models.gpt import GPT, GPTConfig
from roomier.plan import Plan
from roomier.planner.choice import Choice
from roomier.planner.choosing.choose import choose
from roomier.planner.dry_runs.staged import forecast_of_stages
from roomier.planner.formula.estimate import Estimator
from roomier.planner.formula.stages import reason_against_stages
from roomier.planner.hardware import this_machine
from roomier.planner.hardware.machine import Device, Link, Machine
from roomier.planner.workload import Workload
from tests.pipeline.test_forecast import model, plan_of
from tests.planner.made_up_prices import FixedPrices, auto
from tests.ranks.pool import RankPool

CONFIG = GPTConfig(vocab_size=64, context=32, num_layers=4, num_heads=2, width=64, dropout=0.0)


class Language(roomier.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = GPT(replace(CONFIG, dropout=dropout))
        self.losses: list[float] = []

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.network(batch[:, :-1], batch[:, 1:])[1]
        self.losses.append(float(loss.detach()))
        return loss


class Skipping(Language):
    """A module whose step calls a random number of layers."""

    def training_step(self, batch: Tensor) -> Tensor:
        return super().training_step(batch) if random.random() < 2 else batch.sum()


class Failing(Language):
    def training_step(self, batch: Tensor) -> Tensor:
        return super().training_step({"ids": batch}["labels"])


class Watching(Language):
    def on_after_backward(self) -> None:
        pass


def machine(num_ranks: int, link: Link) -> Machine:
    cpu = Device("cpu", "cpu", 2**33, {"fp32": 1e11}, 2e10, operation_s=2e-6)
    return Machine(cpu, num_ranks, 1, link, link, link, link, link, 2**33, "constructed")


SLOW, FAST = Link(1e7, 1e-5), Link(1e12, 1e-9)


def workload_of(module: roomier.Module) -> Workload:
    return Workload.of(module, torch.zeros(4, 33, dtype=torch.int64))


def chosen(link: Link, module: Any = Language, num_ranks: int = 2, **options: Any) -> tuple[Plan, Choice]:
    plan = auto(devices=num_ranks, accumulate_grad_batches=2, **options)
    choice = choose(workload_of(module()), plan, machine(num_ranks, link))
    assert choice.chosen is not None
    return choice.chosen.plan, choice


def num_stages(choice: Choice) -> set[int]:
    return {each.plan.parallel.pipeline_parallel_size for each in choice.considered}


def test_stages_are_chosen_on_a_slow_link_and_not_evaluated_on_a_fast_one() -> None:
    plan, choice = chosen(SLOW)
    assert plan.parallel.pipeline_parallel_size == 2
    assert plan.batch.seeding == "events"
    assert plan.batch.accumulate_grad_batches >= 8
    assert choice.chosen is not None
    assert choice.chosen.global_batch == 16
    assert choice.chosen.method == "dry run"
    assert "2 stages" in choice.why
    plan, choice = chosen(FAST)
    assert num_stages(choice) == {1}


@pytest.mark.more
def test_several_sizes_and_replicas_are_compared() -> None:
    plan, choice = chosen(SLOW, num_ranks=4)
    assert num_stages(choice) == {1, 2, 4}
    assert plan.parallel.pipeline_parallel_size == 4  # no gradients are sent
    assert {each.plan.parallel.strategy for each in choice.considered if each.forecast} >= {"ddp", "zero1", "zero3"}


@pytest.mark.parametrize(
    ("module", "seeding", "reason"),
    [
        (partial(Language, dropout=0.1), "stream", "stages change the random numbers of .* unless seeding='events'"),
        (partial(Language, dropout=0.1), "events", "^$"),
        (Skipping, "events", "draws random numbers outside of its layers"),
        (Watching, "events", "Watching.on_after_backward would receive"),
        (Failing, "events", "the trace of the step raises KeyError: .*labels"),
    ],
    ids=["dropout", "dropout by events", "random depth", "hook", "error"],
)
def test_steps_that_stages_could_change_have_a_reason(module: Any, seeding: str, reason: str) -> None:
    assert re.search(reason, reason_against_stages(workload_of(module()), auto(devices=2, seeding=seeding)))


def test_the_reason_is_in_the_table() -> None:
    plan, choice = chosen(SLOW, partial(Language, dropout=0.1))
    assert plan.parallel.pipeline_parallel_size == 1
    assert any("unless seeding='events' is set" in each.reason for each in choice.considered)


def test_stages_are_chosen_if_no_other_plan_fits() -> None:
    def price(plan: Plan, micro_batch: int) -> tuple[int, float]:
        size = plan.parallel.pipeline_parallel_size
        return 1000 // size, 1.0 * size

    choice = choose(
        workload_of(Language()), auto(devices=4), machine(4, FAST), budget_bytes=500, prices=FixedPrices(price)
    )
    assert choice.chosen is not None
    assert choice.chosen.plan.parallel.pipeline_parallel_size == 2


def test_a_given_number_of_stages_and_a_budget() -> None:
    plan = auto(strategy={"name": "auto", "pipeline_parallel_size": 2}, devices=4, memory_budget="64MiB")
    choice = choose(workload_of(Language()), plan, machine(4, FAST))
    assert choice.chosen is not None
    assert choice.chosen.plan.parallel.pipeline_parallel_size == 2
    assert num_stages(choice) == {2}


@pytest.mark.parametrize(
    "case",
    [
        ("ddp", "full"),
        *(pytest.param((name, "none"), marks=pytest.mark.more) for name in ("ddp", "zero1", "zero2", "zero3")),
    ],
    ids=" ".join,
)
def test_estimates_are_near_dry_runs(case: tuple[str, str]) -> None:
    (strategy, recompute), (network, batch) = case, model()
    workload, device = Workload.of(network, batch), machine(4, FAST)
    plan, estimator = plan_of("1f1b", 4, recompute, strategy), Estimator(workload, device)
    estimate = forecast_of_stages(workload, plan, device, estimator, is_estimate=True)
    run = forecast_of_stages(workload, plan, device, estimator)
    assert (estimate.method, run.method) == ("closed form", "dry run")
    assert estimate.peak_bytes == pytest.approx(run.peak_bytes, rel=0.1)
    assert estimate.time is not None
    assert run.time is not None
    assert run.time.total_s / 2 < estimate.time.total_s < run.time.total_s * 1.05


def fit(devices: int, callbacks: Any = (), **options: Any) -> tuple[int, Tensor, str]:
    """Return the number of stages, the loss of each step, and the reasons against other plans."""
    module, simulated = Language(), machine(devices, SLOW)
    samples = torch.randint(64, (32, 33), generator=torch.Generator().manual_seed(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(this_machine, "this_machine", lambda *_: simulated)
        trainer = roomier.Trainer(
            devices=devices,
            accelerator="cpu",
            optimizer="adamw",
            max_epochs=2,
            callbacks=list(callbacks),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )
        trainer.fit(module, DataLoader(samples, batch_size=4))  # type: ignore[arg-type]
    assert trainer.global_step == 4
    reasons = [] if trainer.choice is None else [each.reason for each in trainer.choice.considered]
    losses = torch.tensor(module.losses).reshape(4, -1).mean(1)
    return trainer.plan.parallel.pipeline_parallel_size, losses, " ".join(reasons)


def test_a_run_with_chosen_stages_has_the_losses_of_one_device(on_ranks: RankPool) -> None:
    (last_stage, losses, _), (first_stage, *_) = on_ranks(2, fit, 2, strategy="auto", accumulate_grad_batches=2)
    assert (last_stage, first_stage) == (2, 2)
    _, expected, _ = fit(1, accumulate_grad_batches=4)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("callback", [WeightAveraging, pytest.param(SpikeGuard, marks=pytest.mark.more)])
def test_callbacks_that_require_the_full_model_prevent_stages(on_ranks: RankPool, callback: Any) -> None:
    for size, _, reasons in on_ranks(2, fit, 2, [callback()], strategy="auto", accumulate_grad_batches=2):
        assert size == 1
        assert "stage" in reasons
