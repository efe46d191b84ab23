"""The candidate plans, and the choice of one of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from roomier.core.errors import PlanError, RoomierError
from roomier.plan import Kind, Plan, plan_from_flags
from roomier.plan.table import rows
from roomier.planner.choosing import nearest, pricing
from roomier.planner.choosing.candidates import candidates
from roomier.planner.choosing.choose import FREE_SHARE, budget_of, choose
from roomier.planner.choosing.keywords import as_call, trainer_keywords
from roomier.planner.choosing.nearest import no_plan_fits
from roomier.planner.choosing.pricing import simplest_of_the_fastest
from roomier.planner.forecast import Forecast
from roomier.planner.hardware.devices import SHEETS
from roomier.planner.hardware.machine import Machine
from roomier.planner.hardware.this_machine import this_machine
from roomier.planner.workload import Workload
from tests.planner.made_up_prices import (
    KIB,
    FixedPrices,
    Regression,
    auto,
    by_strategy,
    forecast,
    gpus,
    language,
    made_up,
    regression,
    strategy_of,
)


@pytest.fixture(autouse=True)
def _without_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOMIER_PLANNING_S", "36000")


# ---- candidates ------------------------------------------------------------------------------------------------------


def test_single_is_the_strategy_of_one_rank_and_several_ranks_have_all_others() -> None:
    alone = candidates(language(), auto(), this_machine(1))
    assert {strategy_of(each.plan) for each in alone} == {"single"}
    several = candidates(language(), auto(devices=2), this_machine(2))
    assert {strategy_of(each.plan) for each in several} == {"ddp", "zero1", "zero2", "zero3"}


def test_hsdp_shards_over_full_nodes_but_not_over_all_of_them() -> None:
    found = candidates(language(), auto(devices=4, num_nodes=6), this_machine(4, 6))
    sizes = {each.plan.parallel.shard_size for each in found if strategy_of(each.plan) == "hsdp"}
    assert sizes == {4, 8, 12}


def test_the_global_batch_does_not_depend_on_the_micro_batch() -> None:
    found = candidates(language(6), auto(devices=2, accumulate_grad_batches=3), this_machine(2))
    legal = [each for each in found if not each.reason]
    assert {each.micro_batch * each.plan.batch.accumulate_grad_batches for each in legal} == {18}
    assert {each.micro_batch for each in legal} == {1, 2, 3, 6}


def test_settings_of_the_user_do_not_change() -> None:
    asked = auto(
        activation_checkpointing="full", chunked_loss=64, step_in_backward=True, precision="bf16-mixed", compile=True
    )
    for each in candidates(language(), asked, this_machine(1)):
        assert replace(each.plan, parallel=asked.parallel, batch=asked.batch, choice=asked.choice) == asked


def test_all_open_options_are_candidates() -> None:
    plans = [each.plan for each in candidates(language(), auto(devices=2), gpus()) if not each.reason]
    assert {each.activation.policy for each in plans} == {"none", "selective", "full"}
    assert {each.offload.activations for each in plans} == {"none", "cpu"}
    assert {each.optimizer.step_in_backward for each in plans} == {"none", "exact"}


def test_offloading_requires_a_device_with_separate_memory() -> None:
    plans = [each.plan for each in candidates(language(), auto(devices=2), this_machine(2))]
    assert {each.offload.activations for each in plans} == {"none"}


def test_options_that_change_the_arithmetic_must_be_allowed() -> None:
    plans = [each.plan for each in candidates(language(), auto(), this_machine())]
    assert {(each.precision.mode, each.optimizer.name) for each in plans} == {("32-true", "adamw")}
    allowing = auto(strategy={"name": "auto", "allow": ["bf16-mixed", "adamw8bit"]})
    plans = [each.plan for each in candidates(language(), allowing, this_machine())]
    modes, names = {each.precision.mode for each in plans}, {each.optimizer.name for each in plans}
    assert (modes, names) == ({"32-true", "bf16-mixed"}, {"adamw", "adamw8bit"})


@pytest.mark.more
def test_options_that_round_differently_within_a_rank_must_be_allowed() -> None:
    def inexact(asked: Plan) -> set[str]:
        plans = [each.plan for each in candidates(language(), asked, gpus()) if not each.reason]
        return {row.part for plan in plans for row in rows(plan) if row.kind not in (Kind.EXACT, None)}

    assert inexact(auto(devices=2)) == {"strategy", "accumulate"}
    allowing = auto(devices=2, strategy={"name": "auto", "allow": ["chunked_loss", "bf16-mixed", "adamw8bit"]})
    assert inexact(allowing) == {"strategy", "accumulate", "loss", "precision", "optimizer"}
    compiled = auto(devices=2, strategy={"name": "auto", "allow": ["chunked_loss"]}, compile=True)
    assert inexact(compiled) == {"strategy", "accumulate", "compile"}
    assert any("Set chunked_loss=True" in each.reason for each in candidates(language(), compiled, gpus()))


def test_techniques_that_the_model_does_not_support_are_rejected_with_a_reason() -> None:
    found = candidates(regression(), auto(), this_machine())
    assert {each.plan.activation.policy for each in found if not each.reason} == {"none"}
    assert any("no blocks" in each.reason for each in found)


def test_batch_norm_fixes_the_micro_batch() -> None:
    found = candidates(regression(4, nn.BatchNorm1d(64)), auto(), this_machine())
    assert {each.micro_batch for each in found if not each.reason} == {4}
    assert any("BatchNorm" in each.reason for each in found)
    frozen = regression(4, nn.BatchNorm1d(64).eval())
    assert len({each.micro_batch for each in candidates(frozen, auto(), this_machine()) if not each.reason}) == 3


def test_a_rule_rejects_one_candidate_per_strategy() -> None:
    found = candidates(regression(), auto(optimizer="onebit_adam", devices=2), this_machine(2))
    refused = [each for each in found if "requires unsharded weights and gradients" in each.reason]
    assert sorted(strategy_of(each.plan) for each in refused) == ["zero2", "zero3"]
    assert {strategy_of(each.plan) for each in found if not each.reason} == {"ddp", "zero1"}


# ---- the choice ------------------------------------------------------------------------------------------------------


def chosen_for(budget_bytes: int, price: Any = by_strategy, **keywords: Any) -> Any:
    asked = auto(devices=2, **keywords)
    return choose(regression(1), asked, this_machine(2), budget_bytes=budget_bytes, prices=FixedPrices(price))


@pytest.mark.parametrize(("budget", "strategy"), [(1000, "ddp"), (899, "zero1"), (699, "zero2"), (300, "zero3")])
def test_the_fastest_plan_that_fits_is_chosen(budget: int, strategy: str) -> None:
    choice = chosen_for(budget * KIB)
    assert strategy_of(choice.chosen.plan) == strategy
    assert choice.considered[0].forecast is choice.chosen
    assert strategy in choice.why


def test_considered_plans_contain_the_reason_why_they_were_not_chosen() -> None:
    choice = chosen_for(600 * KIB)
    reasons = {strategy_of(each.plan): each.reason for each in reversed(choice.considered) if each.forecast}
    assert reasons == {
        "zero2": "",
        "zero3": "takes 1.23 times as long",
        "zero1": "needs 700.0 KiB, 100.0 KiB over the budget",
        "ddp": "needs 900.0 KiB, 300.0 KiB over the budget",
    }


def test_no_plan_is_chosen_if_none_fits() -> None:
    choice = chosen_for(299 * KIB)
    assert choice.chosen is None
    assert strategy_of(choice.considered[0].plan) == "zero3"  # the nearest first
    assert not any(each.fits for each in choice.considered)


def test_the_simplest_of_equally_fast_plans_is_chosen() -> None:
    choice = chosen_for(1000 * KIB, price=lambda plan, micro_batch: (1, 1.0 - 0.01 * (strategy_of(plan) == "zero3")))
    assert strategy_of(choice.chosen.plan) == "ddp"
    assert choice.chosen.plan.optimizer.step_in_backward == "none"
    assert "the simplest of the fastest plans that fit" in choice.why


def test_plans_that_save_memory_without_need_are_skipped() -> None:
    asked: list[tuple[str, str, int]] = []

    def price(plan: Plan, micro_batch: int) -> tuple[int, float]:
        asked.append((strategy_of(plan), plan.optimizer.step_in_backward, micro_batch))
        return by_strategy(plan, micro_batch)

    choice = chosen_for(1000 * KIB, price)
    assert {each for _, each, _ in asked} == {"none"}  # only the plain plan of each strategy
    left_out = {strategy_of(each.plan) for each in choice.considered if each.is_left_out}
    assert left_out
    assert {each.as_dict()["fits"] for each in choice.considered if each.is_left_out} == {None}  # not evaluated
    assert len(asked) == len(set(asked)) == 4
    assert "the fastest plan that fits" in choice.why


def test_equally_fast_plans_are_ordered_by_their_label() -> None:
    single = [forecast(auto(strategy="single", precision=mode), 1, 1, 1.0) for mode in ("bf16-true", "bf16-mixed", 32)]
    assert simplest_of_the_fastest(single).plan.precision.mode == "32-true"
    assert simplest_of_the_fastest(single[:2]).plan.precision.mode == "bf16-mixed"


def test_an_allowed_option_is_chosen_if_no_exact_plan_fits() -> None:
    def price(plan: Plan, micro_batch: int) -> tuple[int, float]:
        return (400 if plan.optimizer.name == "adamw8bit" else 800) * KIB, 1.0

    allow = {"name": "auto", "allow": ["adamw8bit"]}
    assert chosen_for(800 * KIB, price, strategy=allow).chosen.plan.optimizer.name == "adamw"
    assert chosen_for(500 * KIB, price, strategy=allow).chosen.plan.optimizer.name == "adamw8bit"
    assert chosen_for(500 * KIB, price).chosen is None


def test_a_dry_run_verifies_an_estimate_and_the_next_plan_is_chosen_if_it_was_too_low(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def really(self: Any, plan: Plan, micro_batch: int) -> Forecast:
        peak_bytes, step_s = by_strategy(plan, micro_batch)
        return forecast(plan, micro_batch, 2 * peak_bytes if strategy_of(plan) == "ddp" else peak_bytes, step_s)

    monkeypatch.setattr(pricing.DryRuns, "estimate", really)
    prices = FixedPrices(by_strategy, method="closed form")
    choice = choose(regression(1), auto(devices=2), this_machine(2), budget_bytes=1000 * KIB, prices=prices)
    assert (strategy_of(choice.chosen.plan), choice.chosen.method) == ("zero1", "dry run")
    assert any(strategy_of(each.plan) == "ddp" and "over the budget" in each.reason for each in choice.considered)


def test_a_run_can_reject_plans() -> None:
    def check(plan: Plan) -> None:
        if strategy_of(plan) == "ddp":
            raise RoomierError("strategy", "ddp", "is not wanted here", "Use another")

    choice = choose(regression(1), auto(devices=2), this_machine(2), prices=FixedPrices(by_strategy), check=check)
    assert strategy_of(choice.chosen.plan) == "zero1"
    assert "strategy: is not wanted here" in {each.reason for each in choice.considered}


def test_a_step_that_cannot_be_forecast_is_an_error() -> None:
    def fails(plan: Plan, micro_batch: int) -> tuple[int, float]:
        raise KeyError("needs values")

    with pytest.raises(RoomierError, match=r"cannot be forecast.*needs values.*Set a strategy"):
        chosen_for(1000 * KIB, fails)


def test_a_concrete_strategy_is_the_only_candidate() -> None:
    choice = choose(language(), auto(strategy="zero2", devices=2), this_machine(2), prices=FixedPrices(by_strategy))
    assert [strategy_of(each.plan) for each in choice.considered] == ["zero2"]
    assert choice.chosen.micro_batch == 4


def test_without_a_budget_a_fraction_of_the_device_stays_free() -> None:
    machine = gpus()
    assert budget_of(auto(), machine) == int(machine.device.memory_bytes * (1 - FREE_SHARE["cuda"]))
    assert budget_of(auto(memory_budget="1GiB"), machine) == 2**30


def test_a_choice_by_dry_runs_fits_and_is_plain_data() -> None:
    plan = auto(activation_checkpointing="full", step_in_backward=True)
    choice = choose(language(2), plan, this_machine(), keeps_micro_batch="the loader creates its batches itself")
    assert choice.chosen.fits(choice.budget_bytes)
    result = choice.as_dict()
    assert result["chosen"]["strategy"] == result["plans"][0]["strategy"] == "single"
    assert any("the loader creates its batches" in each["reason"] for each in result["plans"])


# ---- if no plan fits -------------------------------------------------------------------------------------------------


def error_for(workload: Workload, plan: Plan, budget_bytes: int, machine: Machine, **more: Any) -> PlanError:
    choice = choose(workload, plan, machine, budget_bytes=budget_bytes, **more)
    assert choice.chosen is None
    return no_plan_fits(workload, plan, choice, **more)


def test_if_no_plan_fits_the_error_names_the_fewest_options_to_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    def price(plan: Plan, micro_batch: int) -> tuple[int, float]:
        small_states = plan.optimizer.name == "adamw8bit"
        return (2 - small_states - 0.5 * (plan.precision.mode == "bf16-mixed")) * KIB, 1.0

    prices = made_up(monkeypatch, price)

    def allow(budget_bytes: float) -> Any:
        error = error_for(regression(1), auto(), int(budget_bytes), this_machine(), prices=prices)
        assert "the smallest plan, single, adamw, 1 x 1 samples, needs 2.0 KiB on each rank" in str(error)
        advice = str(error).partition("Allow more options with strategy=")[2]
        strategy = eval(advice.partition(", which needs ")[0])
        plan = auto(strategy=strategy)
        assert choose(regression(1), plan, this_machine(), budget_bytes=int(budget_bytes), prices=prices).chosen
        return strategy["allow"]

    assert allow(1.5 * KIB) == ["bf16-mixed"]
    assert allow(1.0 * KIB) == ["adamw8bit"]
    assert allow(0.5 * KIB) == ["bf16-mixed", "adamw8bit"]


def test_if_no_plan_fits_a_chunked_loss_is_suggested_first(monkeypatch: pytest.MonkeyPatch) -> None:
    prices = made_up(
        monkeypatch,
        lambda plan, micro_batch: (int((3 - plan.loss.chunked - (plan.precision.mode == "bf16-mixed")) * KIB), 1.0),
    )

    def chosen(allow: list[str], budget_bytes: int) -> Any:
        plan = auto(strategy={"name": "auto", "allow": allow})
        return choose(language(), plan, this_machine(), budget_bytes=budget_bytes, prices=prices).chosen

    error = str(error_for(language(), auto(), 2 * KIB, this_machine(), prices=prices))
    assert "Allow more options with strategy={'name': 'auto', 'allow': ['chunked_loss']}, which needs 2.0 KiB" in error
    assert chosen(["chunked_loss"], 2 * KIB).plan.loss.chunked
    assert not chosen(["chunked_loss"], 3 * KIB).plan.loss.chunked  # an exact plan comes first
    error = str(error_for(language(), auto(), KIB, this_machine(), prices=prices))
    assert "'allow': ['chunked_loss', 'bf16-mixed']}, which needs 1.0 KiB" in error
    allowing = auto(strategy={"name": "auto", "allow": ["chunked_loss"]})
    error = str(error_for(language(), allowing, KIB, this_machine(), prices=prices))
    assert "'allow': ['chunked_loss', 'bf16-mixed']}, which needs 1.0 KiB" in error


def test_if_no_plan_fits_only_verified_alternatives_are_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    dry_runs: list[Plan] = []

    def confirm(workload: Workload, plan: Plan, machine: Machine) -> Forecast:
        dry_runs.append(plan)
        return forecast(plan, workload.batch_size, KIB, 1.0)

    def price(plan: Plan, micro_batch: int) -> tuple[int, float]:
        return KIB if plan.optimizer.name == "adamw4bit" else 9 * KIB, 1.0

    monkeypatch.setattr(nearest, "confirm", confirm)
    error = error_for(regression(1), auto(), 2 * KIB, this_machine(), prices=FixedPrices(price))
    assert "'allow': ['adamw4bit']}, which needs 1.0 KiB" in str(error)
    # neither bfloat16 nor the 8-bit states, which come earlier in the order
    assert dry_runs[0].optimizer.name == "adamw4bit"


@pytest.mark.parametrize(("budget", "devices"), [(9, 8), (10, 7), (22, 3)])
def test_if_no_plan_fits_the_error_names_the_smallest_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch, budget: int, devices: int
) -> None:
    prices = made_up(monkeypatch, lambda plan, micro_batch: (64 * KIB // plan.parallel.num_shards, 1.0))
    error = error_for(regression(1), auto(devices=2), budget * KIB, this_machine(2), prices=prices)
    assert f"Use devices={devices}: with {devices} ranks, zero" in str(error)


def test_if_no_plan_fits_the_error_names_the_smallest_sufficient_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    prices = made_up(monkeypatch, lambda plan, micro_batch: (70 * 2**30, 1.0))
    machine = gpus(1)
    small = replace(machine, device=replace(machine.device, memory_bytes=8 * 2**30))
    plan = auto(optimizer="sgd")
    choice = choose(regression(1), plan, small, prices=prices)
    error = str(no_plan_fits(regression(1), plan, choice, prices=prices))
    name = error.partition("roomier plan --hardware ")[2].partition(":1")[0]
    enough = [each for each in SHEETS if budget_of(plan, each.machine(1, 1)) >= 70 * 2**30]
    assert name == min(enough, key=lambda each: each.device.memory_bytes).name


def test_if_a_concrete_strategy_does_not_fit_the_error_names_one_that_fits() -> None:
    workload = Workload.of(Regression(nn.Linear(64, 4096), nn.Linear(4096, 1)), torch.zeros(1, 64))
    plan = auto(strategy="ddp", devices=2, memory_budget="4.5MiB")
    error = error_for(workload, plan, int(4.5 * 2**20), this_machine(2))
    assert error.field == "memory_budget"
    text = str(error).partition("Trainer")[2]
    named = eval("dict" + text[: text.index(")") + 1])
    assert named["strategy"] != "ddp"
    assert choose(workload, plan_from_flags(**named), this_machine(2)).chosen is not None


def test_if_batches_cannot_be_split_a_smaller_batch_is_suggested() -> None:
    workload = Workload.of(Regression(), torch.zeros(4096, 64))
    plan = auto(optimizer="sgd", step_in_backward=True)
    keeps = "the loader creates its batches itself"
    error = error_for(workload, plan, 2**20, this_machine(), keeps_micro_batch=keeps)
    size = int(str(error).partition("Use batches of ")[2].split()[0])
    assert choose(workload.with_batch_size(size), plan, this_machine(), budget_bytes=2**20).chosen is not None


@pytest.mark.parametrize(
    "keywords",
    [
        {"strategy": "zero2", "devices": 2, "precision": "bf16-mixed", "activation_checkpointing": "6GiB"},
        {"optimizer": {"name": "adamw", "lr": 1e-3, "betas": (0.9, 0.95)}, "lr_schedule": "cosine", "compile": True},
        {"strategy": {"name": "hsdp", "shard_size": 2}, "devices": 4, "lora": {"rank": 8, "targets": ["query"]}},
        {"strategy": {"name": "auto", "allow": ["bf16-mixed"]}, "memory_budget": "1.5GiB", "chunked_loss": 128},
        {"activation_checkpointing": {"policy": "every_n", "every_n": 3}, "offload": {"activations": "cpu"}},
        {"optimizer": "adamw", "learning_rate": 0.1, "lr_schedule": {"name": "linear", "warmup_steps": 5}},
        {"gradient_clip_val": 1.0, "accumulate_grad_batches": 4, "matmul_precision": "high", "attention": "math"},
    ],
)
def test_keywords_of_a_plan_give_the_same_plan(keywords: dict[str, Any]) -> None:
    plan = plan_from_flags(**keywords)
    assert plan_from_flags(**trainer_keywords(plan)) == plan
    assert plan_from_flags(**eval(as_call(trainer_keywords(plan)).replace("Trainer", "dict"))) == plan
