"""Memory of a record on the device: a storage that is empty while the record is only in its tier.

[Note: one storage]
Operations save views of parameters for the backward pass. These views refer to the storage of the parameter, so a
parameter that leaves and returns must keep its storage; only the memory of the storage is freed and allocated again. On
the CPU, this memory is exchanged with the buffer of the tier, so no byte is copied. Allocation and copying would take
longer than reading from a disk, because the operating system clears each new page.

[Note: copies of records]
On an accelerator, records are copied on one stream. The device memory belongs to the stream that is current when it is
allocated, which is the compute stream or a stream of ``fully_shard``. A copy to the device waits for the kernels that
used this memory before, and kernels that read the memory wait for the copy. Before memory is freed, the stream to which
it belongs waits for the last copy that uses it. Waiting for a copy to the host that has just started would delay the
computation, so the memory of this copy is freed when the next record is brought to the device. If the tier has a buffer
for each record, the buffers are not returned to the tier between uses, so the host never waits for a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from roomier.core import torch_offload
from roomier.core.device.capability import capabilities_of
from roomier.core.device.streams import computing_stream
from roomier.techniques.tiers.tier import Tier


class Memory:
    """Memory of one record on the device.

    Args:
        tier: tier that stores the record.
        record: number of the record.
        num_bytes: size of the record.
        device: device that contains the memory.

    Attributes:
        storage: storage of the record on the device, which is always the same object.
        is_here: whether the storage has memory that contains the record.
    """

    is_here = False

    def __init__(self, tier: Tier, record: int, num_bytes: int, device: torch.device) -> None:
        self._tier, self._record, self._num_bytes, self._device = tier, record, num_bytes, device
        self._content = torch.empty(0 if device.type == "cpu" else num_bytes, dtype=torch.uint8, device=device)
        self.storage = self._content.untyped_storage()
        self.storage.resize_(0)

    def start(self) -> None:
        """Start copying the record to the device if copies overlap with computation."""

    def arrive(self) -> None:
        """Make the content of the record available to the computation."""
        raise NotImplementedError

    def blank(self) -> None:
        """Allocate memory with undefined content for the storage."""
        raise NotImplementedError

    def leave(self, *, is_changed: bool) -> None:
        """Free the memory. If ``is_changed`` is True, write the content to the record first."""
        raise NotImplementedError

    def free(self) -> None:
        """Free the memory that :meth:`leave` did not free because the copy to the host was not complete."""

    def settle(self) -> None:
        """Return the buffer to the tier. Call this method before ``Tier.settle``. The record must not be on the
        device."""


class HostMemory(Memory):
    """Memory on the CPU, which is the buffer of the tier; see [Note: one storage]. ``Tier.expect`` starts the reads."""

    _buffer: Tensor | None = None
    _shared: Tensor | None = None  # while is_here is True, owns the memory that _content had before

    def arrive(self) -> None:
        if self._buffer is None:
            self._hold(self._tier.take(self._record))

    def blank(self) -> None:
        if self._buffer is None:
            self._hold(self._tier.blank(self._record))

    def _hold(self, buffer: Tensor) -> None:
        self._buffer, self.is_here = buffer, True
        if torch_offload.exchanges_memory:
            self._shared = torch.from_numpy(buffer.numpy())  # the storage begins with the first byte of the buffer
            torch_offload.exchange_memory(self._content, self._shared)
        else:
            self.storage.resize_(self._num_bytes)
            torch.empty(0, dtype=torch.uint8).set_(self.storage).copy_(buffer)

    def leave(self, *, is_changed: bool) -> None:
        buffer, self._buffer, self.is_here = self._buffer, None, False
        assert buffer is not None
        if torch_offload.exchanges_memory:
            assert self._shared is not None
            torch_offload.exchange_memory(self._content, self._shared)
            self._shared = None
        else:
            if is_changed:
                buffer.copy_(torch.empty(0, dtype=torch.uint8).set_(self.storage))
            self.storage.resize_(0)
        if is_changed:
            self._tier.put(self._record, buffer)
        else:
            self._tier.drop(buffer)


class DeviceMemory(Memory):
    """Memory on an accelerator.

    Args:
        tier, record, num_bytes, device: see :class:`Memory`.
        stream: stream for copies; see [Note: copies of records]. If None, the host waits for each copy.
        keeps_buffer: True to retain the buffer between uses, which requires a tier with a buffer for each record.
    """

    def __init__(
        self,
        tier: Tier,
        record: int,
        num_bytes: int,
        device: torch.device,
        *,
        stream: torch.Stream | None,
        keeps_buffer: bool,
    ) -> None:
        super().__init__(tier, record, num_bytes, device)
        self._stream, self._keeps_buffer = stream, keeps_buffer
        self._has_memory = False
        self._owner: Any = None  # stream to which the memory belongs
        self._copied: Any = None  # event after the last copy
        self._buffer: Tensor | None = None  # if keeps_buffer is set
        self._written: Any = None  # event after the last copy to the retained buffer

    def start(self) -> None:
        if self._has_memory:
            return
        self._allocate()
        buffer = self._tier.take(self._record) if self._buffer is None else self._buffer
        done = self._copy(buffer, self._content)
        if self._keeps_buffer:
            self._buffer = buffer
        else:
            self._tier.drop(buffer, None if done is None else done.synchronize)

    def arrive(self) -> None:
        self.start()
        self._wait()
        self.is_here = True

    def blank(self) -> None:
        if not self._has_memory:
            self._allocate()
        self._wait()
        self.is_here = True

    def leave(self, *, is_changed: bool) -> None:
        self.is_here = False
        if not is_changed:
            self.free()
            return
        buffer = self._tier.blank(self._record) if self._buffer is None else self._buffer
        self._buffer, self._written = buffer, self._copy(self._content, buffer)
        if not self._keeps_buffer:
            self._return_buffer()

    def free(self) -> None:
        if self._has_memory and not self.is_here:
            if self._copied is not None:
                self._owner.wait_event(self._copied)
            self.storage.resize_(0)
            self._has_memory = False

    def settle(self) -> None:
        self.free()
        if self._buffer is not None:
            self._return_buffer()

    def _return_buffer(self) -> None:
        buffer, done = self._buffer, self._written
        assert buffer is not None
        self._buffer = self._written = None
        self._tier.put(self._record, buffer, None if done is None else done.synchronize)

    def _allocate(self) -> None:
        self._copied = None
        if self._stream is not None:
            self._owner = computing_stream(self._device)
        self.storage.resize_(self._num_bytes)
        self._has_memory = True

    def _copy(self, source: Tensor, target: Tensor) -> Any:
        if self._stream is None:
            target.copy_(source)
            return None
        self._stream.wait_stream(computing_stream(self._device))
        with self._stream:
            target.copy_(source, non_blocking=True)
        self._copied = self._stream.record_event()
        return self._copied

    def _wait(self) -> None:
        if self._copied is not None:
            computing_stream(self._device).wait_event(self._copied)


def memories_of(tier: Tier, sizes: Sequence[int], device: torch.device) -> list[Memory]:
    """Return a :class:`Memory` on ``device`` for each record of ``tier``. ``sizes`` contains the size of each
    record."""
    if device.type == "cpu":
        return [HostMemory(tier, record, size, device) for record, size in enumerate(sizes)]
    stream = torch.Stream(device) if capabilities_of(device).copies_asynchronously else None
    keeps = tier.num_buffers >= len(sizes)
    return [
        DeviceMemory(tier, record, size, device, stream=stream, keeps_buffer=keeps) for record, size in enumerate(sizes)
    ]
