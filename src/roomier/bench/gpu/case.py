"""``roomier bench gpu``: memory, speed and copies on an accelerator, in parts that can be repeated."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from rich.console import RenderableType
from rich.table import Table

from roomier.bench.gpu.parts import PARTS, SIZES, Part, Setting
from roomier.bench.gpu.results import COMPLETE, FAILED, Results, default_path, facts_of
from roomier.core.errors import RoomierError, did_you_mean
from roomier.core.log import notice

_WORKER = "roomier.bench.gpu.worker"
_NUM_LAST_LINES = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--size", choices=SIZES, default="full", help="full is for GPUs, tiny for tests (%(default)s)")
    parser.add_argument("--accelerator", default="gpu", help="as in Trainer(accelerator=...) (%(default)s)")
    parser.add_argument("--parts", default="", help=f"names separated by commas; all by default: {','.join(PARTS)}")
    parser.add_argument("--out", default=None, help="results file (benchmarks/results/gpu-DEVICE-COMMIT.jsonl)")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the parts that the results file does not contain, each in a separate process.

    Returns:
        ``parts``: for each part, its status, failed rows, rows without a measurement, and the last line of each row.
        ``failed``: names of the parts that failed.
    """
    setting = Setting(options.size, options.accelerator)
    names = _chosen(options.parts)
    facts = facts_of(setting)
    results = Results(default_path(facts) if options.out is None else Path(options.out), facts)
    for name in names:
        if any(end["status"] == COMPLETE for end in results.ends(name)):
            notice(f"bench gpu: {name} is complete in {results.path}")
        else:
            _run(name, PARTS[name], setting, results)
    ends = {name: results.ends(name)[-1] for name in names}
    return {
        "case": "gpu",
        "out": str(results.path),
        "parts": {
            name: {
                **{key: end.get(key) for key in ("status", "error", "rows_left", "rows_failed", "took_s")},
                "rows": [_without_facts(row, facts) for row in results.rows(name).values()],
            }
            for name, end in ends.items()
        },
        "failed": [name for name, end in ends.items() if end["status"] == FAILED],
        **facts,
    }


def _chosen(text: str) -> list[str]:
    names = [each.strip() for each in text.split(",") if each.strip()]
    for name in names:
        if name not in PARTS:
            raise RoomierError("--parts", name, "is unknown", did_you_mean(name, PARTS))
    return [each for each in PARTS if not names or each in names]


def _without_facts(line: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key not in facts and key not in ("record", "part")}


def _run(name: str, part: Part, setting: Setting, results: Results) -> None:
    """Run one part and append a final line to the results file if the part did not write one."""
    limit_s = part.limit_of(setting.size)
    notice(f"bench gpu: {name}, at most {limit_s:g} s")
    settings = {
        "part": name,
        "module": part.module,
        "started_s": time.time(),
        "limit_s": limit_s,
        "size": setting.size,
        "accelerator": setting.accelerator,
        "out": str(results.path),
        "facts": results.facts,
    }
    num_ends = len(results.ends(name))
    with TemporaryFile("w+") as output:
        code = run_with_limit([sys.executable, "-P", "-m", _WORKER, json.dumps(settings)], output, limit_s)
        output.seek(0)
        last_lines = output.read().splitlines()[-_NUM_LAST_LINES:]
    if len(results.ends(name)) == num_ends:
        problem = f"was stopped after {limit_s:g} s" if code is None else f"ended with code {code}"
        error = "\n".join([f"the process {problem}; its last lines:", *last_lines])
        results.append("end", name, status=FAILED, rows_left=None, rows_failed=[], took_s=None, error=error)
    end = results.ends(name)[-1]
    for row in results.rows(name).values():
        notice(f"bench gpu: {name}: {row['row']}: {row['summary']}")
    left = "".join(f", {len(end[key])} {word}" for key, word in _COUNTS.items() if end[key])
    notice(f"bench gpu: {name}: {end['status']}{left}" + (f"; {end['error']}" if "error" in end else ""))


_COUNTS = {"rows_left": "rows left: repeat the command", "rows_failed": "rows failed"}


def run_with_limit(command: list[str], output: IO[str], limit_s: float) -> int | None:
    """Run ``command``. After ``limit_s`` seconds, kill the command and all processes that it started.

    Args:
        command: program and arguments.
        output: file that receives standard output and standard error.
        limit_s: time limit in seconds.

    Returns:
        The exit code; None if the time limit was reached.
    """
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:  # ranks of the part may outlive its process
        _kill_session(process)


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def table(result: Mapping[str, Any]) -> RenderableType:
    """Return a table with one line for each row."""
    found = Table(
        "part",
        "row",
        "result",
        title=f"{result['device']}, {result['size']} size",
        caption=f"{result['out']}\n{result['machine']['cpu']}, torch {result['torch']}",
    )
    for name, part in result["parts"].items():
        for index, row in enumerate(part["rows"]):
            found.add_row("" if index else name, row["row"], row["summary"])
        if part["status"] != COMPLETE:
            left = ", ".join(part["rows_left"] or ())
            found.add_row("" if part["rows"] else name, part["status"], part["error"] or left)
    return found
