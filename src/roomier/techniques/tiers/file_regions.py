"""Regions of a scratch file for data whose sizes are known only during the run, such as activations."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass

from roomier.techniques.tiers.buffers import padded
from roomier.techniques.tiers.scratch import Scratch

GROWTH_BYTES = 2**26  # Minimum number of bytes by which the file grows.


@dataclass(frozen=True, eq=False)
class FileRegion:
    """Part of a scratch file. The part is free again after the last reference to the region is removed.

    Attributes:
        position: position of the first byte in the file.
        num_bytes: size, padded to the alignment.
    """

    position: int
    num_bytes: int
    _released: deque[tuple[int, int]]

    def __del__(self) -> None:
        # no lock: the garbage collector can call this in any thread
        self._released.append((self.position, self.num_bytes))


class Regions:
    """Allocator of regions. Each region is the first free part of the file that is large enough. If no part is large
    enough, the file grows.

    Args:
        scratch: file that contains the regions.

    Attributes:
        reserved_bytes: number of bytes of the file that the allocator uses.
    """

    def __init__(self, scratch: Scratch) -> None:
        self.reserved_bytes = 0
        self._scratch = scratch
        self._free: list[tuple[int, int]] = []  # start and end of each free part, in ascending order
        self._released: deque[tuple[int, int]] = deque()

    def allocate(self, num_bytes: int) -> FileRegion:
        """Return a region of at least ``num_bytes``. Only one thread may call this method.

        Raises:
            TierError: the disk is full.
        """
        num_bytes = padded(num_bytes)
        while self._released:
            position, size = self._released.popleft()
            self._add(position, position + size)
        index = self._find(num_bytes)
        if index is None:
            self._grow(num_bytes)
            index = self._find(num_bytes)
            assert index is not None
        start, end = self._free[index]
        if start + num_bytes == end:
            del self._free[index]
        else:
            self._free[index] = (start + num_bytes, end)
        return FileRegion(start, num_bytes, self._released)

    def _find(self, num_bytes: int) -> int | None:
        fitting = (index for index, (start, end) in enumerate(self._free) if end - start >= num_bytes)
        return next(fitting, None)

    def _grow(self, num_bytes: int) -> None:
        end = self._scratch.reserved_bytes
        if self._free and self._free[-1][1] == end:
            num_bytes -= end - self._free[-1][0]
        num_bytes = max(num_bytes, GROWTH_BYTES)
        start = self._scratch.reserve(num_bytes)
        self.reserved_bytes += num_bytes
        self._add(start, start + num_bytes)

    def _add(self, start: int, end: int) -> None:
        """Add a free part, and merge it with adjacent free parts."""
        index = bisect_left(self._free, (start, end))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index > 0 and self._free[index - 1][1] == start:
            start = self._free.pop(index - 1)[0]
            index -= 1
        self._free.insert(index, (start, end))
