"""Measurement of a disk with the transfers that offloading uses."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from roomier.core.disk_space import free_bytes
from roomier.core.errors import RoomierError, TierError
from roomier.core.log import quiet
from roomier.techniques.tiers.buffers import allocate
from roomier.techniques.tiers.scratch import FileTransfer, Scratch

_CHUNK_BYTES = 2**24


@dataclass(frozen=True)
class DiskRates:
    """Rates of a disk in bytes per second.

    Attributes:
        read, write: rate of reads without writes, and rate of writes without reads.
        both: total rate of simultaneous reads and writes.
    """

    read: float
    write: float
    both: float


def disk_rates(folder: Path, seconds: float, num_bytes: int = 2**28) -> DiskRates:
    """Measure reads and writes of a temporary file in ``folder``. Create the folder if it does not exist.

    The transfers are the same as for offloaded tensors: one reader thread, one writer thread, and direct I/O. If the
    file system does not support direct I/O, written data is flushed to the disk before the clock stops. The data is
    removed from the page cache before it is read. If the folder is in memory (tmpfs), the measured rates are the rates
    of memory, as in a run.

    Args:
        folder: folder for the temporary file.
        seconds: approximate duration of the measurement.
        num_bytes: maximum number of bytes per direction in each test.

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
        # Positions in the file where the reads and the writes start.
        self._starts = [scratch.reserve(most_bytes) for _ in range(2)]
        # The buffers contain random bytes, because drives that compress data would store zeros too fast.
        self._buffers = [allocate(_CHUNK_BYTES, pinned=False).copy_(_random_bytes()) for _ in range(2)]

    def rates(self, seconds: float) -> DiskRates:
        chunk_s = self._seconds(0, _CHUNK_BYTES)
        num_bytes = int(seconds / 8 / chunk_s) * _CHUNK_BYTES
        num_bytes = max(_CHUNK_BYTES, min(num_bytes, self._most_bytes))
        for start in self._starts:  # the first write to a part of the file also updates the file system
            self._seconds(0, num_bytes, start)
        return DiskRates(
            read=num_bytes / self._seconds(num_bytes, 0),
            write=num_bytes / self._seconds(0, num_bytes),
            both=2 * num_bytes / self._seconds(num_bytes, num_bytes),
        )

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


def _random_bytes() -> torch.Tensor:
    return torch.randint(256, (_CHUNK_BYTES,), dtype=torch.uint8)
