"""Protocol of a tier: memory below the device that stores records of bytes.

[Note: records and buffers]
A tier stores records, whose sizes are fixed when the tier is created. Code never accesses a record directly: the tier
reads a record into a *buffer* in host memory, and writes a buffer to a record. Reads and writes run while the caller
continues. A tier in host memory needs no separate buffers, because the buffer of a record is the record itself. A tier
on disk has a fixed number of buffers (its ring), so the host memory that it uses is known before the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor


class Tier(Protocol):
    """Storage of records. Records are numbered from 0. All methods are called by one thread.

    Attributes:
        num_buffers: number of buffers that can be in use at the same time. The caller holds at most this number.
        uses_threads: whether other threads read and write the buffers.
        host_bytes: host memory that the tier allocated, in bytes.
        disk_bytes: size of the records on disk, in bytes.
        bytes_read, bytes_written: bytes that were transferred from and to the disk, including padding.
    """

    num_buffers: int
    uses_threads: bool
    host_bytes: int
    disk_bytes: int
    bytes_read: int
    bytes_written: int

    def expect(self, records: Sequence[int], num_bytes: Sequence[int] | None = None) -> None:
        """Start to read ``records``, in this order, as buffers become free. This call replaces earlier expectations.

        A record whose write has not completed is read after its write. A record whose buffer the caller holds is read
        after the buffer was returned. If a record appears several times, it is read again after each :meth:`take`.

        Args:
            records: numbers of the records.
            num_bytes: number of bytes to read from the start of each record; by default the full records.
        """
        ...

    def is_ready(self, record: int) -> bool:
        """Return whether :meth:`take` returns without waiting."""
        ...

    def take(self, record: int, num_bytes: int | None = None) -> Tensor:
        """Return a buffer (uint8, on the host) with the content of ``record``. This method waits for the read.

        The buffer belongs to the caller until it is passed to :meth:`put` or :meth:`drop`.

        Args:
            record: number of the record.
            num_bytes: number of bytes to read from the start of the record. None reads the full record. The bytes
                that are not read are undefined. The buffer always has the size of the record.

        Raises:
            TierError: the record cannot be read.
        """
        ...

    def blank(self, record: int) -> Tensor:
        """Return a buffer for ``record`` with undefined content. This method waits until a buffer is free."""
        ...

    def switch(self, buffer: Tensor, record: int) -> Tensor:
        """Return the buffer in which to write ``record``, in exchange for ``buffer``, which is no longer needed.

        Both records have the same size.

        On disk, the result is ``buffer`` itself with its content. In host memory, the result is the memory of
        ``record`` with its earlier content.
        """
        ...

    def put(self, record: int, buffer: Tensor, wait: Callable[[], object] | None = None) -> None:
        """Write ``buffer`` to ``record`` and take the buffer back. This method does not wait.

        Args:
            record: number of the record.
            buffer: the tensor that :meth:`take`, :meth:`blank` or :meth:`switch` returned for ``record``. Views of
                the tensor are rejected.
            wait: function that returns when the content of the buffer is complete, such as ``synchronize`` of an event
                that follows a copy from the device. It can be called by a different thread, at most once.

        Raises:
            TierError: an earlier write failed.
        """
        ...

    def drop(self, buffer: Tensor, wait: Callable[[], object] | None = None) -> None:
        """Take ``buffer`` back without writing it. Arguments as in :meth:`put`."""
        ...

    def settle(self) -> None:
        """Wait until all writes are complete, and forget expectations.

        Raises:
            TierError: a write failed.
        """
        ...

    def mapped(self, record: int) -> Tensor:
        """Return the content of ``record`` as a tensor (uint8, on the host) that shares the memory of the record.

        Writes to the tensor change the record. Call :meth:`settle` first. The tensor is valid until the next call of a
        different method. The result is not a copy in host memory, so that checkpoints can read and write records of any
        size.
        """
        ...

    def close(self) -> None:
        """Free the memory, and remove the files of the tier."""
        ...
