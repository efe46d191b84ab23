"""``roomier bench choice``: the choice of ``strategy="auto"``, compared with measurements of all plans that fit."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from roomier.bench.machine import circumstances
from roomier.bench.rank_processes import run_on_ranks
from roomier.core.units import format_bytes, format_seconds

BAR = 1.10
"""Largest accepted ratio of the step time of the chosen plan to the step time of the best plan."""
_WORKER = "roomier.bench.choice_ranks"


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
        settings = {"num_ranks": num_ranks, "numbers": mine, "seed": options.seed, "all_plans": options.all_plans}
        if not mine:
            continue
        with TemporaryDirectory() as nothing_kept:  # an empty folder, as on a machine without stored measurements
            environment = {"XDG_CACHE_HOME": nothing_kept}
            found = run_on_ranks(_WORKER, num_ranks, settings, environment, tells=sys.stderr)
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
    found = Table(
        title=f"{result['num_within_bar']} of {len(result['pairs'])} choices within {BAR:g} x the best step time, "
        f"{result['under_budget']:.0%} under the budget",
        caption="peak bytes: maximum over the ranks, measured by the memory tracker; medians of interleaved steps\n"
        f"{result['machine']['cpu']}, torch {result['torch']}",
    )
    for name in ("model", "ranks", "chosen", "peak", "budget", "plans run", "step", "of the best", "best"):
        found.add_column(name, justify="left" if name in ("model", "chosen", "best") else "right")
    for row in result["pairs"]:
        chosen = row["chosen"] is not None
        found.add_row(
            row["model"],
            str(row["num_ranks"]),
            row["chosen"] or "nothing",
            format_bytes(row["peak_bytes"]) if chosen else "",
            format_bytes(row["budget_bytes"]),
            str(row["num_plans_run"]),
            format_seconds(row["step_s"]) if chosen else "",
            f"{row['ratio']:.3f}" if chosen else "",
            row["best"] or "",
        )
    return found
