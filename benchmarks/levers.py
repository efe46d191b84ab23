"""``python -m benchmarks levers``: time and memory of each technique for one device, compared with the Hugging Face
Trainer."""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from benchmarks.lever_rows import BATCH_SIZE, BERT_SIZES, FRAMEWORKS, ROWS
from benchmarks.machine import circumstances
from benchmarks.options import chosen, known, table_of
from benchmarks.rank_processes import run_worker
from roomier.core.device.resolve import resolve_device
from roomier.core.errors import RoomierError
from roomier.core.log import notice
from roomier.core.units import format_bytes
from roomier.models.gpt import SIZES

HEADER = ("technique", "framework", "samples/s", "ratio to vanilla", "peak", "ratio to vanilla")
_COLOURS = {"roomier": "#2a6f97", "transformers": "#c9a227"}


def write_report(result: Mapping[str, Any], folder: Path) -> None:
    """Write ``levers.md`` and ``levers.png`` to ``folder``, which is created if necessary.

    Raises:
        RoomierError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise RoomierError("--output", str(folder), "requires matplotlib", "Run pip install matplotlib") from error
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "levers.md").write_text(markdown(result))
    matplotlib.use("Agg")
    _draw(result, folder / "levers.png")


def markdown(result: Mapping[str, Any]) -> str:
    """Return the Markdown report: the table, the machine, versions, commit and command."""
    rows = [HEADER, tuple("---" if index < 2 else "---:" for index in range(len(HEADER))), *lines(result)]
    commit = (result["commit"] or "unknown")[:10]
    return "\n".join(
        [
            f"# {result['model']}, {result['batch_size']} sequences of {result['seq_len']} tokens per step",
            "",
            *(f"| {' | '.join(row)} |" for row in rows),
            "",
            f"Peak of {result['peak_is_of']}; {result['repeats']} turns of {result['steps']} steps, medians. "
            f"{result['machine']['cpu']}, {result['threads']} threads, torch {result['torch']}, commit {commit}.",
            "",
            f"    {result['command']}",
            "",
        ]
    )


def lines(result: Mapping[str, Any]) -> list[list[str]]:
    """Return the cells of the table. Ratios are relative to roomier without any memory technique."""
    rows = result["rows"]
    base = next((row for row in rows if row["lever"] == "vanilla" and row["samples_per_s"]), None)
    cells = []
    for row in rows:
        if row["samples_per_s"] is None:
            cells.append([row["lever"], row["framework"], "failed", "", "", ""])
            continue
        ratios = (
            ["", ""] if base is None else [f"{row[key] / base[key]:.2f}" for key in ("samples_per_s", "peak_bytes")]
        )
        speed, peak = f"{row['samples_per_s']:.2f}", format_bytes(row["peak_bytes"])
        cells.append([row["lever"], row["framework"], speed, ratios[0], peak, ratios[1]])
    return cells


def _draw(result: Mapping[str, Any], path: Path) -> None:
    from matplotlib import pyplot

    rows = {(row["framework"], row["lever"]): row for row in result["rows"] if row["samples_per_s"]}
    levers = [name for name in ROWS if any(lever == name for _, lever in rows)]
    figure, axes = pyplot.subplots(1, 2, sharey=True, figsize=(10, 1.5 + 0.45 * len(levers)), layout="constrained")
    for axis, key, scale, title in zip(
        axes, ("samples_per_s", "peak_bytes"), (1.0, 2**20), ("samples per second", "peak memory, MiB"), strict=True
    ):
        for index, framework in enumerate(FRAMEWORKS):
            places = [place for place, lever in enumerate(levers) if (framework, lever) in rows]
            values = [rows[framework, levers[place]][key] / scale for place in places]
            heights = [place + 0.4 * index - 0.2 for place in places]
            bars = axis.barh(heights, values, height=0.38, color=_COLOURS[framework], label=framework)
            axis.bar_label(bars, fmt="%.3g", padding=3, fontsize=8)
        axis.set_title(title)
        axis.margins(x=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(levers)), levers)
    axes[0].invert_yaxis()
    axes[1].legend(loc="lower right")
    figure.suptitle(f"{result['model']}, {result['batch_size']} sequences of {result['seq_len']} tokens per step")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


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
    known("--model", options.model, [*BERT_SIZES, *SIZES])
    names = ("model", "seq_len", "steps", "repeats", "threads", "accelerator")
    settings = {name: getattr(options, name) for name in names}
    settings["seq_len"] = options.seq_len or (128 if is_cpu else 512)
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
    compared = chosen("--frameworks", frameworks, possible)
    return [
        (framework, lever)
        for lever in chosen("--levers", levers, list(ROWS))
        for framework in compared
        if not (ROWS[lever].only_causal and model in BERT_SIZES) and (framework == "roomier" or _has_peer(lever))
    ]


def _has_peer(lever: str) -> bool:
    row = ROWS[lever]
    return row.transformers is not None and (row.needs is None or find_spec(row.needs) is not None)


def _run(settings: dict[str, Any]) -> dict[str, Any]:
    """Run one turn and return the values of its process, or its error."""
    # waiting threads do not occupy cores
    text, code, last_lines = run_worker("benchmarks.lever_worker", settings, OMP_WAIT_POLICY="passive")
    if code or not text:
        notice(f"bench levers: {settings['framework']}, {settings['lever']} failed:\n{last_lines}")
        return {"error": last_lines, "code": code}
    found: dict[str, Any] = json.loads(text)
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
    title = f"{result['model']}, {result['batch_size']} sequences of {result['seq_len']} tokens per step"
    caption = f"peak of {result['peak_is_of']}; median of {result['repeats']} x {result['steps']} steps"
    found = table_of(result, title, caption, HEADER[:2], HEADER[2:])
    for cells in lines(result):
        found.add_row(*cells)
    return found
