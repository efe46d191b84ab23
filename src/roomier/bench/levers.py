"""``roomier bench levers``: time and memory of each technique for one device, compared with the Hugging Face
Trainer."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from roomier.bench.lever_report import lines, write_report
from roomier.bench.lever_rows import BATCH_SIZE, BERT_SIZES, FRAMEWORKS, ROWS
from roomier.bench.machine import circumstances
from roomier.core.device.resolve import resolve_device
from roomier.core.errors import RoomierError, did_you_mean
from roomier.core.log import notice
from roomier.models.gpt import SIZES

_NUM_LAST_LINES = 15
_COUNTED = "all tensors of the process, counted operation by operation"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--model", default="bert-small", help=f"{', '.join([*BERT_SIZES, *SIZES])} (%(default)s)")
    parser.add_argument("--seq-len", type=int, default=None, help="tokens per sequence (512 on a GPU, 128 on a CPU)")
    parser.add_argument("--levers", default="", help=f"names separated by commas; all by default: {','.join(ROWS)}")
    parser.add_argument("--frameworks", default="", help=f"separated by commas; {','.join(FRAMEWORKS)} if installed")
    parser.add_argument("--steps", type=int, default=5, help="timed optimizer steps per turn (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="turns per row (%(default)s)")
    parser.add_argument("--accelerator", default="auto", help="as in Trainer(accelerator=...) (%(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="torch threads (%(default)s)")
    parser.add_argument("--output", default=None, help="folder for levers.md and levers.png")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return all rows, with the seconds per step and the peak bytes. Every turn runs in a separate process, and rows
    alternate."""
    is_cpu = resolve_device(options.accelerator).type == "cpu"
    facts = circumstances()
    settings = {
        "model": _known("--model", options.model, [*BERT_SIZES, *SIZES]),
        "seq_len": options.seq_len or (128 if is_cpu else 512),
        "steps": options.steps,
        "repeats": options.repeats,
        "threads": options.threads,
        "accelerator": options.accelerator,
    }
    turns = turns_of(options.model, options.levers, options.frameworks)
    found: dict[tuple[str, str], list[dict[str, Any]]] = {turn: [] for turn in turns}
    for index in range(options.repeats):
        for framework, lever in reversed(turns) if index % 2 else turns:
            notice(f"bench levers: turn {index + 1} of {options.repeats}, {lever}, {framework}")
            found[framework, lever].append(_run({**settings, "framework": framework, "lever": lever}))
    result = {
        "case": "levers",
        **settings,
        "batch_size": BATCH_SIZE,
        "peak_is_of": _COUNTED if is_cpu else "the allocator of the device",
        "rows": [row_of(*turn, runs) for turn, runs in found.items()],
        **facts,
    }
    if options.output is not None:
        write_report(result, Path(options.output))
    return result


def turns_of(model: str, levers: str = "", frameworks: str = "") -> list[tuple[str, str]]:
    """Return the framework and the lever of each row of ``model``.

    Args:
        model: name of the model.
        levers: names separated by commas; all by default.
        frameworks: names separated by commas; all installed frameworks by default.

    Raises:
        RoomierError: a name is unknown, or transformers is not installed.
    """
    if find_spec("transformers") is None:
        action = "Run pip install transformers accelerate"
        raise RoomierError(
            "bench levers", "transformers", "is not installed, but the benchmark uses its models", action
        )
    can_compare = find_spec("accelerate") is not None
    possible = [each for each in FRAMEWORKS if each != "transformers" or can_compare]
    chosen = _chosen("--frameworks", frameworks, possible)
    return [
        (framework, lever)
        for lever in _chosen("--levers", levers, list(ROWS))
        for framework in chosen
        if not (ROWS[lever].only_causal and model in BERT_SIZES) and (framework == "roomier" or _has_peer(lever))
    ]


def _has_peer(lever: str) -> bool:
    row = ROWS[lever]
    return row.transformers is not None and (row.needs is None or find_spec(row.needs) is not None)


def _chosen(field: str, text: str, possible: list[str]) -> list[str]:
    return [_known(field, each.strip(), possible) for each in text.split(",") if each.strip()] or possible


def _known(field: str, name: str, known: list[str]) -> str:
    if name not in known:
        raise RoomierError(field, name, "is unknown", did_you_mean(name, known))
    return name


def _run(settings: dict[str, Any]) -> dict[str, Any]:
    """Run one turn and return the values of its process, or its error."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        done = subprocess.run(
            [sys.executable, "-P", "-m", "roomier.bench.lever_worker", json.dumps({**settings, "result": str(path)})],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_WAIT_POLICY": "passive"},  # waiting threads do not occupy cores
        )
        if done.returncode or not path.exists():
            notice(f"bench levers: {settings['framework']}, {settings['lever']} failed:\n{done.stdout[-2000:]}")
            return {"error": "\n".join(done.stdout.splitlines()[-_NUM_LAST_LINES:]), "code": done.returncode}
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def row_of(framework: str, lever: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of a lever from the values of its turns."""
    row: dict[str, Any] = {"framework": framework, "lever": lever}
    failed = next((run for run in runs if "error" in run), None)
    if failed is not None:
        return {**row, "samples_per_s": None, "peak_bytes": None, **failed}
    steps_s = [statistics.median(run["step_s"]) for run in runs]
    step_s = statistics.median(steps_s)
    return {
        **row,
        "samples_per_s": round(BATCH_SIZE / step_s, 3),
        "peak_bytes": max(run["peak_bytes"] for run in runs),
        "peak_rss_bytes": max((run["peak_rss_bytes"] or 0) for run in runs) or None,
        "peak_by_kind": runs[0]["peak_by_kind"],
        "step_s": step_s,
        "step_s_all": steps_s,
    }


def table(result: Mapping[str, Any]) -> RenderableType:
    """Return a table with one line for each technique and framework."""
    found = Table(
        title=f"{result['model']}, {result['batch_size']} sequences of {result['seq_len']} tokens per step",
        caption=f"peak of {result['peak_is_of']}; {result['repeats']} x {result['steps']} steps, medians\n"
        f"{result['machine']['cpu']}, torch {result['torch']}",
    )
    for name, justify in (("lever", "left"), ("framework", "left"), ("samples/s", "right"), ("of vanilla", "right")):
        found.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name in ("peak", "of vanilla"):
        found.add_column(name, justify="right")
    for cells in lines(result):
        found.add_row(*cells)
    return found
