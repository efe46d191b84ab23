"""One pair of ``roomier bench choice`` on one rank: ``python -m roomier.bench.choice_ranks FOLDER SETTINGS``.

All plans are run: each a step under the tracker, and two turns on the clock. Those that fit and may be the fastest, and
the chosen one, are timed again, turn by turn in alternating order.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from roomier.bench.strategy_ranks import TrainedGPT
from roomier.core.log import quiet
from roomier.core.ranks import Ranks
from roomier.core.world import World
from roomier.engine.build import build, configure
from roomier.engine.eager import EagerEngine
from roomier.hardware.this_machine import this_machine
from roomier.memory.tracker import tracking
from roomier.models.gpt import GPTConfig
from roomier.plan import Plan, plan_from_flags
from roomier.planner.choice import words_of
from roomier.planner.choosing.candidates import candidates
from roomier.planner.choosing.choose import choose
from roomier.planner.choosing.pricing import prices_of
from roomier.planner.fixed_bytes import fixed_bytes
from roomier.planner.workload import Workload

_MAYBE = 1.4  # times the best of the first turns: what is slower is not timed again


class Running:
    """A plan on this rank.

    Attributes:
        peak_bytes: of a step, of the rank that holds most.
        step_s: a median for each turn, of the slowest rank.
    """

    def __init__(self, plan: Plan, micro_batch: int, settings: dict[str, Any], ranks: Ranks) -> None:
        self.words = words_of(plan, micro_batch)
        self.step_s: list[float] = []
        self._ranks = ranks
        torch.manual_seed(0)
        self._module = module = model_of(settings)
        with quiet():
            self._engine, _ = build(plan, module, lambda: configure(plan, module, lambda: 1000.0), EagerEngine, ranks)
        tokens = tokens_of(settings, micro_batch)
        self._batches = [tokens] * plan.batch.accumulate_grad_batches
        self._step()
        with tracking(self._engine) as tracker:
            self._step()  # tells what each storage is for
            tracker.restart()
            self._step()
        fixed = sum(fixed_bytes(plan, this_machine(ranks.world.size)).values())
        self.peak_bytes = max(ranks.gather(tracker.peak().total())) + fixed

    def _step(self) -> None:
        self._engine.forward_backward(self._module.training_step, list(self._batches))
        self._engine.step()

    def turn(self, num_steps: int) -> float:
        self._step()
        self._ranks.barrier()
        durations = []
        for _ in range(num_steps):
            start = time.perf_counter()
            self._step()
            durations.append(time.perf_counter() - start)
        self.step_s.append(max(self._ranks.gather(statistics.median(durations))))
        return self.step_s[-1]

    def close(self) -> None:
        self._engine.close()


def model_of(settings: dict[str, Any]) -> TrainedGPT:
    config = GPTConfig(
        settings["vocab_size"],
        settings["seq_len"],
        num_layers=settings["num_layers"],
        num_heads=4,
        width=settings["width"],
        dropout=0.0,
    )
    return TrainedGPT(config)


def tokens_of(settings: dict[str, Any], batch_size: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(settings["vocab_size"], (batch_size, settings["seq_len"]))
    return tokens, tokens


def run(settings: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    num_ranks = ranks.world.size
    asked = plan_from_flags(strategy="auto", accelerator="cpu", devices=num_ranks, optimizer="adamw")
    workload = Workload.of(model_of(settings), tokens_of(settings, settings["batch_size"]))
    machine = ranks.on_zero(lambda: this_machine(num_ranks))
    legal = [each for each in candidates(workload, asked, machine) if not each.refusal]

    def planned() -> tuple[int, Any]:
        prices = prices_of(workload, machine)
        peaks = sorted(prices.estimate(each.plan, each.micro_batch).peak_bytes for each in legal)
        budget = int(1.03 * peaks[0] + settings["tightness"] * (1.03 * peaks[-1] - 1.03 * peaks[0]))
        return budget, choose(workload, asked, machine, budget_bytes=budget)

    budget, choice = ranks.on_zero(planned)
    assert choice.chosen is not None
    words = words_of(choice.chosen.plan, choice.chosen.micro_batch)
    running = [Running(each.plan, each.micro_batch, settings, ranks) for each in legal]
    gc.collect()
    gc.disable()  # no plan pays for the garbage of another
    for _ in range(2):
        for each in running:
            each.turn(settings["steps"])
    [chosen] = [each for each in running if each.words == words]
    fitting = [each for each in running if each.peak_bytes <= budget]
    best_s = min((min(each.step_s) for each in fitting), default=0.0)
    close = [each for each in fitting if each is not chosen and min(each.step_s) <= _MAYBE * best_s] + [chosen]
    for each in close:
        each.step_s.clear()
    for index in range(settings["repeats"]):
        for each in reversed(close) if index % 2 else close:
            each.turn(settings["steps"])
    best = min((each for each in close if each in fitting), key=_median, default=chosen)
    return {
        "chosen": chosen.words,
        "budget_bytes": budget,
        "peak_bytes": chosen.peak_bytes,
        "forecast_peak_bytes": choice.chosen.peak_bytes,
        "is_under_budget": chosen.peak_bytes <= budget,
        "num_plans": len(running),
        "num_fitting": len(fitting),
        "step_s": _median(chosen),
        "forecast_step_s": None if choice.chosen.time is None else choice.chosen.time.total_s,
        "best": best.words,
        "best_step_s": _median(best),
        "ratio_to_best": _median(chosen) / _median(best),
        "planning_s": choice.planning_s,
        "plans": [
            {"plan": each.words, "peak_bytes": each.peak_bytes, "step_s": _median(each)}
            for each in sorted(running, key=_median)
        ],
    }


def _median(running: Running) -> float:
    return statistics.median(running.step_s)


def main(folder: Path, settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    rank, size = int(os.environ["BENCH_RANK"]), settings["ranks"]
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    result = run(settings, Ranks(World(rank, size, rank, 0, size)))
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(result))
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
