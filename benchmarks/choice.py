"""``python -m benchmarks choice``: the choice of ``strategy="auto"``, compared with measurements of all plans that
fit.

Each rank is a process ``python -m benchmarks.choice FOLDER SETTINGS``. Every plan runs alone for two warm-up steps, one
step under the memory tracker, and three timed steps. The budget is between the smallest and the largest measured peak,
and ``auto`` chooses a plan for this budget. The chosen plan and the fast plans that fit are then built again and timed
in alternating turns. If each of many plans is measured only once, the fastest measurement is partly due to chance.
Therefore, the leading plans are timed in additional turns, and only these turns are used.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import RenderableType
from torch import Tensor, nn

from benchmarks.machine import circumstances
from benchmarks.models.bert import Bert, BertConfig
from benchmarks.models.resnet import Classifier
from benchmarks.options import table_of
from benchmarks.rank_processes import on_this_rank, run_on_ranks
from benchmarks.training import Steps, Trained
from roomier.api.module import Module
from roomier.core.ranks import Ranks
from roomier.core.units import format_bytes, format_seconds
from roomier.models.gpt import GPT, GPTConfig
from roomier.plan import plan_from_flags
from roomier.planner.choice import Considered, words_of
from roomier.planner.choosing.candidates import candidates
from roomier.planner.choosing.choose import choose
from roomier.planner.choosing.pricing import ClosedForms, time_s
from roomier.planner.formula.fixed_bytes import fixed_bytes
from roomier.planner.hardware.machine import Machine
from roomier.planner.hardware.this_machine import this_machine
from roomier.planner.workload import Workload

_WORDS = {"vocab": (512, 2048, 4096), "width": (128, 192, 256), "layers": (3, 4), "tokens": (32, 64)}
_SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "gpt": _WORDS,
    "mlp": {"width": (256, 384, 512), "layers": (2, 3, 4), "rows": (8, 32)},
    "conv": {"channels": (128, 160, 192), "layers": (2, 3, 4)},
    "bert": _WORDS,
}
KINDS = tuple(_SIZES)
_NUM_CLASSES = 100


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


@dataclass(frozen=True)
class Drawn:
    """A model, the batch of each rank, and a memory budget.

    Attributes:
        kind: one of :data:`KINDS`.
        num_ranks: number of ranks.
        sizes: mapping from names to sizes of the model and of one sample.
        batch_size: number of samples per rank.
        tightness: position of the budget between the smallest peak (0) and the largest peak (1) of all plans.
    """

    kind: str
    num_ranks: int
    sizes: dict[str, int]
    batch_size: int
    tightness: float

    @property
    def name(self) -> str:
        """Kind, sizes and batch size, as text."""
        return " ".join([self.kind, *(f"{name}={size}" for name, size in self.sizes.items()), f"x{self.batch_size}"])

    def module(self) -> Module:
        """Return a new module with the same initial weights in every call."""
        torch.manual_seed(0)
        sizes = self.sizes
        if self.kind == "mlp":
            return MLP(sizes["width"], sizes["layers"])
        if self.kind == "conv":
            return Classifier((sizes["layers"],), sizes["channels"], _NUM_CLASSES)
        words = sizes["vocab"], sizes["tokens"], sizes["layers"], 4, sizes["width"]
        if self.kind == "bert":
            return Trained(Bert(BertConfig(*words, num_classes=_NUM_CLASSES)))
        return Trained(GPT(GPTConfig(*words, dropout=0.0)))

    def batch(self, num_samples: int) -> tuple[Tensor, Tensor]:
        """Return random inputs and targets of ``num_samples`` samples."""
        if self.kind == "mlp":
            shape = (num_samples, self.sizes["rows"], self.sizes["width"])
            return torch.randn(shape), torch.randn(shape)
        if self.kind == "conv":
            return torch.randn(num_samples, 3, 32, 32), torch.randint(_NUM_CLASSES, (num_samples,))
        tokens = torch.randint(self.sizes["vocab"], (num_samples, self.sizes["tokens"]))
        return tokens, torch.randint(_NUM_CLASSES, (num_samples,)) if self.kind == "bert" else tokens.roll(-1, 1)


def drawn(number: int, seed: int) -> Drawn:
    """Return the model and budget that ``number`` and ``seed`` define. Kinds and numbers of ranks alternate."""
    draw = random.Random(f"{seed}, {number}")
    kind = KINDS[number // 2 % len(KINDS)]
    sizes = {name: draw.choice(values) for name, values in _SIZES[kind].items()}
    return Drawn(kind, 1 + number % 2, sizes, draw.choice([2, 4, 6]), draw.uniform(0, 1))


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

    candidate: Considered
    words: str
    peak_bytes: int
    step_s: float


class Running(Steps):
    """The steps of a plan on this rank."""

    def __init__(self, candidate: Considered, pair: Drawn, ranks: Ranks) -> None:
        self._ranks = ranks
        batches = [pair.batch(candidate.micro_batch)] * candidate.plan.batch.accumulate_grad_batches
        super().__init__(candidate.plan, pair.module(), batches, ranks, _WARMUP_STEPS)

    def peak_bytes(self) -> int:
        """Return the peak memory of all tensors in a step in bytes, on the rank with the largest peak."""
        with self.tracked() as tracker:
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
    found = [each for each in candidates(workload, asked, machine) if not each.reason]
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


def _seen(words: str, candidate: Considered, pair: Drawn, ranks: Ranks, machine: Machine) -> Seen:
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
    prices = ClosedForms(workload, machine)
    rows = []
    for each in sorted(seen, key=lambda one: one.step_s):
        forecast = prices.estimate(each.candidate.plan, each.candidate.micro_batch)
        measured = {"plan": each.words, "peak_bytes": each.peak_bytes, "step_s": each.step_s}
        rows.append({**measured, **{f"forecast_{name}": forecast.as_dict()[name] for name in ("peak_bytes", "time")}})
    return rows


def run(settings: dict[str, Any], ranks: Ranks, folder: Path) -> dict[int, dict[str, Any]]:
    """Run the pairs in ``settings`` on this rank. Rank 0 writes ``progress.txt``."""
    rows = {}
    for number in settings["numbers"]:
        start = time.perf_counter()
        row = run_pair(drawn(number, settings["seed"]), ranks, lists_all=settings["all_plans"])
        rows[number] = {**row, "took_s": time.perf_counter() - start}
        if ranks.is_zero:
            with (folder / "progress.txt").open("a") as progress:
                progress.write(f"{_line(number, rows[number])}\n")
    return rows


def _line(number: int, row: dict[str, Any]) -> str:
    chosen = row["chosen"] or "nothing"
    ratio = "" if row["ratio"] is None else f", {row['ratio']:.3f} of {row['best']}"
    effort = f"{row['num_plans_run']} plans, {row['took_s']:.0f} s"
    return f"pair {number}, {row['model']}, {row['num_ranks']} ranks: {chosen}{ratio} ({effort})"


BAR = 1.10
"""Largest accepted ratio of the step time of the chosen plan to the step time of the best plan."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--pairs", type=int, default=20, help="number of pairs of model and budget (%(default)s)")
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first pair; the number and the seed determine a pair"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of models and budgets (%(default)s)")
    parser.add_argument("--all-plans", action="store_true", help="report every plan that was run, with its forecast")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each pair: the chosen plan, its step time, and the step time of the best plan."""
    facts = circumstances()
    numbers = range(options.first, options.first + options.pairs)
    rows: dict[int, dict[str, Any]] = {}
    for num_ranks in (1, 2):
        mine = [number for number in numbers if 1 + number % 2 == num_ranks]
        settings = {"numbers": mine, "seed": options.seed, "all_plans": options.all_plans}
        if not mine:
            continue
        with TemporaryDirectory() as nothing_kept:  # an empty folder, as on a machine without stored measurements
            environment = {"XDG_CACHE_HOME": nothing_kept}
            found = run_on_ranks("benchmarks.choice", num_ranks, settings, environment, tells=sys.stderr)
        rows |= {int(number): row for number, row in found.items()}
    return {"case": "choice", **summary([rows[number] for number in numbers]), **facts}


def summary(pairs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the summary values of all pairs.

    Returns:
        ``pairs``; ``under_budget``, the share of pairs whose peak is below the budget; ``worst_ratio`` and
        ``median_ratio`` of the step times (chosen plan / best plan), None if a pair has no ratio; ``num_within_bar``,
        the number of ratios up to :data:`BAR`.
    """
    ratios = [each["ratio"] for each in pairs]
    known = [ratio for ratio in ratios if ratio is not None]
    is_whole = len(known) == len(ratios)
    return {
        "pairs": list(pairs),
        "under_budget": statistics.mean(float(each["under_budget"]) for each in pairs),
        "worst_ratio": max(known) if is_whole else None,
        "median_ratio": statistics.median(known) if is_whole else None,
        "num_within_bar": sum(ratio <= BAR for ratio in known),
    }


def table(result: Mapping[str, Any]) -> RenderableType:
    """Return a table with one line for each pair."""
    title = (
        f"{result['num_within_bar']} of {len(result['pairs'])} choices within {BAR:g} x the best step time, "
        f"{result['under_budget']:.0%} under the budget"
    )
    caption = "the peak is the maximum over the ranks, measured by the memory tracker; the step time is a median"
    numbers = ("ranks", "peak", "budget", "plans run", "step", "ratio to best")
    found = table_of(result, title, caption, ("model", "chosen", "best"), numbers)
    for row in result["pairs"]:
        chosen = row["chosen"] is not None
        found.add_row(
            row["model"],
            row["chosen"] or "nothing",
            row["best"] or "",
            str(row["num_ranks"]),
            format_bytes(row["peak_bytes"]) if chosen else "",
            format_bytes(row["budget_bytes"]),
            str(row["num_plans_run"]),
            format_seconds(row["step_s"]) if chosen else "",
            f"{row['ratio']:.3f}" if chosen else "",
        )
    return found


if __name__ == "__main__":
    on_this_rank(run)
