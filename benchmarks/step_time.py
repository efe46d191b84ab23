"""Compares forecast and measured step times on CPU ranks: ``python -m benchmarks.step_time``.

Each plan of a model is built once, and the plans alternate, so that load affects all of them equally. The result states
whether the plan with the fastest forecast is also the fastest measured plan, and contains Spearman's rank correlation
between forecasts and measurements over all plans.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.rank_processes import on_this_rank, run_on_ranks
from benchmarks.training import Steps, Trained
from roomier.api.module import Module
from roomier.core.ranks import Ranks
from roomier.models.gpt import GPT, GPTConfig
from roomier.plan import Plan
from roomier.planner.dry_runs.dry_run import dry_run
from roomier.planner.hardware.this_machine import this_machine
from roomier.planner.timing.step_time import step_time
from roomier.planner.workload import Workload

_CONTEXT = 64
_WARMUP_STEPS = 3
_STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


class MLP(Module):
    """Residual blocks of two linear layers."""

    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        self.width = width
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
            for _ in range(num_blocks)
        )

    def model_blocks(self) -> list[nn.Module]:
        return list(self.blocks)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int = 0) -> Tensor:
        inputs, targets = batch
        for block in self.blocks:
            inputs = inputs + block(inputs)
        return (inputs - targets).square().mean()


def _gpt(width: int, vocab_size: int) -> Trained:
    return Trained(GPT(GPTConfig(vocab_size, _CONTEXT, num_layers=4, num_heads=4, width=width, dropout=0.0)))


MODELS: dict[str, Callable[[], Module]] = {
    "gpt-1m": lambda: _gpt(128, 512),
    "gpt-9m": lambda: _gpt(384, 2048),
    "mlp-1m": lambda: MLP(128, 8),
    "mlp-8m": lambda: MLP(512, 4),
}


@dataclass(frozen=True)
class Case:
    """One plan.

    Attributes:
        strategy: name of the strategy.
        policy: policy of activation checkpointing.
        micro_batches: number of micro-batches into which the samples of a step are divided.
    """

    strategy: str
    policy: str
    micro_batches: int

    def plan(self, num_ranks: int) -> Plan:
        """Return the plan for ``num_ranks`` CPU ranks."""
        return Plan.of(
            {
                "parallel": {"strategy": self.strategy, "devices": num_ranks, "accelerator": "cpu"},
                "activation": {"policy": self.policy},
                "batch": {"accumulate_grad_batches": self.micro_batches},
                "optimizer": {"name": "adamw"},
            }
        )


def cases_of(model: str) -> list[Case]:
    """Return the plans of a model."""
    policies = ("none", "full") if model.startswith("gpt") else ("none",)
    return [Case(*each) for each in product(_STRATEGIES, policies, (1, 4))]


def batch_of(module: Module, num_samples: int) -> tuple[Tensor, Tensor]:
    """Return random inputs and targets of ``num_samples`` samples."""
    if isinstance(module, MLP):
        return torch.randn(num_samples, module.width), torch.randn(num_samples, module.width)
    tokens = torch.randint(512, (num_samples, _CONTEXT + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def forecast_s(model: str, case: Case, num_samples: int, num_ranks: int) -> float:
    """Return the forecast duration of one step in seconds."""
    module = MODELS[model]()
    workload = Workload.of(module, batch_of(module, num_samples // case.micro_batches))
    plan = case.plan(num_ranks)
    return step_time(workload, plan, this_machine(num_ranks), dry_run(workload, plan).work).total_s


def measure(settings: dict[str, Any], ranks: Ranks, folder: Path) -> list[dict[str, float]]:
    """Return the median and the minimum step time of each plan in seconds, on the slowest rank."""
    model, num_samples = settings["model"], settings["samples"]
    steps = []
    for case in cases_of(model):
        torch.manual_seed(0)
        module = MODELS[model]()
        batches = [batch_of(module, num_samples // case.micro_batches) for _ in range(case.micro_batches)]
        steps.append(Steps(case.plan(ranks.world.size), module, batches, ranks, _WARMUP_STEPS))
    durations: list[list[float]] = [[] for _ in steps]
    for turn in range(settings["turns"]):
        for index in reversed(range(len(steps))) if turn % 2 else range(len(steps)):
            steps[index].step()  # not timed; fills the caches of the processor
            for _ in range(settings["steps"]):
                ranks.barrier()
                start = time.perf_counter()
                steps[index].step()
                durations[index].append(time.perf_counter() - start)
    gathered = ranks.gather(durations)
    return [
        {
            "median_s": max(statistics.median(each[index]) for each in gathered),
            "least_s": max(min(each[index]) for each in gathered),
        }
        for index in range(len(steps))
    ]


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Spearman's rank correlation, which is 1 if both sequences have the same order."""
    return statistics.correlation(_ranks(one), _ranks(other))


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    return [float(order.index(each)) for each in values]


def run(models: Sequence[str], settings: dict[str, int]) -> dict[str, Any]:
    """Measure and forecast all plans of ``models``.

    Returns:
        ``settings``, ``machine`` and ``models``. Each model has ``rows``, ``rank_correlation``, ``median_ratio``
        (forecast divided by measurement) and ``regret`` (measured time of the plan with the fastest forecast, divided
        by the smallest measured time).
    """
    found = {}
    for model in models:
        cases = cases_of(model)
        rows: Any = run_on_ranks("benchmarks.step_time", settings["ranks"], {**settings, "model": model})
        forecasts = [forecast_s(model, case, settings["samples"], settings["ranks"]) for case in cases]
        medians = [row["median_s"] for row in rows]
        found[model] = {
            "rows": [
                {**vars(case), **row, "forecast_s": forecast}
                for case, row, forecast in zip(cases, rows, forecasts, strict=True)
            ],
            "rank_correlation": rank_correlation(forecasts, medians),
            "median_ratio": statistics.median(map(_ratio, forecasts, medians)),
            "regret": medians[forecasts.index(min(forecasts))] / min(medians),
        }
    machine = this_machine(settings["ranks"])
    return {"settings": settings, "machine": machine.source, "models": found}


def _ratio(forecast: float, measured: float) -> float:
    return forecast / measured if measured else math.nan


def main() -> None:
    """Run the benchmark and print its result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    for name, value in (("ranks", 2), ("samples", 16), ("turns", 5), ("steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    settings = vars(parser.parse_args())
    result = run(settings.pop("models").split(","), settings)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    on_this_rank(measure) if "RANK" in os.environ else main()
