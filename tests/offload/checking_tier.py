"""Tier for tests, which overwrites buffers as soon as they are returned."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class CheckingTier:
    """Tier with a fixed number of buffers. The content of returned and blank buffers is invalid.

    Attributes:
        num_reads: number of records that were read.
        num_writes: number of records that were written.
        max_held: largest number of buffers that were in use at the same time.
    """

    def __init__(self, sizes: Sequence[int], num_buffers: int = 3) -> None:
        self.num_buffers = num_buffers
        self.host_bytes = self.disk_bytes = self.bytes_read = self.bytes_written = 0
        self.num_reads = self.num_writes = self.max_held = 0
        self._records = [torch.full((size,), 255, dtype=torch.uint8) for size in sizes]
        self._held: dict[int, tuple[int, Tensor]] = {}

    def expect(self, records: Sequence[int], num_bytes: Sequence[int] | None = None) -> None:
        assert len(set(records)) == len(records)

    def take(self, record: int, num_bytes: int | None = None) -> Tensor:
        self.num_reads += 1
        return self._hold(record, self._records[record].clone())

    def blank(self, record: int) -> Tensor:
        return self._hold(record, torch.full_like(self._records[record], 255))

    def _hold(self, record: int, buffer: Tensor) -> Tensor:
        assert all(record != other for other, _ in self._held.values()), "the record is already in use"
        self._held[id(buffer)] = (record, buffer)
        self.max_held = max(self.max_held, len(self._held))
        assert len(self._held) <= self.num_buffers, "more buffers are in use than the tier has"
        return buffer

    def switch(self, buffer: Tensor, record: int) -> Tensor:
        raise NotImplementedError

    def put(self, record: int, buffer: Tensor, wait: Callable[[], object] | None = None) -> None:
        if wait is not None:
            wait()
        self.num_writes += 1
        held, _ = self._held.pop(id(buffer))
        assert held == record
        self._records[record].copy_(buffer)
        buffer.fill_(255)

    def drop(self, buffer: Tensor, wait: Callable[[], object] | None = None) -> None:
        if wait is not None:
            wait()
        self._held.pop(id(buffer))
        buffer.fill_(255)

    def settle(self) -> None: ...

    def mapped(self, record: int) -> Tensor:
        assert not self._held, "a buffer is in use"
        return self._records[record]

    def close(self) -> None: ...
