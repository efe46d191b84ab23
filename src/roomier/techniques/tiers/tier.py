"""Tiers, which store records of bytes outside the device.

[Note: records and buffers]
A tier stores records, whose sizes are fixed when the tier is created. Code never accesses a record directly: the tier
reads a record into a *buffer* in host memory and writes a buffer to a record. Reads and writes run in the background. A
tier in host memory needs no separate buffers, because the buffer of a record is the record itself. A tier on disk has a
fixed number of buffers (its ring), so its host memory is known before the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch import Tensor

from roomier.techniques.tiers.buffers import record_memory
from roomier.techniques.tiers.disk import DiskTier


class HostTier:
    """Records in host memory. The buffer of a record is the record itself, so no data is copied.

    Args:
        sizes: size of each record in bytes.
        pinned: True to pin the memory, for copies to and from an accelerator.

    The attributes and methods are described in :class:`roomier.techniques.tiers.disk.DiskTier`.
    """

    uses_threads = False

    def __init__(self, sizes: Sequence[int], pinned: bool) -> None:
        self._records, self.host_bytes = record_memory(sizes, pinned)
        self._owner = {id(memory): record for record, memory in enumerate(self._records)}
        self._waits: dict[int, Callable[[], object]] = {}
        self.num_buffers = len(sizes)
        self.disk_bytes = self.bytes_read = self.bytes_written = 0

    def expect(self, records: Sequence[int], num_bytes: Sequence[int] | None = None) -> None:
        """This method is a no-op, because all records are in memory."""

    def is_ready(self, record: int) -> bool:
        """Return True if all copies to the record are complete."""
        return record not in self._waits

    def take(self, record: int, num_bytes: int | None = None) -> Tensor:
        """Return the memory of ``record``."""
        self._finish(record)
        return self._records[record]

    def blank(self, record: int) -> Tensor:
        """Return the memory of ``record``."""
        return self.take(record)

    def switch(self, buffer: Tensor, record: int) -> Tensor:
        """Return the memory of ``record`` with its earlier content."""
        assert id(buffer) in self._owner
        return self.take(record)

    def put(self, record: int, buffer: Tensor, wait: Callable[[], object] | None = None) -> None:
        """Take ``buffer`` back. The next access to the record calls ``wait``."""
        assert self._owner[id(buffer)] == record, "the buffer was not returned for this record"
        self.drop(buffer, wait)

    def drop(self, buffer: Tensor, wait: Callable[[], object] | None = None) -> None:
        """Take ``buffer`` back. The next access to the record calls ``wait``."""
        if wait is not None:
            self._waits[self._owner[id(buffer)]] = wait

    def settle(self) -> None:
        """Wait until the content of all records is complete."""
        for record in list(self._waits):
            self._finish(record)

    def mapped(self, record: int) -> Tensor:
        """Return the memory of ``record``."""
        return self._records[record]

    def close(self) -> None:
        """Wait for all copies to and from the records, and free the memory."""
        self.settle()
        self._records, self._owner = [], {}

    def _finish(self, record: int) -> None:
        wait = self._waits.pop(record, None)
        if wait is not None:
            wait()


Tier: TypeAlias = HostTier | DiskTier
"""Storage of records; see [Note: records and buffers]. :class:`roomier.techniques.tiers.disk.DiskTier` describes the
attributes and methods."""
