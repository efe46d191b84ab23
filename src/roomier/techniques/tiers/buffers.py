"""Host memory of the tiers. The memory is aligned for direct I/O, and pinned if an accelerator copies from or to it.

[Note: sizes of pinned allocations]
torch rounds each pinned allocation up to a power of two, so one allocation for all records could have almost twice the
size of the records. :func:`record_memory` instead divides the records among allocations whose sizes are powers of two.

[Note: memory in forked processes]
Direct I/O into private memory corrupts data if the process forks during the transfer (Linux, ``open(2)``). Memory that
is not pinned is therefore not copied to forked processes (``MADV_DONTFORK``).

[Note: memory of tiers]
Some tensors share the memory of a buffer or of a mapped file, such as parameters that exchanged their memory with a
buffer. Code that measures memory counts a buffer once and does not count mapped files, which are in the page cache.
"""

from __future__ import annotations

import mmap
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate

import torch
from torch import Tensor

_mapped: dict[int, tuple[int, bool]] = {}  # address -> number of bytes, and whether the memory is a file
_anonymous: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()  # by address

ALIGNMENT_BYTES = 4096  # A multiple of the block sizes of disks.


def padded(num_bytes: int) -> int:
    """Return ``num_bytes`` rounded up to a multiple of the alignment."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def allocate(num_bytes: int, pinned: bool, *, is_shared: bool = False) -> Tensor:
    """Return ``num_bytes`` of aligned host memory (uint8) with undefined content. Pages that are not used occupy no
    memory, unless the memory is pinned.

    Args:
        num_bytes: number of bytes.
        pinned: True to pin the memory.
        is_shared: whether other storages will share the memory; see [Note: memory of tiers].
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    if pinned:
        for extra_bytes in (0, ALIGNMENT_BYTES):  # most drivers return aligned memory
            memory = torch.empty(num_bytes + extra_bytes, dtype=torch.uint8, pin_memory=True)
            start = -memory.data_ptr() % ALIGNMENT_BYTES
            if start <= extra_bytes:
                break
        return memory[start : start + num_bytes]
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows has no MAP_PRIVATE and does not fork
        return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_DONTFORK"):
        mapping.madvise(mmap.MADV_DONTFORK)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the kernel may not support huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    if is_shared:
        register(mapping, is_file=False)
    storage = torch.frombuffer(mapping, dtype=torch.uint8).untyped_storage()
    _anonymous[storage.data_ptr()] = mapping
    return torch.empty(0, dtype=torch.uint8).set_(storage)  # set_ is a torch operation, so trackers count this memory


def discard_content(memory: Tensor) -> None:
    """Return the pages of ``memory`` to the operating system until the next access. The content becomes undefined.

    This function has no effect on pinned memory or on systems without ``MADV_DONTNEED``.

    Args:
        memory: aligned memory from :func:`allocate`.
    """
    start = memory.untyped_storage().data_ptr()
    mapping = _anonymous.get(start)
    if mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
        mapping.madvise(mmap.MADV_DONTNEED, memory.data_ptr() - start, memory.nbytes)


def register(mapping: mmap.mmap, *, is_file: bool) -> None:
    """Record a mapping as memory of a tier until the mapping is destroyed. See [Note: memory of tiers]."""
    address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
    _mapped[address] = (len(mapping), is_file)
    weakref.finalize(mapping, _mapped.pop, address, None)


def memory_of_a_tier(address: int) -> tuple[int, int] | None:
    """Return the start and the size in bytes of the tier memory that contains ``address``. For a mapped file, the size
    is 0.

    The result is None if no tier memory contains ``address``.
    """
    for start, (num_bytes, is_file) in _mapped.items():
        if start <= address < start + num_bytes:
            return start, 0 if is_file else num_bytes
    return None


def record_memory(sizes: Sequence[int], pinned: bool) -> tuple[list[Tensor], int]:
    """Return aligned memory for each record, and the number of allocated bytes."""
    starts = [0, *accumulate(padded(size) for size in sizes)]
    records: list[Tensor] = []
    allocated_bytes = 0
    for slab_bytes, num_records in _slabs(starts) if pinned else [(starts[-1], len(sizes))]:
        slab = allocate(slab_bytes, pinned, is_shared=True)
        allocated_bytes += slab_bytes
        first = len(records)
        for index in range(first, first + num_records):
            start = starts[index] - starts[first]
            records.append(slab[start : start + sizes[index]])
    return records, allocated_bytes


def allocated_bytes(sizes: Sequence[int], pinned: bool) -> int:
    """Return the number of bytes that :func:`record_memory` allocates."""
    starts = [0, *accumulate(padded(size) for size in sizes)]
    return sum(slab_bytes for slab_bytes, _ in _slabs(starts)) if pinned else starts[-1]


def buffer_sizes(sizes: Sequence[int], num_buffers: int) -> list[int]:
    """Return the sizes of the buffers in a ring. Large records share the first buffer.

    A record is large if it has more than twice the size of the median record. An embedding is often several times as
    large as a block. In a ring of equal buffers, each buffer would have the size of the embedding.

    Args:
        sizes: size of each record in bytes.
        num_buffers: number of buffers.

    Returns:
        The size of each buffer in bytes.
    """
    in_order = sorted(map(padded, sizes))
    if not in_order:
        return [0] * num_buffers
    limit = 2 * in_order[len(in_order) // 2]
    others = max((each for each in in_order if each <= limit), default=0)
    return [in_order[-1]] + [others] * (num_buffers - 1)


def _slabs(starts: Sequence[int]) -> list[tuple[int, int]]:
    """Return the slabs (allocations) with the smallest total size: the size in bytes and the number of records of each
    slab.

    See [Note: sizes of pinned allocations].

    Args:
        starts: position of the first byte of each record, and the end of the last record.
    """
    num_records = len(starts) - 1
    # For each record: total bytes of the slabs from this record on, bytes of the first of these slabs, and number of
    # records in the first slab.
    best: list[tuple[int, int, int]] = [(0, 0, 0)] * (num_records + 1)
    for first in reversed(range(num_records)):
        options: list[tuple[int, int, int]] = []
        slab_bytes = ALIGNMENT_BYTES
        while not options or options[-1][2] < num_records - first:
            held = bisect_right(starts, starts[first] + slab_bytes) - 1 - first
            if held > 0:
                options.append((slab_bytes + best[first + held][0], slab_bytes, held))
            slab_bytes *= 2
        best[first] = min(options)
    slabs: list[tuple[int, int]] = []
    first = 0
    while first < num_records:
        _, slab_bytes, held = best[first]
        slabs.append((slab_bytes, held))
        first += held
    return slabs
