"""``python -m benchmarks drift``: compare this checkout with an earlier commit on one machine.

Results from different days differ by more than the effect of a single commit. If both versions run alternately, a slow
change of the machine affects both of them.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import RenderableType

from benchmarks.machine import circumstances
from benchmarks.options import table_of
from roomier.core.errors import RoomierError

_ROOT = Path(__file__).parents[1]
_OVERHEAD = ("overhead_us", "overhead_cpu_us", "calls_per_step")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--against", required=True, help="the earlier commit")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each benchmark per commit (%(default)s)")
    parser.add_argument("--overhead", default="--repeats 5", help='its options, or "none" (%(default)s)')
    options = "--model mingpt --ranks 2 --strategies zero1,zero2,zero3"
    parser.add_argument("--strategies", default=options, help='its options, or "none" (%(default)s)')


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmarks of both commits alternately, and return the medians and ratios of their values."""
    facts, chosen = circumstances(), {name: getattr(options, name) for name in ("overhead", "strategies")}
    found: dict[str, dict[str, list[float]]] = {}
    with _checked_out(options.against) as (folder, commit):
        for index in range(options.rounds):
            trees = {"now": _ROOT, "before": folder}
            for which in reversed(trees) if index % 2 else trees:
                for name, words in chosen.items():
                    for value, number in {} if words == "none" else _run(name, words, trees[which]).items():
                        found.setdefault(value, {"before": [], "now": []})[which].append(number)
    rows = [{"value": value, **_compared(each)} for value, each in found.items() if each["before"] and each["now"]]
    return {"case": "drift", "against": commit, "rounds": options.rounds, **chosen, "rows": rows, **facts}


@contextmanager
def _checked_out(commit: str) -> Iterator[tuple[Path, str]]:
    """Check out ``commit`` in a temporary git worktree, and yield its folder and its full hash."""
    commit = _git("rev-parse", "--verify", "--end-of-options", f"{commit}^{{commit}}")
    with TemporaryDirectory() as folder:
        _git("worktree", "add", "--detach", f"{folder}/tree", commit)
        try:
            yield Path(folder) / "tree", commit
        finally:
            _git("worktree", "remove", "--force", f"{folder}/tree")


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(_ROOT), *words], capture_output=True, text=True)
    if done.returncode:
        action = "Run the benchmark in a git checkout of roomier, with a commit of its history"
        raise RoomierError("--against", " ".join(words), f"git failed: {done.stderr.strip()}", action)
    return done.stdout.strip()


def _run(name: str, words: str, tree: Path) -> dict[str, float]:
    is_separate = (tree / "benchmarks" / "__main__.py").exists()  # in early commits, the package has a verb "bench"
    program = ["benchmarks"] if is_separate else ["roomier", "bench"]
    command = [sys.executable, "-P", "-m", *program, name, "--json", *shlex.split(words)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree / "src"), str(tree)])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        lines = "\n".join(["ended with an error; its last lines:", *done.stderr.splitlines()[-20:], ""])
        raise RoomierError("bench", f"{name} {words}", lines, f"Use --{name} with options that both commits support")
    return values_of(json.loads(done.stdout))


def values_of(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the compared values in the result of one benchmark. Smaller values are better."""
    if result["case"] == "strategies":
        keys = ("step_s", "ratio_to_torch_ddp", "peak_bytes")
        return {f"{row['strategy']} {key}": row[key] for row in result["rows"] for key in keys}
    values = {key: result[key] for key in _OVERHEAD}
    if "lightning" in result:
        values["ratio_to_lightning"] = result["overhead_us"] / result["lightning"]["overhead_us"]
    return values


def _compared(numbers: Mapping[str, list[float]]) -> dict[str, Any]:
    before, now = statistics.median(numbers["before"]), statistics.median(numbers["now"])
    ratio = round(now / before, 3) if before else None
    return {"before": before, "now": now, "ratio": ratio, "before_all": numbers["before"], "now_all": numbers["now"]}


def table(result: Mapping[str, Any]) -> RenderableType:
    """Return a table with one line for each value."""
    title, caption = f"drift since {result['against'][:8]}", f"medians of {result['rounds']} alternating runs"
    found = table_of(result, title, caption, ("",), ("before", "now", "ratio"))
    for row in result["rows"]:
        found.add_row(row["value"], *(f"{row[key]:.4g}" if row[key] else "" for key in ("before", "now", "ratio")))
    return found
