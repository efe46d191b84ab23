"""Forecasts that require more than one dry run: activation budgets, and activations in host memory."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from roomier.api.adapt import as_module
from roomier.models.gpt import GPT, GPTConfig
from roomier.plan import Plan
from roomier.planner.dry_runs.confirm import confirm
from roomier.planner.dry_runs.dry_run import DryRun, dry_run
from roomier.planner.formula.estimate import Estimator
from roomier.planner.hardware.machine import Device, Link, Machine
from roomier.planner.workload import Workload
from roomier.techniques.activation.budget import BudgetTooSmallError

_LINK = Link(1e9)


def machine(kind: str) -> Machine:
    rates = dict.fromkeys(("fp64", "fp32", "tf32", "bf16", "fp16"), 1e12)
    device = Device("any", kind, 80 * 2**30, rates, 1e12)
    return Machine(device, 4, 1, _LINK, _LINK, _LINK, _LINK, _LINK, 2**40, "assumed")


def workload(num_sequences: int = 16) -> Workload:
    with torch.device("meta"):
        module = as_module(GPT(GPTConfig(vocab_size=64, context=128, num_layers=4, num_heads=2, width=64)))
        tokens = torch.zeros(num_sequences, 128, dtype=torch.int64)
    return Workload(module, (tokens, tokens), num_sequences)


def plan_of(**activation: Any) -> Plan:
    return Plan.of({"optimizer": {"name": "adamw"}, "activation": activation})


@cache
def run_of(plan: Plan) -> DryRun:
    return dry_run(workload(), plan)


def flops_of(run: DryRun) -> float:
    return sum(sum(each.flops.values()) for each in run.work.values())


@pytest.mark.more
def test_the_forecast_of_a_budget_is_between_full_and_no_recomputation() -> None:
    least, most = run_of(plan_of(policy="full")), run_of(plan_of())
    middle = (least.peak_bytes + most.peak_bytes) // 2
    found = run_of(plan_of(policy="budget", budget_bytes=middle))
    assert 0.9 * middle < found.peak_bytes <= middle
    assert flops_of(most) < flops_of(found) < flops_of(least)
    assert run_of(plan_of(policy="budget", budget_bytes=2**40)).peak_bytes == most.peak_bytes
    with pytest.raises(BudgetTooSmallError, match=r"activation\.budget='1\.0 MiB': is too small"):
        run_of(plan_of(policy="budget", budget_bytes=2**20))


@pytest.mark.more
def test_a_budget_is_confirmed_by_a_dry_run() -> None:
    plan = plan_of(policy="budget", budget_fraction=0.25)
    found = confirm(workload(), plan, machine("cpu"))
    assert dry_run(workload(), plan, device=machine("cpu").device).intervals == found.timeline
    assert found.method == "dry run"
    assert found.remark.startswith("Activation budget: of 4 blocks, ")


@pytest.mark.more
def test_activations_in_host_memory_of_a_gpu_are_forecast_by_the_closed_form() -> None:
    given, plan = workload(64), plan_of()
    moved = replace(plan, offload=replace(plan.offload, activations="cpu"))
    found = confirm(given, moved, machine("cuda"))
    assert found.method == "closed form"
    assert found.host_bytes > 0
    assert found.tensor_bytes < confirm(given, plan, machine("cuda")).tensor_bytes
    assert found.timeline == Estimator(given, machine("cuda")).estimate(moved, 64).timeline
    assert confirm(given, moved, machine("cpu")).method == "dry run"
