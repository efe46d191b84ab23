"""Ranks of a benchmark on this machine, each as one process with one thread."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TextIO

from roomier.core.errors import RoomierError
from roomier.core.loopback import keep_on_loopback


def run_on_ranks(
    worker: str,
    num_ranks: int,
    settings: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    tells: TextIO | None = None,
) -> dict[str, Any]:
    """Run ``python -m worker FOLDER SETTINGS`` for each rank, with the rank in ``RANK``.

    Args:
        worker: name of the module that each rank runs. The process of rank 0 writes ``result.json`` to the folder.
        num_ranks: number of processes.
        settings: JSON data for the worker.
        environment: environment variables to add to the variables of this process.
        tells: output stream for the lines that rank 0 writes to ``progress.txt``; None to print nothing.

    Returns:
        The content of ``result.json``, after all ranks have ended.

    Raises:
        RoomierError: a rank failed. The message contains the last lines that the rank printed.
    """
    with TemporaryDirectory() as folder:
        path = Path(folder)
        environ = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        keep_on_loopback(environ)
        files = [(path / f"rank{rank}.txt").open("w+") for rank in range(num_ranks)]
        try:
            processes = [
                subprocess.Popen(
                    [sys.executable, "-P", "-m", worker, str(path), json.dumps(settings)],
                    env={**environ, "RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
                for rank, file in enumerate(files)
            ]
            _wait(processes, path, tells)
            found: dict[str, Any] = json.loads((path / "result.json").read_text())
            return found
        finally:
            for file in files:
                file.close()


def _wait(processes: Sequence[subprocess.Popen[bytes]], folder: Path, tells: TextIO | None) -> None:
    num_printed = 0
    try:
        while any(each.poll() is None for each in processes):
            failed = [rank for rank, each in enumerate(processes) if each.poll()]
            if failed:
                raise _failure(failed[0], processes, folder)
            num_printed = _report(folder / "progress.txt", num_printed, tells)
            time.sleep(0.05)
    finally:
        for each in processes:
            if each.poll() is None:
                each.kill()
            each.wait()
    _report(folder / "progress.txt", num_printed, tells)
    failed = [rank for rank, each in enumerate(processes) if each.returncode]
    if failed:
        raise _failure(failed[0], processes, folder)


def _report(progress: Path, num_printed: int, tells: TextIO | None) -> int:
    """Print complete lines after the first ``num_printed`` characters and return the new number of printed
    characters."""
    if tells is None or not progress.exists():
        return num_printed
    text = progress.read_text()
    end = text.rfind("\n") + 1
    if end > num_printed:
        print(text[num_printed:end], end="", file=tells, flush=True)
    return max(end, num_printed)


def _failure(rank: int, processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> RoomierError:
    lines = (folder / f"rank{rank}.txt").read_text().splitlines()
    problem = "\n".join([f"ended with code {processes[rank].returncode}; its last lines:", *lines[-20:], ""])
    action = "Code -9 usually means that memory ran out. In this case, choose a smaller model or fewer ranks"
    return RoomierError("bench", f"rank {rank}", problem, action)
