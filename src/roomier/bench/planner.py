"""``roomier bench planner``: forecast and measured peak memory of a step.

A dry run computes the forecast without allocating memory and without other ranks.
:class:`roomier.planner.memory.tracker.MemoryTracker` measures the same step with real tensors on CPU ranks (one process
each, gloo). The measured value is the largest peak of all ranks.

The result is one JSON object: ``median_error`` and ``worst_error`` (relative, over all rows), ``rows``, ``refused``
(rejected plans and the reasons) and ``failures`` (forecasts that raised an error; the list should be empty). The keys
of a row are:

- ``model`` (a key of :mod:`roomier.bench.planner_models`), ``strategy``, ``num_ranks``, ``recompute``, ``precision``,
  ``optimizer``, ``accumulate`` (micro-batches per step);
- ``predicted_bytes``, ``measured_bytes``, ``error``, and the predicted and measured bytes by kind;
- in some rows, ``rss_bytes``, a second measurement: the increase in the resident set of a fresh process
  (:mod:`roomier.bench.planner_rss`). The key ``error`` does not depend on this measurement.

By default, each model runs with each strategy on each number of ranks, and every pair of options occurs in at least one
row. ``--all`` runs every legal combination, which takes hours. ``--quick`` runs each model twice. ``--budgets`` runs
each model that has blocks with three activation budgets. GPUs are not measured.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from roomier.bench.machine import circumstances
from roomier.bench.planner_cases import Case, all_cases, budget_cases, few_cases, some_cases
from roomier.bench.planner_rss import MODEL, WideGPT, make_batch, make_plan
from roomier.bench.planner_truth import measured_peak
from roomier.bench.rank_processes import run_on_ranks
from roomier.core.errors import RoomierError, did_you_mean
from roomier.core.tree import batch_size_of
from roomier.core.units import format_bytes
from roomier.planner.dry_runs.dry_run import dry_run
from roomier.planner.workload import Workload

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
    cases = _of_models(_cases_of(options), options.models)
    found: list[dict[str, Any]] = []
    for num_ranks in sorted({each.num_ranks for each in cases}):
        chosen = [each.as_dict() for each in cases if each.num_ranks == num_ranks]
        settings = {"ranks": num_ranks, "cases": chosen}
        found += run_on_ranks("roomier.bench.planner_ranks", num_ranks, settings)["rows"]
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
    shown = Table(
        title=f"median error {result['median_error']:.3%}, worst {result['worst_error']:.2%} of {len(result['rows'])}",
        caption=f"the {_NUM_SHOWN} largest errors, and rows with a resident set; {len(result['refused'])} rejected, "
        f"{len(result['failures'])} failed\n{result['machine']['cpu']}, torch {result['torch']}",
    )
    for name in ("model", "strategy", "recompute", "precision", "optimizer"):
        shown.add_column(name)
    for name in ("forecast", "measured", "error", "resident set"):
        shown.add_column(name, justify="right")
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
    if options.budgets:
        return budget_cases()
    return all_cases() if options.all else few_cases() if options.quick else some_cases()


def _of_models(cases: Sequence[Case], text: str) -> list[Case]:
    names = [each.strip() for each in text.split(",") if each.strip()]
    known = {each.model for each in cases}
    for name in names:
        if name not in known:
            raise RoomierError("--models", name, "is unknown", did_you_mean(name, known))
    return [each for each in cases if not names or each.model in names]


def _witnessed(recompute: str) -> dict[str, Any]:
    module, batch, plan = WideGPT(), make_batch(), make_plan(recompute)
    predicted_bytes = dry_run(Workload(module, batch, batch_size_of(batch)), plan).peak_bytes
    measured_bytes = measured_peak(module, batch, plan).total()
    return {
        **Case(MODEL, "single", 1, recompute, "32-true", "adamw").as_dict(),
        "predicted_bytes": predicted_bytes,
        "measured_bytes": measured_bytes,
        "error": abs(predicted_bytes / measured_bytes - 1),
        **run_on_ranks("roomier.bench.planner_rss", 1, {"recompute": recompute}, _GIVES_BACK),
    }
