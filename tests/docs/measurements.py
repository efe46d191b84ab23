"""The page ``benchmarks.md``: the newest results of each benchmark, with machine, commit and command."""

import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.cases import CASES, load
from benchmarks.choice import summary
from tests.docs.markdown import table

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
_SEPARATE = {"strategies": ("ranks", "stages"), "optimizers": ("seeds",)}
"""Settings for which the newest result of each combination of values is shown."""
_EXCLUDED = ("drift",)  # compares two commits
_INTRODUCTION = """# Benchmarks

This page shows the newest results in the folder `benchmarks/results` of the repository. All results were measured on
CPUs, because this version has not been run on a GPU. Below each table, you find the machine, the commit and the
command, so that you can repeat the measurement in a clone. [The note on benchmarks](design/bench.md) defines all
measured values.
"""
_READING = {
    "overhead": "The overhead does not depend on the size of the model, so it matters only if a step takes a few "
    "milliseconds. The last column shows a LightningModule that roomier's Trainer trains.",
    "levers": "The row `vanilla` uses no memory technique, and the rows `all` combine accumulation, checkpointing and "
    "mixed precision. On a CPU without matrix instructions for bfloat16, mixed precision makes steps slower.",
    "optimizers": "The loss is the mean over the seeds. The column `each seed` lists the difference for each seed.",
    "planner": "The measured peak is the number of bytes of all tensors. For large models, the table also contains the "
    "resident set, which includes the memory of the libraries.",
    "offload": "In the row `resident`, all states are in memory. The lower bound of a step is the time of this row, or "
    "the time of the transfers alone (`raw I/O`) if the transfers take longer. "
    "[Offload](concepts/offload.md#when-a-block-is-updated) describes the three update modes.",
    "choice": "Each row is a model with a memory budget. The step time of the chosen plan is compared with the step "
    "time of the fastest plan.",
    "strategies": "The ranks share the cores of one processor, so the step times do not show the speedup of several "
    "devices. [Choose a strategy](concepts/strategies.md) explains the memory of the model states.",
}
"""How to read the tables of a benchmark."""


def pages() -> Iterator[tuple[str, str]]:
    """Yield the path and the text of the page."""
    parts = [_INTRODUCTION]
    for name, about in CASES.items():
        path = RESULTS / f"{name}.jsonl"
        if path.exists() and name not in _EXCLUDED:
            about = f"{about[0].upper()}{about[1:]}. {_READING.get(name, '')}"
            parts += [f"## {name}", "\n".join(textwrap.wrap(about, 120, break_long_words=False))]
            parts += [_result(name, result) for result in _newest(path)]
    yield "benchmarks.md", "\n\n".join(parts)


def _newest(path: Path) -> list[dict[str, Any]]:
    """Return the newest result in a file, or the newest results of each combination of settings."""
    results = [json.loads(line) for line in path.read_text().splitlines()]
    if path.stem == "choice":
        return [_joined([each for each in results if each["commit"] == results[-1]["commit"]])]
    newest = {tuple(result.get(each, 1) for each in _SEPARATE.get(path.stem, ())): result for result in results}
    return [newest[key] for key in sorted(newest, key=str)]


def _joined(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one result with the pairs of all results, which were measured one pair at a time."""
    pairs = [pair for each in results for pair in each["pairs"]]
    command = re.sub(r"--pairs \d+", f"--pairs {len(pairs)}", results[0]["command"])
    return results[-1] | {"pairs": pairs, "command": command} | summary(pairs)


def _result(name: str, result: dict[str, Any]) -> str:
    shown: Table = load(name).table(result)
    columns = [[_text(cell) for cell in column.cells] for column in shown.columns]
    header = [_text(column.header) for column in shown.columns]
    rows = zip(*columns, strict=True)
    machine = result["machine"]
    lines = [line for line in _text(shown.caption or "").splitlines() if not line.startswith(machine["cpu"])]
    title, caption = _text(shown.title or ""), "; ".join(lines)
    caption = caption and f"{caption[0].upper()}{caption[1:]}."
    memory_gib = machine["memory_bytes"] / 2**30
    source = (
        f"{machine['cpu']}, {machine['num_cores']} cores, {memory_gib:.1f} GiB; torch {result['torch']}, Python "
        f"{result['python']}; commit `{result['commit'][:10]}`; {result['measured_at'][:10]}"
    )
    command = re.sub(r"^roomier bench ", "python -m benchmarks ", result["command"])
    parts = [f"**{title}**" if title else "", table(header, rows), caption, source, f"```bash\n{command}\n```"]
    return "\n\n".join(filter(None, parts))


def _text(cell: object) -> str:
    """Return a cell of a table for the terminal, without its markup of colors."""
    return re.sub(r"\[/?(?:bold|dim|red|green|yellow|italic)[^\]]*\]", "", str(cell)).strip()
