"""``roomier bench choice``: what ``strategy="auto"`` picks, beside all plans that really fit, each of them run."""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from roomier.bench.machine import circumstances
from roomier.core.errors import RoomierError
from roomier.core.units import format_bytes, format_seconds

BAR = 1.10
"""The chosen plan's step may take this many times the best one's."""
_RANK_LIMIT_S = 1800.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=int, default=20, help="random models, each with a random budget (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first pair: each is drawn by its number")
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn (%(default)s)")
    parser.add_argument("--repeats", type=int, default=7, help="turns of each plan that may be the best (%(default)s)")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """A row for each pair: what was chosen, what it took, and what the best plan takes."""
    facts = circumstances()
    rows = []
    for number in range(options.first, options.first + options.pairs):
        settings = {**drawn(number), "steps": options.steps, "repeats": options.repeats}
        rows.append({**settings, **_run_ranks(settings)})
        print(_line(rows[-1]), file=sys.stderr, flush=True)
    return {
        "case": "choice",
        "rows": rows,
        "all_under_budget": all(row["is_under_budget"] for row in rows),
        "worst_ratio_to_best": max(row["ratio_to_best"] for row in rows),
        "median_ratio_to_best": statistics.median(row["ratio_to_best"] for row in rows),
        "num_within_bar": sum(row["ratio_to_best"] <= BAR for row in rows),
        **facts,
    }


def drawn(number: int) -> dict[str, Any]:
    """The model of a pair, and how tight its budget is: the same whenever it is asked for."""
    draw = random.Random(number)
    return {
        "pair": number,
        "ranks": 1 + number % 2,
        "num_layers": draw.choice([1, 2, 3, 4]),
        "width": draw.choice([64, 96, 128, 192]),
        "vocab_size": draw.choice([256, 1024, 4096]),
        "seq_len": draw.choice([32, 64, 128]),
        "batch_size": draw.choice([2, 4, 6, 8]),
        "tightness": round(draw.uniform(0.0, 1.0), 3),  # 0: the smallest plan just fits; 1: all do
    }


def _run_ranks(settings: Mapping[str, Any]) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-P", "-m", "roomier.bench.choice_ranks", folder, json.dumps(settings)]
        files = [(Path(folder) / f"rank{rank}.txt").open("w+") for rank in range(settings["ranks"])]
        processes = [
            subprocess.Popen(
                command,
                env={**os.environ, "OMP_NUM_THREADS": "1", "BENCH_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            for rank, file in enumerate(files)
        ]
        try:
            codes = [each.wait(timeout=_RANK_LIMIT_S) for each in processes]
        finally:
            for each in processes:
                each.kill()
                each.wait()
            for file in files:
                file.close()
        if any(codes):
            rank = next(rank for rank, code in enumerate(codes) if code)
            lines = (Path(folder) / f"rank{rank}.txt").read_text().splitlines()[-20:]
            problem = "\n".join([f"ended with code {codes[rank]}; its last lines:", *lines, ""])
            raise RoomierError("bench choice", f"pair {settings['pair']}, rank {rank}", problem, "Run it by --first")
        found: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
        return found


def _line(row: Mapping[str, Any]) -> str:
    return (
        f"pair {row['pair']}: {row['chosen']} took {format_bytes(row['peak_bytes'])} of "
        f"{format_bytes(row['budget_bytes'])}, {row['ratio_to_best']:.3f} of the best ({row['best']})"
    )


def table(result: Mapping[str, Any]) -> RenderableType:
    found = Table(
        title=f"{result['num_within_bar']} of {len(result['rows'])} choices within {BAR:g} of the best step",
        caption="peaks by the tracker, of the worst rank; steps interleaved, medians\n"
        f"{result['machine']['cpu']}, torch {result['torch']}",
    )
    for name in ("pair", "ranks", "chosen", "peak", "budget", "plans run", "step", "of the best", "best"):
        found.add_column(name, justify="left" if name in ("chosen", "best") else "right")
    for row in result["rows"]:
        found.add_row(
            str(row["pair"]),
            str(row["ranks"]),
            row["chosen"],
            format_bytes(row["peak_bytes"]),
            format_bytes(row["budget_bytes"]),
            str(row["num_plans"]),
            format_seconds(row["step_s"]),
            f"{row['ratio_to_best']:.3f}",
            row["best"],
        )
    return found
