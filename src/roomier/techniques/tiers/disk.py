"""Tier on disk: records in a file, and a ring of buffers in host memory.

[Note: ring of buffers]
Each buffer has one of four states:

- free.
- coming: its read is queued, running or complete, and the caller has not taken the record.
- held by the caller.
- leaving: its write is queued or running.

Free buffers are filled with the expected records, in the expected order. A record that the caller holds is not read,
because the caller can still write to it. If the caller takes an unexpected record while no buffer is free or leaving,
it receives the buffer of the last expected record, which is read again later.

If large records share one buffer, this buffer is also used for smaller records while no large record requires it. At
any time, at most one large record is in a buffer.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from roomier.core.errors import TierError
from roomier.core.units import format_bytes
from roomier.techniques.tiers.buffers import buffer_sizes, discard_content, padded, record_memory
from roomier.techniques.tiers.scratch import FileTransfer, Scratch

Wait = Callable[[], object]


@dataclass(eq=False)
class _RingBuffer:
    """One buffer of the ring.

    Attributes:
        memory: memory of the buffer.
        record: record of the buffer, while the buffer is coming or held.
        buffer: part of the memory that the caller holds; None if the buffer is not held.
        read: job of the last read into the buffer.
        read_bytes: number of bytes that are read from the start of the record.
        wait: function that returns when the earlier content of the buffer is no longer needed.
    """

    memory: Tensor
    record: int = -1
    buffer: Tensor | None = None
    read: FileTransfer | None = None
    read_bytes: int = 0
    wait: Wait | None = None


class DiskTier:
    """Records in a file. See [Note: ring of buffers].

    Args:
        scratch: file that stores the records.
        sizes: size of each record in bytes.
        num_buffers: number of buffers.
        pinned: True to pin the buffers, for copies to and from an accelerator.
        num_ahead: maximum number of expected records that are in buffers before they are taken; by default
            ``num_buffers``. A smaller number leaves buffers free for :meth:`blank`. With 0, :meth:`expect` returns the
            memory of free buffers to the operating system, because no record is read ahead into them.
        shares_large: True to use one buffer for all large records; see
            :func:`roomier.techniques.tiers.buffers.buffer_sizes`. If True, the caller must hold at most one large
            record at a time. If False, each buffer has the size of the largest record.
        closes_scratch: True to close ``scratch`` in :meth:`close`, because no other tier uses it.

    Records are numbered from 0. All methods must be called by a single thread.

    Attributes:
        num_buffers: number of buffers that can be in use at the same time. The caller can hold at most this number of
            buffers.
        uses_threads: whether other threads read and write the buffers.
        host_bytes: number of bytes of host memory that the tier allocated.
        disk_bytes: size of the records on disk, in bytes.
        bytes_read, bytes_written: number of bytes that were read from and written to the disk, including padding.

    Raises:
        TierError: the disk is full, or the buffers do not fit into the host memory.
    """

    uses_threads = True

    def __init__(
        self,
        scratch: Scratch,
        sizes: Sequence[int],
        num_buffers: int,
        pinned: bool,
        num_ahead: int | None = None,
        *,
        shares_large: bool = False,
        closes_scratch: bool = False,
    ) -> None:
        assert num_buffers > 0
        self._closes_scratch = closes_scratch
        self.num_buffers = num_buffers
        self._num_ahead = num_buffers if num_ahead is None else num_ahead
        self._scratch, self._sizes = scratch, list(sizes)
        starts = [0, *accumulate(padded(size) for size in sizes)]
        self.disk_bytes = starts[-1]
        start = scratch.reserve(self.disk_bytes)
        self._positions = [start + each for each in starts[:-1]]
        equal = [max(map(padded, sizes), default=0)] * num_buffers
        try:
            memory, self.host_bytes = record_memory(buffer_sizes(sizes, num_buffers) if shares_large else equal, pinned)
        except (MemoryError, OSError) as error:
            problem = f"buffers of {format_bytes(equal[0])} do not fit into the host memory"
            raise TierError("offload.buffers", num_buffers, problem, "Use fewer buffers, such as 3") from error
        self.bytes_read = self.bytes_written = 0
        self._slots = [_RingBuffer(each) for each in memory]
        self._free = list(self._slots)
        # Records whose reads have not started, each with the number of bytes to read.
        self._expected: deque[tuple[int, int]] = deque()
        self._coming: dict[int, _RingBuffer] = {}  # Slots by record, in the order in which the records are expected.
        self._held: dict[int, _RingBuffer] = {}  # Slots by the id of the buffer that the caller holds.
        self._writes: dict[int, FileTransfer] = {}  # The last incomplete write of each record.
        self._mapping: tuple[Tensor, mmap.mmap] | None = (
            None  # one mapping of all records, because each mapping uses a file descriptor
        )
        self._shown: set[int] = set()  # records that code may have written through the mapping
        self._unused_read: FileTransfer | None = None  # a read that was running when its result was no longer needed
        self._claims: list[int] = []  # sizes of the buffers for which calls wait
        self._is_open = True

    def expect(self, records: Sequence[int], num_bytes: Sequence[int] | None = None) -> None:
        """Start reading ``records``, in this order, as buffers become free. A later call replaces ``records``.

        If the write of a record is not complete, the record is read after its write. If the caller holds the buffer of
        a record, the record is read after the caller returns the buffer. If a record appears several times, the record
        is read again after each :meth:`take`.

        Args:
            records: numbers of the records.
            num_bytes: number of bytes to read from the start of each record; by default the full records.
        """
        self._begin()
        sizes = [self._sizes[record] for record in records] if num_bytes is None else num_bytes
        with self._scratch.transfers.changed:
            before, self._coming = self._coming, {}
            self._expected.clear()
            unused: list[_RingBuffer] = []
            for record, size in zip(records, sizes, strict=True):
                slot = before.pop(record, None)
                if slot is None or self._cancel(slot):
                    self._expected.append((record, padded(size)))
                    unused += [] if slot is None else [slot]
                else:
                    self._coming[record] = slot
            for slot in (*unused, *before.values()):
                self._discard(slot)
            self._fill()
            if self._num_ahead == 0:
                for slot in self._free:
                    if slot.wait is None:
                        discard_content(slot.memory)

    def is_ready(self, record: int) -> bool:
        """Return whether :meth:`take` would return without waiting."""
        with self._scratch.transfers.changed:
            slot = self._coming.get(record)
            return slot is not None and (slot.read is None or slot.read.is_done)

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
        self._begin()
        size = padded(self._sizes[record] if num_bytes is None else num_bytes)
        with self._scratch.transfers.changed:
            slot = self._coming.get(record)
            if slot is None:
                expected = next((each for each in self._expected if each[0] == record), None)
                if expected is not None:
                    self._expected.remove(expected)
                slot = self._coming[record] = self._claim(record)
                self._read(slot, record, 0, size, first=True)
            elif self._cancel(slot):
                self._read(slot, record, 0, max(size, slot.read_bytes), first=True)
            self._wait_for(slot)
            if slot.read_bytes < size:
                self._read(slot, record, slot.read_bytes, size, first=True)
                self._wait_for(slot)
            del self._coming[record]
            return self._hold(slot, record)

    def blank(self, record: int) -> Tensor:
        """Return a buffer for ``record`` with undefined content. This method waits until a buffer is free."""
        self._begin()
        with self._scratch.transfers.changed:
            slot = self._claim(record)
            wait, slot.wait = slot.wait, None
            buffer = self._hold(slot, record)
        if wait is not None:
            wait()
        return buffer

    def switch(self, buffer: Tensor, record: int) -> Tensor:
        """Return the buffer in which to write ``record``, in exchange for ``buffer``, which is no longer needed.

        The record of ``buffer`` must have the same size as ``record``.

        For a tier on disk, the result is ``buffer`` itself with its content. For a tier in host memory, the result is
        the memory of ``record`` with its earlier content.
        """
        with self._scratch.transfers.changed:
            slot = self._held.pop(id(buffer))
            assert self._sizes[slot.record] == self._sizes[record], "the records have different sizes"
            changed = self._hold(slot, record)
            self._fill()  # the earlier record is no longer held and can be read
            return changed

    def put(self, record: int, buffer: Tensor, wait: Wait | None = None) -> None:
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
        self._begin()
        with self._scratch.transfers.changed:
            slot = self._held.pop(id(buffer))
            assert slot.record == record, "the buffer was not returned for this record"
            slot.buffer = None

            def then() -> None:
                if self._writes.get(record) is job:
                    del self._writes[record]
                self.bytes_written += len(job.buffer)
                self._release(slot)

            data = slot.memory[: padded(self._sizes[record])]
            # A read of the same bytes at the same time would return a mixture, which has no valid checksum.
            job = FileTransfer(data, self._positions[record], wait=wait, after=self._unused_read, then=then)
            self._writes[record] = job
            self._scratch.transfers.write(job)
            self._fill()  # the record is no longer held and can be read

    def drop(self, buffer: Tensor, wait: Wait | None = None) -> None:
        """Take ``buffer`` back without writing its content. For the arguments, see :meth:`put`."""
        self._begin()
        with self._scratch.transfers.changed:
            slot = self._held.pop(id(buffer))
            slot.buffer, slot.wait = None, wait
            self._release(slot)

    def settle(self) -> None:
        """Wait until all writes are complete, and clear the list of expected records.

        Raises:
            TierError: a write failed.
        """
        self.expect([])
        unused = self._unused_read
        self._scratch.wait_for(lambda: not self._writes and (unused is None or unused.is_done))

    def mapped(self, record: int) -> Tensor:
        """Return the content of ``record`` as a tensor (uint8, on the host) that shares the memory of the record.

        Writes to the tensor change the record. Call :meth:`settle` first. The tensor is valid until the next call
        to another method of the tier. The content is not copied to host memory, so checkpoints can read and write
        records of any size.
        """
        if self._sizes[record] == 0:
            return torch.empty(0, dtype=torch.uint8)
        if self._mapping is None:
            self._mapping = self._scratch.mapped(self._positions[0], self.disk_bytes)
            self._scratch.watch()
        first = self._positions[record] - self._positions[0]
        self._shown.add(record)
        return self._mapping[0][first : first + self._sizes[record]]

    def close(self) -> None:
        """Free the buffers without waiting for writes. :meth:`Scratch.close` removes the records.

        Mapped records remain valid, because the mapping keeps the content of a removed file.
        """
        self._unmap()
        with self._scratch.transfers.changed:
            self._is_open = False
            for job in (*(slot.read for slot in self._coming.values()), *self._writes.values()):
                if job is not None:
                    self._scratch.transfers.cancel(job)
            self._expected.clear()
            self._free, self._coming, self._held, self._writes = [], {}, {}, {}
        if self._closes_scratch:
            self._scratch.close()

    def _begin(self) -> None:
        """Prepare a method call: unmap the mapped records and, if an earlier transfer has failed, raise its error."""
        assert self._is_open, "the tier is closed"
        self._unmap()
        self._scratch.check()

    def _unmap(self) -> None:
        if self._mapping is not None:
            if self._scratch.flush(self._mapping[1]):
                for record in self._shown:
                    self._scratch.sums.drop(self._positions[record], padded(self._sizes[record]))
            self._shown.clear()
            self._mapping = None

    def _claim(self, record: int) -> _RingBuffer:
        """Return a free buffer for ``record``. This method waits until a buffer is free."""
        size = padded(self._sizes[record])
        large_enough = [slot for slot in self._slots if len(slot.memory) >= size]
        assert any(slot not in self._held.values() for slot in large_enough), "all buffers are in use"
        self._claims.append(size)
        try:
            while (found := _smallest(self._free, size)) is None:
                in_use = [*self._held.values(), *self._coming.values()]
                if all(slot in in_use for slot in large_enough):
                    last = [each for each, slot in self._coming.items() if slot in large_enough][-1]
                    slot = self._coming.pop(last)
                    self._expected.appendleft((last, slot.read_bytes))
                    self._discard(slot)
                else:
                    self._scratch.wait_for(lambda: _smallest(self._free, size) is not None)
        finally:
            self._claims.remove(size)
        self._free.remove(found)
        return found

    def _hold(self, slot: _RingBuffer, record: int) -> Tensor:
        """Give the buffer of ``slot`` to the caller."""
        slot.record, slot.read = record, None
        slot.buffer = buffer = slot.memory[: self._sizes[record]]
        self._held[id(buffer)] = slot
        coming = self._coming.pop(record, None)
        if coming is not None:  # the caller will replace the content that was read
            self._expected.appendleft((record, coming.read_bytes))
            self._discard(coming)
        return buffer

    def _fill(self) -> None:
        """Start reads of expected records into free buffers."""
        while len(self._free) > len(self._claims) and len(self._coming) < self._num_ahead:
            blocked = {slot.record for slot in self._held.values()} | self._coming.keys()
            left = list(self._free)
            for size in self._claims:
                claimed = _smallest(left, size)
                if claimed is not None:
                    left.remove(claimed)
            fitting = (
                (each, slot)
                for each in self._expected
                if each[0] not in blocked and (slot := _smallest(left, padded(self._sizes[each[0]]))) is not None
            )
            following, slot = next(fitting, (None, None))
            if following is None or slot is None:
                return
            self._expected.remove(following)
            self._free.remove(slot)
            record, num_bytes = following
            self._coming[record] = slot
            self._read(slot, record, 0, num_bytes)

    def _read(self, slot: _RingBuffer, record: int, start: int, end: int, first: bool = False) -> None:
        """Read the bytes from ``start`` to ``end`` of ``record`` into the buffer of ``slot``."""
        slot.record, slot.read_bytes, slot.read = record, end, None
        if start == end:
            return

        def then() -> None:
            self.bytes_read += end - start
            if slot.read is not job:
                self._release(slot)

        data = slot.memory[start:end]
        after = self._writes.get(record)
        job = FileTransfer(data, self._positions[record] + start, wait=slot.wait, after=after, then=then)
        slot.read, slot.wait = job, None
        self._scratch.transfers.read(job, first)

    def _wait_for(self, slot: _RingBuffer) -> None:
        job = slot.read
        if job is not None:
            self._scratch.wait_for(lambda: job.is_done)

    def _cancel(self, slot: _RingBuffer) -> bool:
        """Remove the read of ``slot`` if it has not started, and return whether it was removed."""
        job = slot.read
        if job is None or not self._scratch.transfers.cancel(job):
            return False
        slot.wait, slot.read = job.wait, None
        return True

    def _discard(self, slot: _RingBuffer) -> None:
        """Free the buffer of ``slot``, immediately or after its current read."""
        job, slot.read = slot.read, None
        if job is None or job.is_done:
            self._release(slot)
        elif self._scratch.transfers.cancel(job):
            slot.wait = job.wait
            self._release(slot)
        else:  # only one read runs at a time
            self._unused_read = job

    def _release(self, slot: _RingBuffer) -> None:
        if self._is_open:
            self._free.append(slot)
            self._fill()


def _smallest(slots: Sequence[_RingBuffer], num_bytes: int) -> _RingBuffer | None:
    """Return the slot with the smallest buffer that has room for ``num_bytes``; None if no buffer has room. Among equal
    buffers, the first slot is returned."""
    return min(
        (each for each in slots if len(each.memory) >= num_bytes), key=lambda each: len(each.memory), default=None
    )
