"""Checksums of the pages of a scratch file.

[Note: page sums]
A scratch file is on a disk that other programs use, and its content replaces memory. If a byte changes, training would
therefore continue with wrong numbers. The checksum of a page of 4096 bytes is the sum of its 64-bit words, folded to 32
bits. A random change remains undetected with a probability of about 2**-32. The sum is computed on each chunk of a
transfer, while the chunk is in the cache of the processor. There, numpy adds 25 GB/s, but on the same machine, zlib's
CRC-32 processes only 2 GB/s, which is slower than many disks.

The checksums use 4 bytes of host memory for each page (1 MiB for 1 GiB). Code can write to a record through a mapping
of the file. If the modification time of the file shows such a write, the checksums of all mapped records are dropped.
They exist again after the next write, which is in the next step unless the weights are frozen.
"""

from __future__ import annotations

import errno
import threading

import numpy as np
from numpy.typing import NDArray

from roomier.techniques.tiers.buffers import ALIGNMENT_BYTES

_UNKNOWN = 0


class ChangedError(OSError):
    """Error for bytes that changed after they were written."""


class PageSums:
    """Checksums of the pages that were written. See [Note: page sums]. Positions and sizes are multiples of a page."""

    def __init__(self) -> None:
        self._sums: NDArray[np.uint32] = np.zeros(0, np.uint32)
        self._lock = threading.Lock()  # one thread can extend the array while other threads write to it

    def grow(self, num_bytes: int) -> None:
        """Extend the checksums to a file of ``num_bytes``."""
        with self._lock:
            added = num_bytes // ALIGNMENT_BYTES - len(self._sums)
            self._sums = np.concatenate([self._sums, np.full(added, _UNKNOWN, np.uint32)])

    def store(self, position: int, content: NDArray[np.uint8]) -> None:
        """Store the checksums of ``content``, which is written at ``position``."""
        first, sums = position // ALIGNMENT_BYTES, _sums_of(content)
        with self._lock:
            self._sums[first : first + len(sums)] = sums

    def check(self, position: int, content: NDArray[np.uint8]) -> None:
        """Compare ``content``, which was read at ``position``, with the stored checksums.

        Raises:
            ChangedError: the content of a page differs.
        """
        first, sums = position // ALIGNMENT_BYTES, _sums_of(content)
        stored = self._sums[first : first + len(sums)]
        changed = np.flatnonzero((stored != sums) & (stored != _UNKNOWN))
        if len(changed):
            where = (first + int(changed[0])) * ALIGNMENT_BYTES
            raise ChangedError(errno.EIO, f"the bytes from position {where} changed after they were written")

    def drop(self, position: int, num_bytes: int) -> None:
        """Drop the checksums of ``num_bytes`` at ``position``."""
        first = position // ALIGNMENT_BYTES
        self._sums[first : first + num_bytes // ALIGNMENT_BYTES] = _UNKNOWN


def _sums_of(content: NDArray[np.uint8]) -> NDArray[np.uint32]:
    pages = content.view(np.uint64).reshape(-1, ALIGNMENT_BYTES // 8)
    sums: NDArray[np.uint64] = np.add.reduce(pages, axis=1)
    folded: NDArray[np.uint32] = (sums ^ (sums >> np.uint64(32))).astype(np.uint32)
    folded[folded == _UNKNOWN] = 1
    return folded
