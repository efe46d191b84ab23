"""Protocol of a tier, which stores records of bytes outside the device.

[Note: records and buffers]
A tier stores records, whose sizes are fixed when the tier is created. Code never accesses a record directly: the tier
reads a record into a *buffer* in host memory and writes a buffer to a record. Reads and writes run in the background. A
tier in host memory needs no separate buffers, because the buffer of a record is the record itself. A tier on disk has a
fixed number of buffers (its ring), so its host memory is known before the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor


class Tier(Protocol):
    """Storage of records. Records are numbered from 0. All methods must be called by a single thread.

    Attributes:
        num_buffers: number of buffers that can be in use at the same time. The caller can hold at most this number of
            buffers.
        uses_threads: whether other threads read and write the buffers.
        host_bytes: number of bytes of host memory that the tier allocated.
        disk_bytes: size of the records on disk, in bytes.
        bytes_read, bytes_written: number of bytes that were read from and written to the disk, including padding.
    """

    num_buffers: int
    uses_threads: bool
    host_bytes: int
    disk_bytes: int
    bytes_read: int
    bytes_written: int

    def expect(self, records: Sequence[int], num_bytes: Sequence[int] | None = None) -> None:
        """Start reading ``records``, in this order, as buffers become free. A later call replaces ``records``.

        If the write of a record is not complete, the record is read after its write. If the caller holds the buffer of
        a record, the record is read after the caller returns the buffer. If a record appears several times, the record
        is read again after each :meth:`take`.

        Args:
            records: numbers of the records.
            num_bytes: number of bytes to read from the start of each record; by default the full records.
        """
        ...

    def is_ready(self, record: int) -> bool:
        """Return whether :meth:`take` would return without waiting."""
        ...

    def take(self, record: int, num_bytes: int | None = None) -> Tensor:
        """Return a buffer (uint8, on the host) with the content of ``record``. This method waits until the read is
        complete.

        The buffer belongs to the caller until it is passed to :meth:`put` or :meth:`drop`.

        Args:
            record: number of the record.
            num_bytes: number of bytes to read from the start of the record. None reads the full record. The buffer
                always has the size of the record, and bytes that are not read are undefined.

        Raises:
            TierError: the record cannot be read.
        """
        ...

    def blank(self, record: int) -> Tensor:
        """Return a buffer for ``record`` with undefined content. This method waits until a buffer is free."""
        ...

    def switch(self, buffer: Tensor, record: int) -> Tensor:
        """Return the buffer in which to write ``record``, in exchange for ``buffer``, which is no longer needed.

        The record of ``buffer`` must have the same size as ``record``.

        For a tier on disk, the result is ``buffer`` itself with its content. For a tier in host memory, the result is
        the memory of ``record`` with its earlier content.
        """
        ...

    def put(self, record: int, buffer: Tensor, wait: Callable[[], object] | None = None) -> None:
        """Write ``buffer`` to ``record`` and take the buffer back. This method does not wait.

        Args:
            record: number of the record.
            buffer: the tensor that :meth:`take`, :meth:`blank` or :meth:`switch` returned for ``record``. Views of
                the tensor are rejected.
            wait: function that returns when the content of the buffer is complete, such as ``synchronize`` of an event
                that follows a copy from the device. The function can be called by a different thread, at most once.

        Raises:
            TierError: an earlier write failed.
        """
        ...

    def drop(self, buffer: Tensor, wait: Callable[[], object] | None = None) -> None:
        """Take ``buffer`` back without writing its content. For the arguments, see :meth:`put`."""
        ...

    def settle(self) -> None:
        """Wait until all writes are complete, and clear the list of expected records.

        Raises:
            TierError: a write failed.
        """
        ...

    def mapped(self, record: int) -> Tensor:
        """Return the content of ``record`` as a tensor (uint8, on the host) that shares the memory of the record.

        Writes to the tensor change the record. Call :meth:`settle` first. The tensor is valid until the next call
        to another method of the tier. The content is not copied to host memory, so checkpoints can read and write
        records of any size.
        """
        ...

    def close(self) -> None:
        """Free the memory, and remove the files of the tier."""
        ...
