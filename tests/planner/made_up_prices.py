"""Models and constructed prices for tests of planning."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roomier
from roomier.models.gpt import GPT, GPTConfig
from roomier.plan import Plan, plan_from_flags
from roomier.planner.choosing import nearest
from roomier.planner.deadline import Deadline
from roomier.planner.forecast import Forecast, StepTime
from roomier.planner.hardware.devices import SHEETS
from roomier.planner.hardware.machine import Machine
from roomier.planner.hardware.this_machine import this_machine
from roomier.planner.memory.kinds import Interval, Kind
from roomier.planner.workload import Workload

KIB = 2**10


class Language(roomier.Module):
    def __init__(self, **sizes: Any) -> None:
        super().__init__()
        self.network = GPT(GPTConfig(vocab_size=64, context=16, num_heads=2, dropout=0.0, **sizes))

    def training_step(self, batch: Tensor) -> Tensor:
        return self.network(batch[:, :-1], batch[:, 1:])[1]


class Regression(roomier.Module):
    """A model without blocks and logits."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), *layers)

    def training_step(self, batch: Tensor) -> Tensor:
        return self.network(batch).square().mean()


def language(batch_size: int = 4) -> Workload:
    return Workload.of(Language(num_layers=2, width=32), torch.zeros(batch_size, 17, dtype=torch.int64))


def regression(batch_size: int = 4, *layers: nn.Module) -> Workload:
    return Workload.of(Regression(*layers), torch.zeros(batch_size, 64))


def auto(**keywords: Any) -> Plan:
    return plan_from_flags(**{"strategy": "auto", "accelerator": "cpu", "optimizer": "adamw", **keywords})


def gpus(devices: int = 2, num_nodes: int = 1) -> Machine:
    return next(each for each in SHEETS if each.device.kind == "cuda").machine(devices, num_nodes)


def forecast(plan: Plan, micro_batch: int, peak_bytes: int, step_s: float, method: str = "dry run") -> Forecast:
    held = {Kind.PARAMETER: peak_bytes}
    interval = Interval("forward", "", held, held, held)
    return Forecast(plan, this_machine(), micro_batch, method, (interval,), time=StepTime(step_s))


class FixedPrices:
    """Prices that a function of the test determines."""

    def __init__(self, price: Any, method: str = "dry run") -> None:
        self.price = price
        self.method = method

    def estimate(self, plan: Plan, micro_batch: int) -> Forecast:
        peak_bytes, step_s = self.price(plan, micro_batch)
        return forecast(plan, micro_batch, peak_bytes, step_s, self.method)


def ends_after(num_looks: int) -> Deadline:
    """Return a deadline that passes after ``num_looks`` checks, regardless of the clock."""
    looks = itertools.count(1)
    return Deadline(num_looks, 0.0, clock=lambda: next(looks))


def strategy_of(plan: Plan) -> str:
    return plan.parallel.strategy


BYTES = {"ddp": 900, "zero1": 700, "zero2": 500, "zero3": 300}
SECONDS = {"ddp": 1.0, "zero1": 1.2, "zero2": 1.3, "zero3": 1.6}


def by_strategy(plan: Plan, micro_batch: int) -> tuple[int, float]:
    levers = 1.5 if plan.optimizer.step_in_backward != "none" else 1.0
    return BYTES[strategy_of(plan)] * KIB, SECONDS[strategy_of(plan)] * levers


def made_up(monkeypatch: pytest.MonkeyPatch, price: Any) -> FixedPrices:
    """Return prices that ``price`` determines. These prices also apply to the alternatives in :mod:`nearest`."""

    def confirm(workload: Workload, plan: Plan, machine: Machine) -> Forecast:
        return forecast(plan, workload.batch_size, *price(plan, workload.batch_size))

    monkeypatch.setattr(nearest, "confirm", confirm)
    return FixedPrices(price)
