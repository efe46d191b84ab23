"""``python -m benchmarks planner``: forecast and measured peak memory of a step.

A dry run computes the forecast without allocating memory and without other ranks.
:class:`roomier.planner.memory.tracker.MemoryTracker` measures the same step with real tensors on CPU ranks (one process
each, ``python -m benchmarks.planner FOLDER SETTINGS``, gloo). Each rank forecasts its share of the cases. The measured
value is the largest peak of all ranks.

The result is one JSON object: ``median_error`` and ``worst_error`` (relative, over all rows), ``rows``, ``refused``
(rejected plans and the reasons) and ``failures`` (forecasts that raised an error; the list should be empty). The keys
of a row are:

- ``model`` (a key of :mod:`benchmarks.planner_models`), ``strategy``, ``num_ranks``, ``recompute``, ``precision``,
  ``optimizer``, ``accumulate`` (micro-batches per step);
- ``predicted_bytes``, ``measured_bytes``, ``error``, and the predicted and measured bytes by kind;
- in some rows, ``rss_bytes``, a second measurement: the increase in the resident set of a fresh process, from
  before the model is created to the peak during the third step. The model is so wide that the memory of libraries and
  of the allocator is negligible. The key ``error`` does not depend on this measurement.

By default, each model runs with each strategy on each number of ranks, and every pair of options occurs in at least one
row. ``--all`` runs every legal combination, which takes hours. ``--quick`` runs each model twice. ``--budgets`` runs
each model that has blocks with three activation budgets. GPUs are not measured.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import RenderableType
from torch import Tensor, nn

from benchmarks.machine import circumstances, resident_bytes, restart_peak
from benchmarks.options import chosen, table_of
from benchmarks.planner_models import MODELS
from benchmarks.rank_processes import on_this_rank, run_on_ranks
from benchmarks.training import Steps, Trained, engine_of, ignore
from roomier.api.adapt import as_module
from roomier.api.module import Module
from roomier.core.errors import RoomierError
from roomier.core.host_memory import give_back_freed
from roomier.core.log import quiet
from roomier.core.ranks import Ranks
from roomier.core.tree import batch_size_of, map_tensors
from roomier.core.units import format_bytes
from roomier.models.gpt import GPT, GPTConfig
from roomier.plan import Plan
from roomier.planner.dry_runs.budget_estimates import TYPICAL_DEVICE
from roomier.planner.dry_runs.dry_run import dry_run
from roomier.planner.hardware.this_machine import this_machine
from roomier.planner.memory.tracker import MemoryTracker, Snapshot, tracking
from roomier.planner.workload import Workload


def measured_peak(module: nn.Module, batch: Any, plan: Plan, ranks: Ranks | None = None) -> Snapshot:
    """Return the memory at the peak of a step of ``plan`` on a CPU. The step follows one to four warm-up steps.

    Args:
        module: the model. The function trains a copy.
        batch: one micro-batch.
        plan: the plan. The accelerator of the plan is replaced by the CPU.
        ranks: the ranks of the run. Default: one rank.
    """
    tracker = measured_step(module, batch, plan, ranks)
    return tracker.peak()


def measured_step(
    module: nn.Module, batch: Any, plan: Plan, ranks: Ranks | None = None, accelerator: str = "cpu"
) -> MemoryTracker:
    """Run the step of :func:`measured_peak` on ``accelerator`` and return the tracker."""
    plan = replace(plan, parallel=replace(plan.parallel, accelerator=accelerator))
    copied = copy.deepcopy(as_module(module))
    _disable_logging(copied)

    num_batches = plan.batch.accumulate_grad_batches
    num_untracked = 2 if plan.activation.policy == "budget" else 0  # with a budget, the second step is timed
    num_steps_before = 2 if plan.parallel.strategy == "ddp" else 1  # DDP is created after the first step
    num_steps = num_untracked + num_steps_before + 1
    windows = [[map_tensors(torch.clone, batch) for _ in range(num_batches)] for _ in range(num_steps)]

    def step(enter: Callable[[str], None]) -> None:
        enter("forward")
        batches = windows.pop()  # kept alive during the update, as in a training loop
        engine.forward_backward(lambda each, _: copied.training_step(each, 0), batches)
        enter("update")
        if plan.batch.gradient_clip_val is not None:
            engine.clip()
        engine.step()
        del batches
        enter("rest")

    engine = engine_of(plan, copied, ranks, batch)
    with quiet():
        if (scaling := engine.scaler.state()) is not None:  # the initial scale is so large that steps would be skipped
            engine.scaler.load({**scaling, "scale": 1.0})
        for _ in range(num_untracked):
            step(ignore)
        with tracking(engine) as tracker:
            for _ in range(num_steps_before):
                step(tracker.enter)
            tracker.restart()
            step(tracker.enter)
        engine.close()
    return tracker


def _disable_logging(module: Module) -> None:
    for part in module.modules():
        if isinstance(part, Module):
            for name in ("log", "log_dict"):
                part.__dict__[name] = lambda *args, **kwargs: None


RECOMPUTE = ("none", "full", "selective")
BUDGETS = ("budget 0.25", "budget 0.5", "budget 0.75")
PRECISIONS = ("32-true", "bf16-mixed")
OPTIMIZERS = ("adamw", "adafactor", "adamw8bit")
SETUPS = (
    ("single", 1),
    *((strategy, num_ranks) for num_ranks in (2, 4) for strategy in ("ddp", "zero1", "zero2", "zero3")),
    ("hsdp", 4),
)
_LORA = "llama_lora"  # the Llama with adapters, which the plan adds to the model
_WITHOUT_BLOCKS = ("lstm", "lstm_padded", "recommender")  # models without blocks to recompute


@dataclass(frozen=True)
class Case:
    """One plan for one model.

    Attributes:
        model: key of :data:`benchmarks.planner_models.MODELS`, or ``"llama_lora"``.
        strategy: value of ``Trainer(strategy=...)``.
        num_ranks: number of ranks.
        recompute: policy of activation checkpointing. For an activation budget, the word ``budget`` and the fraction,
            such as ``"budget 0.5"``.
        precision: precision mode of the Plan.
        optimizer: value of ``Trainer(optimizer=...)``.
        accumulate: number of micro-batches per step.
    """

    model: str
    strategy: str
    num_ranks: int
    recompute: str
    precision: str
    optimizer: str
    accumulate: int = 1

    @property
    def network(self) -> str:
        """The key of :data:`benchmarks.planner_models.MODELS`."""
        return "llama" if self.model == _LORA else self.model

    def plan(self) -> Plan:
        """Return the plan.

        Raises:
            PlanError: a rule rejects the plan.
        """
        parallel: dict[str, Any] = {"strategy": self.strategy, "devices": self.num_ranks, "accelerator": "cpu"}
        if self.strategy == "hsdp":
            parallel["shard_size"] = self.num_ranks // 2
        policy, _, fraction = self.recompute.partition(" ")
        budget = {"budget_fraction": float(fraction)} if fraction else {}
        sections: dict[str, Any] = {
            "parallel": parallel,
            "precision": {"mode": self.precision},
            "batch": {"accumulate_grad_batches": self.accumulate, "gradient_clip_val": 1.0},
            "optimizer": {"name": self.optimizer, "lr": 1e-4},
            "activation": {"policy": policy, **budget},
        }
        if self.model == _LORA:
            sections["adapter"] = {"lora_rank": 4}
        return Plan.from_dict(sections)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON data."""
        return asdict(self)


def all_cases() -> list[Case]:
    """Return a case for every combination of model, strategy and options."""
    return [
        Case(model, strategy, num_ranks, *levers)
        for model in _names()
        for strategy, num_ranks in SETUPS
        for levers in _levers(model)
    ]


def some_cases(per_pair: int = 2) -> list[Case]:
    """Return cases for every combination of model, strategy and number of ranks.

    Each of these combinations has ``per_pair`` cases with different options, so that every pair of options occurs in at
    least one case.
    """
    return [
        _case(model, setup, i + j + 5 * turn, accumulate=1 + (i + j + turn) % 2)
        for i, model in enumerate(_names())
        for j, setup in enumerate(SETUPS)
        for turn in range(per_pair)
    ]


def few_cases() -> list[Case]:
    """Return two cases with different strategies for every model. Every option occurs in at least two cases."""
    cases = []
    for i, model in enumerate(_names()):
        for turn in range(2):
            j = 3 * i + 7 * turn + i // len(SETUPS)
            cases.append(_case(model, SETUPS[j % len(SETUPS)], i + j + 5 * turn, accumulate=1 + (i + turn) % 2))
    return cases


def budget_cases() -> list[Case]:
    """Return cases with several activation budgets: on one rank, all models that have blocks; on two ranks, a GPT."""
    names = [name for name in _names() if name not in _WITHOUT_BLOCKS]
    alone = [(model, "single", 1, i, 1 + i % 2) for i, model in enumerate(names)]
    together = [("gpt", strategy, 2, i, 1) for i, strategy in enumerate(("ddp", "zero1", "zero2", "zero3"))]
    return [
        Case(model, strategy, num_ranks, budget, PRECISIONS[(i + j * (num_ranks == 1)) % 2], "adamw", accumulate)
        for model, strategy, num_ranks, i, accumulate in alone + together
        for j, budget in enumerate(BUDGETS)
    ]


def _case(model: str, setup: tuple[str, int], number: int, accumulate: int) -> Case:
    levers = _levers(model)
    # The number of combinations is never a multiple of 5, so steps of 5 reach all combinations.
    return Case(model, *setup, *levers[5 * number % len(levers)], accumulate=accumulate)


def _levers(model: str) -> list[tuple[str, str, str]]:
    policies = ("none",) if model in _WITHOUT_BLOCKS else RECOMPUTE
    return list(product(policies, PRECISIONS, OPTIMIZERS))


def _names() -> list[str]:
    return [*MODELS, _LORA]


MODEL = "gpt_wide"
_CONFIG = GPTConfig(vocab_size=4096, context=256, num_layers=6, num_heads=8, width=768, dropout=0.0)
_NUM_SEQUENCES = 8


def make_module() -> Module:
    """Return a GPT of width 768."""
    return Trained(GPT(_CONFIG))


def make_batch() -> tuple[Tensor, Tensor]:
    """Return tokens and targets of 8 sequences."""
    tokens = torch.arange(_NUM_SEQUENCES * _CONFIG.context).view(_NUM_SEQUENCES, -1) * 7 % _CONFIG.vocab_size
    return tokens, tokens.clone()


def make_plan(recompute: str) -> Plan:
    """Return a plan for one CPU with the given policy of activation checkpointing."""
    return Plan.from_dict(
        {"parallel": {"accelerator": "cpu"}, "optimizer": {"name": "adamw"}, "activation": {"policy": recompute}}
    )


def grown_bytes(plan: Plan) -> int:
    """Return the increase of the resident set in bytes."""
    small = torch.nn.Linear(8, 8)
    small(torch.ones(2, 8)).sum().backward()  # loads libraries and starts threads
    gc.collect()
    give_back_freed()
    before = resident_bytes("VmRSS")
    steps = Steps(plan, make_module(), [make_batch()], num_warmup=2)
    give_back_freed()
    restart_peak()
    steps.step()
    return resident_bytes() - before


def run(cases: list[Case], ranks: Ranks) -> list[dict[str, Any]]:
    """Return a row for each case: the forecast, the measured peak of the rank with the largest peak, and the error."""
    world = ranks.world
    own = {number: _forecast(case) for number, case in enumerate(cases) if number % world.size == world.rank}
    forecasts: dict[int, dict[str, Any]] = {}
    for each in ranks.gather(own):
        forecasts |= each
    return [{**case.as_dict(), **_measured(case, forecasts[number], ranks)} for number, case in enumerate(cases)]


def _forecast(case: Case) -> dict[str, Any]:
    torch.manual_seed(0)
    network, batch = MODELS[case.network]()
    module = as_module(network)
    try:
        plan = case.plan()
        device = this_machine(1).device if plan.activation.policy == "budget" else TYPICAL_DEVICE
        found = dry_run(Workload(module, batch, batch_size_of(batch)), plan, device=device)
    except RoomierError as refusal:
        return {"refusal": str(refusal)}
    except Exception:
        return {"failure": traceback.format_exc(limit=-3)}
    kinds = {kind.value: count for kind, count in found.peak.peak.items()}
    return {"predicted_bytes": found.peak_bytes, "predicted_by_kind": kinds}


def _measured(case: Case, forecast: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    if "predicted_bytes" not in forecast:
        return forecast
    torch.manual_seed(0)
    network, batch = MODELS[case.network]()
    peaks = ranks.gather(measured_peak(network, batch, case.plan(), ranks))
    peak = max(peaks, key=lambda each: each.total())
    return {
        **forecast,
        "measured_bytes": peak.total(),
        "measured_by_kind": {kind.value: count for kind, count in peak.num_bytes.items()},
        "error": abs(forecast["predicted_bytes"] / peak.total() - 1),
    }


def _run(settings: dict[str, Any], ranks: Ranks, folder: Path) -> dict[str, Any]:
    if "recompute" in settings:
        return {"rss_bytes": grown_bytes(make_plan(settings["recompute"]))}
    warnings.filterwarnings("ignore")
    return {"rows": run([Case(**each) for each in settings["cases"]], ranks)}


_NUM_SHOWN = 12
_WITNESSED = ("none", "full")
_GIVES_BACK = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}  # glibc returns freed memory immediately


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    how_many = parser.add_mutually_exclusive_group()
    how_many.add_argument("--quick", action="store_true", help="each model twice: under 3 minutes on 2 cores")
    how_many.add_argument("--all", action="store_true", help="every legal combination: hours")
    how_many.add_argument("--budgets", action="store_true", help="each model with three activation budgets")
    parser.add_argument("--models", default="", help="only these models, separated by commas")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Forecast and measure all cases."""
    facts = circumstances()
    cases = _cases_of(options)
    found: list[dict[str, Any]] = []
    for num_ranks in sorted({each.num_ranks for each in cases}):
        settings = {"cases": [each.as_dict() for each in cases if each.num_ranks == num_ranks]}
        found += run_on_ranks("benchmarks.planner", num_ranks, settings)["rows"]
    if not (options.models or options.budgets):
        found += [_witnessed(recompute) for recompute in _WITNESSED]
    rows = [each for each in found if "error" in each]
    errors = [each["error"] for each in rows]
    return {
        "case": "planner",
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "rows": rows,
        "refused": [each for each in found if "refusal" in each],
        "failures": [each for each in found if "failure" in each],
        **facts,
    }


def table(result: Mapping[str, Any]) -> RenderableType:
    """Return a table of the rows with the largest errors and the rows with a measured resident set."""
    title = (
        f"{len(result['rows'])} configurations: median error {result['median_error']:.3%}, largest error "
        f"{result['worst_error']:.2%}"
    )
    caption = (
        f"rows with the {_NUM_SHOWN} largest errors or with a resident set; {len(result['refused'])} rejected, "
        f"{len(result['failures'])} failed"
    )
    words = ("model", "strategy", "recompute", "precision", "optimizer")
    shown = table_of(result, title, caption, words, ("forecast", "measured", "error", "resident set"))
    worst = sorted(result["rows"], key=lambda each: each["error"], reverse=True)
    for row in [*worst[:_NUM_SHOWN], *(each for each in worst[_NUM_SHOWN:] if "rss_bytes" in each)]:
        shown.add_row(
            row["model"],
            f"{row['strategy']} on {row['num_ranks']}",
            row["recompute"],
            row["precision"],
            row["optimizer"],
            format_bytes(row["predicted_bytes"]),
            format_bytes(row["measured_bytes"]),
            f"{row['error']:.2%}",
            format_bytes(row["rss_bytes"]) if "rss_bytes" in row else "",
        )
    return shown


def _cases_of(options: argparse.Namespace) -> list[Case]:
    kinds = {"budgets": budget_cases, "all": all_cases, "quick": few_cases}
    cases = next((make for name, make in kinds.items() if getattr(options, name)), some_cases)()
    names = chosen("--models", options.models, {each.model for each in cases})
    return [each for each in cases if each.model in names]


def _witnessed(recompute: str) -> dict[str, Any]:
    module, batch, plan = make_module(), make_batch(), make_plan(recompute)
    predicted_bytes = dry_run(Workload(module, batch, batch_size_of(batch)), plan).peak_bytes
    measured_bytes = measured_peak(module, batch, plan).total()
    return {
        **Case(MODEL, "single", 1, recompute, "32-true", "adamw").as_dict(),
        "predicted_bytes": predicted_bytes,
        "measured_bytes": measured_bytes,
        "error": abs(predicted_bytes / measured_bytes - 1),
        **run_on_ranks("benchmarks.planner", 1, {"recompute": recompute}, _GIVES_BACK),
    }


if __name__ == "__main__":
    on_this_rank(_run)
