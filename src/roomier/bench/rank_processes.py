"""Ranks of a measurement: one process for each, of one thread, on this machine."""

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
    """``python -m worker FOLDER SETTINGS`` for each rank, which ``RANK`` tells it.

    Args:
        worker: a module. Its rank 0 writes ``result.json`` into the folder.
        environment: what its processes have beside that of this one.
        tells: gets the lines that rank 0 puts into ``progress.txt`` in the folder, as they come.

    Returns:
        What rank 0 wrote, when all are done.

    Raises:
        RoomierError: a rank ended before; with its last lines.
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
    num_told = 0
    try:
        while any(each.poll() is None for each in processes):
            failed = [rank for rank, each in enumerate(processes) if each.poll()]
            if failed:
                raise _failure(failed[0], processes, folder)
            num_told = _tell(folder / "progress.txt", num_told, tells)
            time.sleep(0.05)
    finally:
        for each in processes:
            if each.poll() is None:
                each.kill()
            each.wait()
    _tell(folder / "progress.txt", num_told, tells)
    failed = [rank for rank, each in enumerate(processes) if each.returncode]
    if failed:
        raise _failure(failed[0], processes, folder)


def _tell(progress: Path, num_told: int, tells: TextIO | None) -> int:
    """Pass on what follows the first ``num_told`` characters, in whole lines; returns how many that makes."""
    if tells is None or not progress.exists():
        return num_told
    text = progress.read_text()
    end = text.rfind("\n") + 1
    if end > num_told:
        print(text[num_told:end], end="", file=tells, flush=True)
    return max(end, num_told)


def _failure(rank: int, processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> RoomierError:
    lines = (folder / f"rank{rank}.txt").read_text().splitlines()
    problem = "\n".join([f"ended with code {processes[rank].returncode}; its last lines:", *lines[-20:], ""])
    action = "Where the code is -9 memory ran out: choose a smaller model, or fewer ranks"
    return RoomierError("bench", f"rank {rank}", problem, action)
