"""One rank of ``roomier bench choice``: ``python -m roomier.bench.choice_ranks FOLDER SETTINGS``.

Every plan runs alone for two warm-up steps, one step under the memory tracker, and three timed steps. The budget is
between the smallest and the largest measured peak, and ``auto`` chooses a plan for this budget. The chosen plan and the
fast plans that fit are then built again and timed in alternating turns. If each of many plans is measured only once,
the fastest measurement is partly due to chance. Therefore, the leading plans are timed in additional turns, and only
these turns are used.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from roomier.bench.choice_models import Drawn, drawn
from roomier.core.log import quiet
from roomier.core.ranks import Ranks
from roomier.core.world import World
from roomier.engine.build import build
from roomier.engine.eager import EagerEngine
from roomier.engine.optimizers import configure
from roomier.plan import plan_from_flags
from roomier.planner.choice import words_of
from roomier.planner.choosing.candidates import Candidate, candidates
from roomier.planner.choosing.choose import choose
from roomier.planner.choosing.pricing import prices_of, time_s
from roomier.planner.formula.fixed_bytes import fixed_bytes
from roomier.planner.hardware.machine import Machine
from roomier.planner.hardware.this_machine import this_machine
from roomier.planner.memory.tracker import tracking
from roomier.planner.workload import Workload

_MAYBE, _MOST_CONTENDERS = 1.25, 24  # plans above 1.25 times the best first measurement are not timed again
_LEADING, _MOST_LEADING = 1.10, 6
_NUM_STEPS = 3  # per turn
_TURNS, _LAST_TURNS = 3, 7
_WARMUP_STEPS = 2  # DDP is created after the first step


@dataclass
class Seen:
    """A plan with its measurements.

    Attributes:
        candidate: the plan and its micro-batch.
        words: description of the plan.
        peak_bytes: peak memory of a step in bytes, on the rank with the largest peak.
        step_s: seconds per step on the slowest rank.
    """

    candidate: Candidate
    words: str
    peak_bytes: int
    step_s: float


class Running:
    """The engine of a plan on this rank."""

    def __init__(self, candidate: Candidate, pair: Drawn, ranks: Ranks) -> None:
        plan = candidate.plan
        self._ranks = ranks
        self._module = module = pair.module()
        with quiet():
            self.engine, _ = build(
                plan, module, lambda blocks: configure(plan, module, lambda: 1000.0, blocks), EagerEngine, ranks
            )
        self._batches = [pair.batch(candidate.micro_batch)] * plan.batch.accumulate_grad_batches
        for _ in range(_WARMUP_STEPS):
            self.step()

    def step(self) -> None:
        """Run one optimizer step."""
        self.engine.forward_backward(lambda batch, _: self._module.training_step(batch), list(self._batches))
        self.engine.step()

    def peak_bytes(self) -> int:
        """Return the peak memory of all tensors in a step in bytes, on the rank with the largest peak."""
        with tracking(self.engine) as tracker:
            self.step()
        return max(self._ranks.gather(tracker.peak().total()))

    def turn(self) -> float:
        """Return the median seconds per step over a few steps, on the slowest rank."""
        self.step()  # not timed; fills the caches of the processor
        self._ranks.barrier()
        durations = []
        for _ in range(_NUM_STEPS):
            start = time.perf_counter()
            self.step()
            durations.append(time.perf_counter() - start)
        return max(self._ranks.gather(statistics.median(durations)))


def run_pair(pair: Drawn, ranks: Ranks, *, lists_all: bool = False) -> dict[str, Any]:
    """Run all plans of one pair and return its row. docs/design/planner.md describes the keys.

    Args:
        pair: the model, its batch and its budget.
        ranks: the ranks of the run.
        lists_all: if True, list every plan that was run, with its forecast, under ``plans`` in the row.
    """
    machine = ranks.on_zero(lambda: this_machine(pair.num_ranks))
    strategy = {"name": "auto", "allow": ["chunked_loss"]}  # the only option labeled near that can make a step faster
    asked = plan_from_flags(strategy=strategy, accelerator="cpu", devices=pair.num_ranks, optimizer="adamw")
    workload = Workload.of(pair.module(), pair.batch(pair.batch_size))
    found = [each for each in candidates(workload, asked, machine) if not each.refusal]
    legal = {words_of(each.plan, each.micro_batch): each for each in found}  # without duplicates
    seen = {words: _seen(words, each, pair, ranks, machine) for words, each in legal.items()}
    least, most = (pick(each.peak_bytes for each in seen.values()) for pick in (min, max))
    budget = int(least + pair.tightness * (most - least))
    choice = ranks.on_zero(lambda: choose(workload, asked, machine, budget_bytes=budget))
    row: dict[str, Any] = {"model": pair.name, "num_ranks": pair.num_ranks, "budget_bytes": budget}
    row |= {"num_plans_run": len(seen), "num_fitting": sum(each.peak_bytes <= budget for each in seen.values())}
    if lists_all:
        row["plans"] = ranks.on_zero(lambda: _with_forecasts(seen.values(), workload, machine))
    if choice.chosen is None:
        nothing = dict.fromkeys(("chosen", "peak_bytes", "forecast_bytes", "step_s", "best", "best_s", "ratio"))
        return {**row, **nothing, "under_budget": False}
    chosen = seen[words_of(choice.chosen.plan, choice.chosen.micro_batch)]
    last = _raced(chosen, [each for each in seen.values() if each.peak_bytes <= budget], pair, ranks)
    best = min((words for words in last if seen[words].peak_bytes <= budget), key=last.__getitem__)
    return {
        **row,
        "chosen": chosen.words,
        "peak_bytes": chosen.peak_bytes,
        "forecast_bytes": choice.chosen.peak_bytes,
        "under_budget": chosen.peak_bytes <= budget,
        "step_s": last[chosen.words],
        "forecast_s": time_s(choice.chosen),
        "best": best,
        "best_s": last[best],
        "ratio": last[chosen.words] / last[best],
        "planning_s": choice.planning_s,
    }


def _seen(words: str, candidate: Candidate, pair: Drawn, ranks: Ranks, machine: Machine) -> Seen:
    running = Running(candidate, pair, ranks)
    peak_bytes = running.peak_bytes() + sum(fixed_bytes(candidate.plan, machine).values())
    found = Seen(candidate, words, peak_bytes, running.turn())
    running.engine.close()
    return found


def _raced(chosen: Seen, fitting: Sequence[Seen], pair: Drawn, ranks: Ranks) -> dict[str, float]:
    """Return the seconds per step of the chosen plan and of the leading plans, keyed by their descriptions."""
    best_s = min(each.step_s for each in fitting)
    contenders = sorted((each for each in fitting if each.step_s <= _MAYBE * best_s), key=lambda each: each.step_s)
    running = {each.words: Running(each.candidate, pair, ranks) for each in (*contenders[:_MOST_CONTENDERS], chosen)}
    gc.collect()
    gc.disable()  # so that no plan spends time on the garbage collection of another plan
    first = _by_turns(running, _TURNS)
    order = sorted(first, key=first.__getitem__)
    leading = [each for each in order if first[each] <= _LEADING * first[order[0]]][:_MOST_LEADING]
    last = _by_turns({each: running[each] for each in dict.fromkeys([*leading, chosen.words])}, _LAST_TURNS)
    gc.enable()
    for each in running.values():
        each.engine.close()
    return last


def _by_turns(running: dict[str, Running], num_turns: int) -> dict[str, float]:
    taken: dict[str, list[float]] = {words: [] for words in running}
    for index in range(num_turns):
        for words in reversed(running) if index % 2 else running:
            taken[words].append(running[words].turn())
    return {words: statistics.median(each) for words, each in taken.items()}


def _with_forecasts(seen: Any, workload: Workload, machine: Machine) -> list[dict[str, Any]]:
    prices = prices_of(workload, machine)
    rows = []
    for each in sorted(seen, key=lambda one: one.step_s):
        forecast = prices.estimate(each.candidate.plan, each.candidate.micro_batch)
        measured = {"plan": each.words, "peak_bytes": each.peak_bytes, "step_s": each.step_s}
        rows.append({**measured, **{f"forecast_{name}": forecast.as_dict()[name] for name in ("peak_bytes", "time")}})
    return rows


def main(folder: Path, settings: dict[str, Any]) -> None:
    """Run the pairs in ``settings`` on this rank. Rank 0 writes ``result.json`` and ``progress.txt``."""
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), settings["num_ranks"]
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    ranks = Ranks(World(rank, size, rank, 0, size))
    rows = {}
    for number in settings["numbers"]:
        start = time.perf_counter()
        row = run_pair(drawn(number, settings["seed"]), ranks, lists_all=settings["all_plans"])
        rows[number] = {**row, "took_s": time.perf_counter() - start}
        if rank == 0:
            with (folder / "progress.txt").open("a") as progress:
                progress.write(f"{_line(number, rows[number])}\n")
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(rows))
    if size > 1:
        dist.destroy_process_group()


def _line(number: int, row: dict[str, Any]) -> str:
    chosen = row["chosen"] or "nothing"
    ratio = "" if row["ratio"] is None else f", {row['ratio']:.3f} of {row['best']}"
    effort = f"{row['num_plans_run']} plans, {row['took_s']:.0f} s"
    return f"pair {number}, {row['model']}, {row['num_ranks']} ranks: {chosen}{ratio} ({effort})"


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
