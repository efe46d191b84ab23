"""Ranks of a benchmark on this machine, each as one process with one thread."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TextIO

import torch
import torch.distributed as dist

from roomier.core.device.resolve import group_backend, num_devices, resolve_device
from roomier.core.errors import RoomierError
from roomier.core.loopback import keep_on_loopback
from roomier.core.ranks import Ranks
from roomier.core.world import World

_NUM_LAST_LINES = 15


def command_of(worker: str, *words: str) -> list[str]:
    """Return the command ``python -m worker *words``."""
    return [sys.executable, "-P", "-m", worker, *words]


def environment_of(**variables: str) -> dict[str, str]:
    """Return the environment of a worker: the variables of this process with ``variables``, and the root of this
    repository in the search path of Python."""
    folders = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders), **variables}


def run_worker(worker: str, settings: Mapping[str, Any], **variables: str) -> tuple[str, int, str]:
    """Run ``python -m worker SETTINGS``. The settings contain the path of a result file under the key ``result``.

    Args:
        worker: name of the module.
        settings: JSON data for the worker.
        variables: environment variables to add to the variables of this process.

    Returns:
        The content of the result file (empty if there is no file), the exit code, and the last lines that the worker
        printed.
    """
    with TemporaryDirectory() as folder:
        result = Path(folder) / "result"
        done = subprocess.run(
            command_of(worker, json.dumps({**settings, "result": str(result)})),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment_of(**variables),
        )
        last_lines = "\n".join(done.stdout.splitlines()[-_NUM_LAST_LINES:])
        return result.read_text() if result.exists() else "", done.returncode, last_lines


def run_on_ranks(
    worker: str,
    num_ranks: int,
    settings: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    tells: TextIO | None = None,
) -> dict[str, Any]:
    """Run ``python -m worker FOLDER SETTINGS NUM_RANKS`` for each rank, with the rank in ``RANK``.

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
        environ = environment_of(OMP_NUM_THREADS="1", **(environment or {}))
        keep_on_loopback(environ)
        files = [(path / f"rank{rank}.txt").open("w+") for rank in range(num_ranks)]
        try:
            processes = [
                subprocess.Popen(
                    command_of(worker, str(path), json.dumps(settings), str(num_ranks)),
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


def on_this_rank(run: Callable[[dict[str, Any], Ranks, Path], Any], *, always_group: bool = False) -> None:
    """Call ``run(settings, ranks, folder)`` in a process of :func:`run_on_ranks`. Rank 0 writes the returned JSON data.

    Args:
        run: function that measures.
        always_group: True to create a process group even if there is only one rank.
    """
    folder, settings, rank, size = Path(sys.argv[1]), json.loads(sys.argv[2]), int(os.environ["RANK"]), int(sys.argv[3])
    torch.set_num_threads(1)
    device = resolve_device(settings.get("accelerator", "cpu"))
    if num_devices(device) > 1:
        torch.accelerator.set_device_index(rank)
    has_group = size > 1 or always_group
    if has_group:
        rendezvous = f"file://{folder}/rendezvous"
        backend = group_backend(device.type) or "gloo"
        dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=size)
    result = run(settings, Ranks(World(rank, size, rank, 0, size)), folder)
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(result))
    if has_group:
        dist.destroy_process_group()


def _wait(processes: Sequence[subprocess.Popen[bytes]], folder: Path, tells: TextIO | None) -> None:
    num_printed = 0
    try:
        is_running = True
        while is_running:
            is_running = any(each.poll() is None for each in processes)
            for rank, each in enumerate(processes):
                if each.poll():
                    raise _failure(rank, processes, folder)
            num_printed = _report(folder / "progress.txt", num_printed, tells)
            time.sleep(0.05)
    finally:
        for each in processes:
            if each.poll() is None:
                each.kill()
            each.wait()


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
    code = processes[rank].returncode
    problem = "\n".join([f"ended with code {code}; its last lines:", *lines[-_NUM_LAST_LINES:], ""])
    action = "Code -9 usually means that memory ran out. In this case, choose a smaller model or fewer ranks"
    return RoomierError("bench", f"rank {rank}", problem, action)
