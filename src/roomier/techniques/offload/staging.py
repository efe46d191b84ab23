"""Transfer (staging) of records between a tier and the device.

[Note: order of the copies]
On an accelerator, one stream copies records from the host, and another copies records to the host, so both directions
of the link are used at the same time. Device memory belongs to the compute stream. A copy to the device waits for the
kernels that used this memory before, and the compute stream waits for the copy before kernels read the memory. When a
record has arrived on the device, the copy of the next expected record begins and runs during the update of the first. A
copy to the host waits for the update. The device memory of the copied record is freed when the next copy to the host
begins, after the compute stream waits for the earlier copy. The host does not wait for copies. If the tier is a disk,
the threads of the tier wait for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from roomier.core.device.capability import capabilities_of
from roomier.core.device.streams import computing_stream
from roomier.techniques.tiers.tier import Tier


class Staging:
    """Transfers records between a tier and the device. Bytes on the device are tensors of dtype uint8. This base class
    is the staging on the CPU, where the tensors are the buffers of the tier.

    Args:
        tier: tier that stores the records.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier

    def expect(self, records: Sequence[int], num_bytes: Sequence[int]) -> None:
        """Prepare to bring the first ``num_bytes`` bytes of each of ``records`` to the device, in this order."""
        self._tier.expect(records, num_bytes)

    def bring(self, record: int, num_bytes: int | None = None) -> Tensor:
        """Return the content of ``record`` on the device. See :meth:`roomier.techniques.tiers.disk.DiskTier.take`."""
        return self._tier.take(record, num_bytes)

    def blank(self, record: int) -> Tensor:
        """Return memory for ``record`` on the device, with undefined content."""
        return self._tier.blank(record)

    def send(self, record: int, content: Tensor) -> None:
        """Write ``content`` to ``record``, which can differ from the record from which ``content`` was read."""
        buffer = self._tier.switch(content, record)
        if buffer is not content and buffer.data_ptr() != content.data_ptr():
            buffer.copy_(content)
        self._tier.put(record, buffer)

    def drop(self, content: Tensor) -> None:
        """Free ``content`` without writing it to a record."""
        self._tier.drop(content)

    def settle(self) -> None:
        """Wait until all records are written."""
        self._tier.settle()

    def mapped(self, record: int) -> Tensor:
        """Return the content of ``record`` on the host; see :meth:`roomier.techniques.tiers.disk.DiskTier.mapped`."""
        return self._tier.mapped(record)

    def close(self) -> None:
        """Free the memory of the tier."""
        self.settle()
        self._tier.close()


@dataclass
class _Present:
    """A record on the device.

    Attributes:
        content: content of the record on the device.
        buffer: buffer of the tier from which the record is copied; None for a new record.
        num_bytes: number of bytes that are copied.
        arrived: event after the copy; None if the copy has completed.
    """

    content: Tensor
    buffer: Tensor | None
    num_bytes: int = 0
    arrived: Any = None


class DeviceStaging(Staging):
    """Staging between a tier and an accelerator; see [Note: order of the copies].

    At most three records are on the device: the record that is updated, the next expected record, and a record that is
    copied to the host.

    Args:
        tier: tier that stores the records. Its buffers are pinned if the device copies asynchronously.
        sizes: size of each record in bytes.
        device: accelerator to which the records are copied.
    """

    def __init__(self, tier: Tier, sizes: Sequence[int], device: torch.device) -> None:
        super().__init__(tier)
        self._sizes, self._device = sizes, device
        overlaps = capabilities_of(device).copies_asynchronously
        self._inward = torch.Stream(device) if overlaps else None
        self._outward = torch.Stream(device) if overlaps else None
        self._expected: deque[tuple[int, int]] = deque()
        self._ahead: dict[int, _Present] = {}  # the next expected record, which is being copied
        self._present: dict[int, _Present] = {}  # key: id() of the content
        # the content that is being copied to the host, and the event after its copy
        self._leaving: tuple[Tensor, Any] | None = None
        self._written: dict[int, Any] = {}  # the event after the last copy to the buffer of a record

    def expect(self, records: Sequence[int], num_bytes: Sequence[int]) -> None:
        self._expected = deque(zip(records, num_bytes, strict=True))
        for record in [record for record in self._ahead if record not in records]:
            self._drop(self._ahead.pop(record))
        left = [each for each in self._expected if each[0] not in self._ahead]
        self._tier.expect([record for record, _ in left], [size for _, size in left])

    def bring(self, record: int, num_bytes: int | None = None) -> Tensor:
        size = self._sizes[record] if num_bytes is None else num_bytes
        found = self._ahead.pop(record, None)
        if found is None or found.num_bytes < size:
            if found is not None:
                self._drop(found)
            self._drop_ahead()
            found = self._started(record, size)
        if found.arrived is not None:
            computing_stream(self._device).wait_event(found.arrived)
        self._present[id(found.content)] = found
        self._start_next(record)
        return found.content

    def _start_next(self, record: int) -> None:
        """Start copying the record that is expected after ``record``."""
        if record in [each for each, _ in self._expected]:
            while self._expected.popleft()[0] != record:
                pass
        if self._expected and not self._ahead and self._tier.is_ready(self._expected[0][0]):
            following, size = self._expected[0]
            self._ahead[following] = self._started(following, size)

    def _started(self, record: int, num_bytes: int) -> _Present:
        buffer = self._tier.take(record, num_bytes)
        content = torch.empty(buffer.shape, dtype=torch.uint8, device=self._device)
        if self._inward is None:
            content[:num_bytes].copy_(buffer[:num_bytes])
            return _Present(content, buffer, num_bytes)
        self._inward.wait_stream(computing_stream(self._device))  # earlier kernels may still use the memory
        if record in self._written:
            self._inward.wait_event(self._written[record])
        with self._inward:
            content[:num_bytes].copy_(buffer[:num_bytes], non_blocking=True)
        return _Present(content, buffer, num_bytes, self._inward.record_event())

    def blank(self, record: int) -> Tensor:
        content = torch.empty(self._sizes[record], dtype=torch.uint8, device=self._device)
        self._present[id(content)] = _Present(content, None)
        return content

    def send(self, record: int, content: Tensor) -> None:
        held = self._present.pop(id(content)).buffer
        if held is None:
            self._drop_ahead()
        buffer = self._tier.blank(record) if held is None else self._tier.switch(held, record)
        if self._outward is None:
            buffer.copy_(content)
            self._tier.put(record, buffer)
            return
        self._free_leaving()
        self._outward.wait_stream(computing_stream(self._device))
        with self._outward:
            buffer.copy_(content, non_blocking=True)
            done = self._outward.record_event()
        self._leaving = (content, done)
        self._written[record] = done
        self._tier.put(record, buffer, done.synchronize if self._tier.uses_threads else None)

    def drop(self, content: Tensor) -> None:
        self._drop(self._present.pop(id(content)))

    def _drop_ahead(self) -> None:
        """Return the buffers of expected records to the tier, because the tier may have a single buffer for large
        records."""
        while self._ahead:
            self._drop(self._ahead.popitem()[1])

    def _drop(self, present: _Present) -> None:
        if present.arrived is not None:
            computing_stream(self._device).wait_event(present.arrived)  # the memory must not be reused earlier
        if present.buffer is not None:
            waits = present.arrived is not None and self._tier.uses_threads
            self._tier.drop(present.buffer, present.arrived.synchronize if waits else None)

    def settle(self) -> None:
        self.expect([], [])
        self._free_leaving()
        for done in self._written.values():
            done.synchronize()
        self._written.clear()
        self._tier.settle()

    def _free_leaving(self) -> None:
        if self._leaving is not None:
            computing_stream(self._device).wait_event(self._leaving[1])
            self._leaving = None


def staging_of(tier: Tier, sizes: Sequence[int], device: torch.device) -> Staging:
    """Return the staging between ``device`` and ``tier``. ``sizes`` contains the size of each record in bytes."""
    return Staging(tier) if device.type == "cpu" else DeviceStaging(tier, sizes, device)
