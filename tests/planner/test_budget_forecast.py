"""Forecast and measured peak of a step with an activation budget, for several kinds of model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from roomier.plan import Plan, plan_from_flags
from roomier.planner.dry_runs import budget_estimates, shallow
from roomier.planner.dry_runs import within_budget as of_uniform_steps
from roomier.planner.dry_runs.budget_estimates import TYPICAL_DEVICE
from roomier.planner.dry_runs.dry_run import DryRun, dry_run
from roomier.planner.dry_runs.shallow import dry_run_by_depth
from roomier.planner.dry_runs.within_budget import UNIFORM, NotNestedError, within_budget
from roomier.planner.formula.estimate import Estimator
from roomier.planner.memory.kinds import Interval, Kind
from roomier.planner.workload import Workload
from roomier.techniques.activation import budget
from roomier.techniques.activation.block_forward import Keep
from roomier.techniques.activation.budget import BudgetTooSmallError
from roomier.techniques.activation.profile import Call, InterceptionTime
from tests.activation.budgets import Budget, Language, Net, engine_for, measured_peak, take_step, tokens, train
from tests.activation.test_budget_models import Bert, HalfFrozen, Repeated, UNet, pictures, sequences
from tests.activation.test_budget_ranks import make_ranks
from tests.planner.test_confirm import flops_of, machine
from tests.ranks.pool import RankPool

pytestmark = pytest.mark.more

LOST_NS = {Keep.INPUT: 30_000, Keep.PRODUCTS: 20_000, Keep.ALL: 0}
TOLERANCE = 0.01

Make = Callable[[], nn.Module]
MODELS: dict[str, tuple[Make, tuple[torch.Tensor]]] = {
    "gpt": (Language, tokens()),
    "large vocabulary": (lambda: Language(vocab_size=1500, num_layers=4), tokens(vocab_size=1500)),
    "half frozen": (HalfFrozen, tokens()),
    "u-net": (UNet, pictures()),
    "shared blocks": (Repeated, sequences()),
    "bert": (Bert, tokens()),
}


FAST = ("gpt", "u-net", "bert")


def replace_times(patch: pytest.MonkeyPatch) -> None:
    """Replace the times of the run and of the forecast, so that the choice does not depend on the machine."""

    def in_run(call: Call, keep: Keep, interception: InterceptionTime) -> int:
        return LOST_NS[keep]

    patch.setattr(budget, "lost_ns", in_run)
    for module in (budget_estimates, of_uniform_steps):
        patch.setattr(module, "recomputation_ns", lambda forward, keep, plan, device: LOST_NS[keep])


@pytest.fixture(autouse=True)
def equal_times() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        replace_times(patch)
        yield


def plan_of(budget: Budget, optimizer: str = "adamw", **keywords: Any) -> Plan:
    return plan_from_flags(
        accelerator="cpu", optimizer={"name": optimizer, "lr": 1e-3}, activation_checkpointing=budget, **keywords
    )


def workload_of(make: Make, batch: Any) -> Workload:
    return Workload.of(Net(make()), batch)


@pytest.mark.parametrize(
    "budget", [0.5, *(pytest.param(each, marks=pytest.mark.slow) for each in (0.0, 0.2, 0.8, 1.0))]
)
@pytest.mark.parametrize(
    "name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name not in FAST)]
)
def test_a_dry_run_makes_the_choice_of_the_run(name: str, budget: float) -> None:
    make, batch = MODELS[name]
    taken = train(make(), budget, [[batch]] * 3)
    found = dry_run(workload_of(make, batch), plan_of(budget))
    assert found.peak_bytes == pytest.approx(taken.peak_bytes, rel=TOLERANCE)
    assert list(found.keeps.values()) == taken.keeps[-len(found.keeps) :]


def test_the_budget_of_a_deep_model_is_computed_from_copies_with_fewer_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = workload_of(lambda: Language(num_layers=12), tokens())
    expected = dry_run(workload, plan_of(0.6))

    def of_a_copy(traced: Workload, *args: Any, **options: Any) -> DryRun:
        assert traced.module is not workload.module
        return dry_run(traced, *args, **options)

    monkeypatch.setattr(shallow, "dry_run", of_a_copy)
    found = dry_run_by_depth(workload, plan_of(0.6))
    assert found.keeps == expected.keeps
    assert found.peak_bytes == pytest.approx(expected.peak_bytes, rel=0.001)
    assert flops_of(found) == pytest.approx(flops_of(expected))
    places, expected_places = (
        [(each.phase, each.place) for each in run.intervals if each.place] for run in (found, expected)
    )
    assert places == expected_places
    closed = Estimator(workload, machine("cpu")).estimate(plan_of(0.6), 16)
    assert closed.tensor_bytes == pytest.approx(expected.peak_bytes, rel=TOLERANCE)


def peak_on_rank(strategy: str, budget: float) -> int:
    ranks = make_ranks()
    module = Net(Language(num_layers=4))
    with pytest.MonkeyPatch.context() as patch:
        replace_times(patch)
        engine = engine_for(module, budget, ranks, strategy=strategy, devices=2, precision="bf16-mixed")
        for _ in range(3):
            take_step(engine, module, [tokens(4)])
        peak = measured_peak(engine, module, [tokens(4)])
    engine.close()
    return peak


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "zero3"])
def test_the_forecast_on_two_ranks_is_measured(on_ranks: RankPool, strategy: str) -> None:
    workload = workload_of(lambda: Language(num_layers=4), tokens(4))
    plan = plan_of(0.5, strategy=strategy, devices=2, precision="bf16-mixed")
    peak = max(on_ranks(2, peak_on_rank, strategy, 0.5))
    assert dry_run(workload, plan).peak_bytes == pytest.approx(peak, rel=TOLERANCE)
    closed = Estimator(workload, machine("cpu")).estimate(plan, 4)
    assert closed.tensor_bytes == pytest.approx(peak, rel=0.02)


@pytest.mark.parametrize("like", ["cpu", "cuda"])
def test_the_minimum_in_the_error_is_sufficient(like: str) -> None:
    workload = workload_of(lambda: Language(num_layers=2), tokens())
    with pytest.raises(BudgetTooSmallError, match=r"activation\.budget='1\.0 MiB'.*smaller micro-batches") as caught:
        dry_run(workload, plan_of("1MiB"), like=like)
    least_bytes = round((float(caught.value.problem.split("(")[1].split(" MiB")[0]) + 0.05) * 2**20)
    assert dry_run(workload, plan_of(least_bytes), like=like).peak_bytes <= least_bytes


def test_the_memory_of_the_update_counts_on_a_gpu() -> None:
    """The allocator of a GPU counts the temporary tensors of the update, in which this step has its peak."""
    workload = workload_of(lambda: Language(width=64, num_layers=2), (tokens(1)[0][:, :5],))
    found = dry_run(workload, plan_of(0.5, "lion"), like="cuda")
    assert found.peak.phase == "update"
    with pytest.raises(BudgetTooSmallError):
        dry_run(workload, plan_of(found.peak_bytes - 10**4, "lion"), like="cuda")


def runs_of(order: list[tuple[str, str]]) -> dict[Keep, DryRun]:
    def interval(phase: str, place: str) -> Interval:
        moment = dict.fromkeys(Kind, 1)
        return Interval(phase, place, moment, moment, moment)

    return {keep: DryRun(tuple(interval(*each) for each in order), {}) for keep in UNIFORM}


@pytest.mark.parametrize(
    "order",
    [
        [("forward", "a"), ("forward", "b"), ("backward", "a"), ("backward", "b")],
        [("forward", "a"), ("forward", "b"), ("forward", "a"), ("backward", "b"), ("backward", "a")],
    ],
)
def test_blocks_that_do_not_run_in_reverse_order_are_rejected(order: list[tuple[str, str]]) -> None:
    with pytest.raises(NotNestedError):
        within_budget(plan_of(0.5), runs_of(order), ["a", "b"], TYPICAL_DEVICE)


def test_a_budget_of_blocks_in_another_order_is_interpolated_in_the_closed_form() -> None:
    workload = workload_of(*MODELS["shared blocks"])
    found = Estimator(workload, machine("cpu")).estimate(plan_of(0.5), 8)
    assert "interpolated" in found.remark
