"""``python -m benchmarks gpu``: memory, speed and copies on an accelerator, in parts that can be repeated.

Each part runs in a process ``python -m benchmarks.gpu.case SETTINGS``. The results file has one JSON object per line.
Each line is appended when its values are known.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from rich.console import RenderableType
from rich.table import Table

import benchmarks
import roomier
from benchmarks.gpu.parts import PARTS, SIZES, Part, Setting
from benchmarks.machine import circumstances
from benchmarks.options import chosen
from benchmarks.rank_processes import command_of, environment_of
from roomier.core.device.capability import capabilities_of
from roomier.core.device.memory import allocated_bytes, release_cached
from roomier.core.device.resolve import device_name, num_devices
from roomier.core.log import notice

KEY = ("commit", "source", "torch", "cpu", "device", "num_devices", "size")
"""Facts that must be equal for a line in the file to be valid for this run."""

MEASURED, UNSUPPORTED, FAILED = "measured", "unsupported", "failed"  # status of a row
COMPLETE, INCOMPLETE = "complete", "incomplete"  # status of a part, in addition to FAILED

Record = dict[str, Any]


def facts_of(setting: Setting) -> Record:
    """Return the facts that each line contains: machine, versions, commit, command, device and size."""
    device = setting.device
    facts = circumstances()
    return {
        **facts,
        "source": source_hash(),
        "cpu": facts["machine"]["cpu"],
        "device": facts["machine"]["cpu"] if device.type == "cpu" else device_name(device) or device.type,
        "device_type": device.type,
        "num_devices": num_devices(device),
        "size": setting.size,
    }


def source_hash() -> str:
    """Return a hash of the Python files of roomier and the benchmarks. The hash also differs between different
    uncommitted changes to the same commit."""
    found = hashlib.sha256()
    for folder in (Path(roomier.__file__).parent, Path(benchmarks.__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            found.update(str(path.relative_to(folder.parent)).encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def default_path(facts: Mapping[str, Any]) -> Path:
    """Return the path of the results file in the repository. The file name contains the device and the commit."""
    device = re.sub(r"[^a-z0-9]+", "-", facts["device"].lower()).strip("-")
    return Path("benchmarks", "results", f"gpu-{device}-{(facts['commit'] or 'unknown')[:10]}.jsonl")


class Results:
    """The lines of a results file that are valid for this run.

    Args:
        path: the file. The file and its folder are created by the first :meth:`append`.
        facts: see :func:`facts_of`.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self.path = path
        self.facts = dict(facts)

    def append(self, record: str, part: str, **values: Any) -> None:
        """Append a line.

        Args:
            record: ``"row"`` or ``"end"``.
            part: name of the part.
            values: additional values of the line.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"record": record, "part": part, **values, **self.facts})
        with self.path.open("ab+") as file:
            if file.seek(0, 2) and (file.seek(-1, 2), file.read(1))[1] != b"\n":
                line = f"\n{line}"  # a process was stopped while it wrote the last line
            file.write(f"{line}\n".encode())

    def rows(self, part: str) -> dict[str, Record]:
        """Return the last line of each row of ``part``."""
        return {each["row"]: each for each in self._lines() if each["record"] == "row" and each["part"] == part}

    def finished_rows(self, part: str) -> set[str]:
        """Return the names of the rows that a repeated run skips."""
        return {name for name, each in self.rows(part).items() if each["status"] in (MEASURED, UNSUPPORTED)}

    def ends(self, part: str) -> list[Record]:
        """Return the ``"end"`` lines of ``part``, one for each run of the part."""
        return [each for each in self._lines() if each["record"] == "end" and each["part"] == part]

    def _lines(self) -> Iterator[Record]:
        if not self.path.exists():
            return
        for text in self.path.read_text().splitlines():
            try:
                line = json.loads(text)
            except ValueError:  # a process was stopped while it wrote the line
                continue
            if isinstance(line, dict) and all(line.get(name) == self.facts[name] for name in KEY):
                yield line


# Fraction of the time limit after which no row starts, because the last row can take longer than earlier rows.
_USABLE_SHARE = 0.9
_NUM_LAST_FRAMES = 4


def measure_part(
    name: str,
    module: Any,
    setting: Setting,
    results: Results,
    limit_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Measure the rows of a part that ``results`` does not contain. Append each row, and a final line for the part.

    A row that fails is recorded with its error. A row is started only if the time that remains until 90 % of the time
    limit is at least the duration of the longest row so far.

    Args:
        name: name under which the results file lists the part.
        module: module of the part.
        setting: size and device.
        results: file to which the rows are appended.
        limit_s: time limit of the part in seconds, counted from this call.
        clock: function that returns the current time in seconds.
    """
    start_s = clock()
    end_s = start_s + _USABLE_SHARE * limit_s
    finished = results.finished_rows(name)
    device = setting.device
    counts_bytes = capabilities_of(device).has_memory_statistics
    left = {row: measure for row, measure in module.rows(setting).items() if row not in finished}
    failed: list[str] = []
    longest_s = 0.0
    while left and clock() + longest_s <= end_s:
        row = next(iter(left))
        measure = left.pop(row)
        row_start_s = clock()
        before_bytes = allocated_bytes(device) if counts_bytes else None
        values, status = _measured(measure)
        took_s = clock() - row_start_s
        longest_s = max(longest_s, took_s)
        summary = module.summary(values) if status == MEASURED else values.get("unsupported", "failed")
        results.append(
            "row",
            name,
            row=row,
            status=status,
            summary=summary,
            took_s=took_s,
            allocated_before_bytes=before_bytes,
            **values,
        )
        if status == FAILED:
            failed.append(row)
        gc.collect()  # objects of this row
        release_cached(device)
    status = FAILED if failed else INCOMPLETE if left else COMPLETE
    results.append("end", name, status=status, rows_left=list(left), rows_failed=failed, took_s=clock() - start_s)


def _measured(measure: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], str]:
    try:
        values = measure()
    except Exception as error:
        last_frames = traceback.format_exc(-_NUM_LAST_FRAMES)
        return {"error": f"{type(error).__name__}: {error}", "traceback": last_frames}, FAILED
    return values, FAILED if "error" in values else UNSUPPORTED if "unsupported" in values else MEASURED


def main(settings: dict[str, Any]) -> None:
    """Measure one part.

    Args:
        settings: name and module of the part, start time of the part's process, time limit, size, accelerator, path of
            the results file, and the facts that each line of this file contains (see
            :func:`benchmarks.gpu.case.facts_of`).
    """
    warnings.filterwarnings("ignore")
    measure_part(
        settings["part"],
        import_module(settings["module"]),
        Setting(settings["size"], settings["accelerator"]),
        Results(Path(settings["out"]), settings["facts"]),
        settings["limit_s"] - (time.time() - settings["started_s"]),
    )


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
    names = [each for each in PARTS if each in chosen("--parts", options.parts, PARTS)]
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
        code = run_with_limit(command_of("benchmarks.gpu.case", json.dumps(settings)), output, limit_s)
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
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment_of(),
        start_new_session=True,
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


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
