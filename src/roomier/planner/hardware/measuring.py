"""Measurements of this machine with concurrent processes: their rates, their collectives, and the disk."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from roomier.core.disk_space import free_bytes
from roomier.core.errors import RoomierError, TierError
from roomier.core.log import quiet
from roomier.core.loopback import keep_on_loopback
from roomier.planner.hardware.host import num_cores
from roomier.planner.hardware.measure import DTYPES, RATES, memory_rate, operation_seconds, product_rate, update_rate
from roomier.planner.hardware.measured import Measured, circumstances_of, now
from roomier.techniques.tiers.buffers import allocate
from roomier.techniques.tiers.scratch import FileTransfer, Scratch

_PATIENCE_S = 120.0  # time limit for the ranks in seconds, 20 times the duration on an idle machine


def measure_ranks(device: torch.device, num_ranks: int, seconds: float = 2.0, folder: Path | None = None) -> Measured:
    """Measure this machine with ``num_ranks`` concurrent processes, and measure its disk.

    Args:
        device: device of the ranks; each rank uses a different accelerator of this type.
        num_ranks: number of processes.
        seconds: time for the measurements without communication. Starting the processes and measuring the collectives
            take about 5 additional seconds.
        folder: folder for the measurement of the disk; None skips it.

    Raises:
        RoomierError: a rank failed, or the folder is not writable.
    """
    started = circumstances_of(device, num_ranks)
    with tempfile.TemporaryDirectory(prefix="roomier-hardware-") as scratch:
        ranks = _run_ranks(device.type, num_ranks, started.num_threads, seconds, Path(scratch))
    disk = {} if folder is None else disk_rates(folder, 2 * seconds)
    return Measured(
        circumstances=started,
        measured_at=now(),
        is_quick=False,
        flops_per_s={
            dtype: statistics.median(rank["flops_per_s"][dtype] for rank in ranks) for dtype in ranks[0]["flops_per_s"]
        },
        **{name: statistics.median(rank[name] for rank in ranks) for name in RATES if name in ranks[0]},
        gather=_link("gather", ranks),
        reduce=_link("reduce", ranks),
        **disk,
    )


def measure_quickly(device: torch.device, num_ranks: int) -> Measured:
    """Measure matrix products, memory, operations and updates in this process, in about a second.

    If several ranks share a CPU, the rates of one rank are estimated from the rates of this process: the ranks share
    the memory bandwidth and, if they have more threads than there are cores, also the cores.
    """
    circumstances = circumstances_of(device, num_ranks)
    num_threads = circumstances.num_threads if device.type == "cpu" else 1
    threads_before = torch.get_num_threads()
    try:
        # If other programs use some of the cores, several threads that wait for each other can be slower than one.
        rates = [_product_rates(device, count) for count in sorted({1, num_threads})]
        together = max(1, min(num_cores(), num_ranks * num_threads)) if device.type == "cpu" else 1
        memory = {count: _bytes_rates(device, count) for count in (1, together)}
        torch.set_num_threads(num_threads)
        operation_s = operation_seconds(device, 0.03)
    finally:
        torch.set_num_threads(threads_before)
    share = min(1.0, num_cores() / (num_ranks * num_threads)) if device.type == "cpu" else 1.0
    sharing = num_ranks if device.type == "cpu" else 1
    # The rate of a rank is estimated from its share of the rate with all threads and from the rate with one thread. The
    # higher estimate is used, because other programs slow down threads that wait for each other.
    alone, all_threads = memory[1], memory[together]
    copied, updated = (max(share * one, both / sharing) for one, both in zip(alone, all_threads, strict=True))
    return Measured(
        circumstances=circumstances,
        measured_at=now(),
        is_quick=True,
        flops_per_s={dtype: share * max(each[dtype] for each in rates) for dtype in rates[0]},
        memory_bytes_per_s=copied,
        operation_s=operation_s / share,
        update_bytes_per_s=updated,
    )


def _bytes_rates(device: torch.device, num_threads: int) -> tuple[float, float]:
    torch.set_num_threads(num_threads)
    return memory_rate(device, 0.06), update_rate(device, 0.06, 2**22)


def _product_rates(device: torch.device, num_threads: int) -> dict[str, float]:
    torch.set_num_threads(num_threads)
    rates = {dtype: product_rate(dtype, device, 0.06) for dtype in DTYPES}
    return {dtype: rate for dtype, rate in rates.items() if rate is not None}


def _link(name: str, ranks: Sequence[dict[str, Any]]) -> tuple[float, float] | None:
    """Return the bandwidth of a collective (bytes that a rank sends per second) and the duration of a small collective
    in seconds; None for one rank.

    The duration of a repetition is the time of its slowest rank, and the fastest repetition is used.
    """
    if len(ranks) == 1:
        return None
    slowest = {
        size: min(max(seconds) for seconds in zip(*(rank[f"{name}_{size}_s"] for rank in ranks), strict=True))
        for size in ("large", "small")
    }
    moved_s = max(slowest["large"] - slowest["small"], slowest["large"] / 10)
    return ranks[0]["large_bytes"] / moved_s, slowest["small"]


def _run_ranks(kind: str, num_ranks: int, num_threads: int, seconds: float, scratch: Path) -> list[dict[str, Any]]:
    environ = {**os.environ, "OMP_NUM_THREADS": str(num_threads)}
    keep_on_loopback(environ)
    # If other programs run at the same time, threads that spin while they wait occupy cores that other threads need. In
    # a test, a matrix product took a hundred times as long.
    environ.setdefault("OMP_WAIT_POLICY", "passive")
    common = {"kind": kind, "num_ranks": num_ranks, "seconds": seconds, "store": str(scratch / "store")}
    results = [scratch / f"rank-{rank}.json" for rank in range(num_ranks)]
    processes = []
    try:
        for rank, result in enumerate(results):
            settings = json.dumps({**common, "rank": rank, "result": str(result)})
            with (scratch / f"rank-{rank}.err").open("w") as errors:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "roomier.planner.hardware.rank_worker", settings],
                        env=environ,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=errors,
                    )
                )
        _wait(processes, scratch)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [json.loads(result.read_text()) for result in results]


def _wait(processes: Sequence[subprocess.Popen[bytes]], scratch: Path) -> None:
    """Wait until all processes have ended.

    Raises:
        RoomierError: a process failed, or did not finish in time.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes) or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    for rank, process in enumerate(processes):
        code = process.poll()
        if code:
            output = (scratch / f"rank-{rank}.err").read_text().strip().splitlines()[-1:]
            problem = f"the process of rank {rank} ended with exit code {code}: {' '.join(output) or 'no message'}"
            raise RoomierError("devices", len(processes), problem, "Measure with fewer devices, or use --quick")
    if any(process.poll() is None for process in processes):
        problem = f"the measuring processes did not end within {_PATIENCE_S:.0f} s"
        raise RoomierError("devices", len(processes), problem, "Measure with fewer devices, or use --quick")


_CHUNK_BYTES = 2**24


def disk_rates(folder: Path, seconds: float, num_bytes: int = 2**28) -> dict[str, float]:
    """Measure reads and writes of a temporary file in ``folder``. Create the folder if it does not exist.

    The transfers are the same as for offloaded tensors: one reader thread, one writer thread, and direct I/O. If the
    file system does not support direct I/O, the time of a write includes flushing the data to the disk, and the data is
    removed from the page cache before it is read. If the folder is in memory (tmpfs), the rates of memory are measured,
    as in a run.

    Args:
        folder: folder for the temporary file.
        seconds: approximate duration of the measurement.
        num_bytes: maximum number of bytes per direction in each test.

    Returns:
        Rates in bytes per second: ``disk_read`` and ``disk_write`` of one direction alone, and ``disk_both``, the total
        rate of simultaneous reads and writes.

    Raises:
        RoomierError: the folder is not writable, or the disk is full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        most_bytes = min(num_bytes, free_bytes(folder) // 8) // _CHUNK_BYTES * _CHUNK_BYTES
        if most_bytes == 0:
            raise OSError("the disk is full")
        with quiet():
            scratch = Scratch(folder)
    except (OSError, TierError) as error:
        raise RoomierError("folder", str(folder), f"is not writable: {error}", "Choose a writable folder") from error
    try:
        return _Measurement(scratch, most_bytes).rates(seconds)
    finally:
        scratch.close()


class _Measurement:
    def __init__(self, scratch: Scratch, most_bytes: int) -> None:
        self._scratch, self._most_bytes = scratch, most_bytes
        # Offsets in the file at which the reads and the writes start.
        self._starts = [scratch.reserve(most_bytes) for _ in range(2)]
        # The buffers contain random bytes, because drives with compression would store zeros too fast.
        self._buffers = [allocate(_CHUNK_BYTES, pinned=False).random_(256) for _ in range(2)]

    def rates(self, seconds: float) -> dict[str, float]:
        chunk_s = self._seconds(0, _CHUNK_BYTES)
        num_bytes = int(seconds / 8 / chunk_s) * _CHUNK_BYTES
        num_bytes = max(_CHUNK_BYTES, min(num_bytes, self._most_bytes))
        for start in self._starts:  # the first write to a region also updates the file system
            self._seconds(0, num_bytes, start)
        return {
            "disk_read": num_bytes / self._seconds(num_bytes, 0),
            "disk_write": num_bytes / self._seconds(0, num_bytes),
            "disk_both": 2 * num_bytes / self._seconds(num_bytes, num_bytes),
        }

    def _seconds(self, read_bytes: int, written_bytes: int, written_start: int | None = None) -> float:
        """Return the time in seconds that concurrent reads and writes take."""
        if not self._scratch.is_direct:
            self._scratch.empty_cache()
        read_start, write_start = self._starts
        write_start = write_start if written_start is None else written_start
        start_s = time.perf_counter()
        jobs = []
        for offset in range(0, max(read_bytes, written_bytes), _CHUNK_BYTES):
            if offset < read_bytes:
                jobs.append(FileTransfer(self._buffers[0], read_start + offset))
                self._scratch.transfers.read(jobs[-1])
            if offset < written_bytes:
                jobs.append(FileTransfer(self._buffers[1], write_start + offset))
                self._scratch.transfers.write(jobs[-1])
        self._scratch.wait_for(lambda: all(job.is_done for job in jobs))
        if written_bytes and not self._scratch.is_direct:
            self._scratch.empty_cache()
        return time.perf_counter() - start_s
