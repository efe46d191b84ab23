"""Copies of saved tensors to disk and back.

[Note: activations on disk]
The writer thread of a scratch file writes a tensor, and the reader thread reads it, while computation continues. On an
accelerator, the tensor passes through pinned host memory: the copy stream copies it to the host, and the writer waits
for this copy. In the other direction, the reader starts the copy to the device after it has read the tensor.

On a CPU, the writer reads the memory of the tensor directly, and the tensor is freed after the write. When a block
begins, computation waits for the writes of the second block before it, so the host memory contains the saved tensors of
at most two blocks, if the graph is their only user. glibc would retain most of the freed memory, so while activations
are on disk, large freed blocks of memory are returned to the operating system. The price is time, because the operating
system must clear the pages of new blocks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from roomier.core.host_memory import always_give_back_blocks, retain_freed_blocks
from roomier.techniques.activation.copies import MIN_BYTES, Copies, StreamCopies, copies_on
from roomier.techniques.tiers.buffers import allocate, padded
from roomier.techniques.tiers.scratch import FileTransfer, Scratch


@dataclass(eq=False)
class _Stored:
    """A tensor on disk.

    Attributes:
        region: part of the file that contains the tensor. The region is free again when the tensor is no longer
            required and all its transfers are complete.
        num_bytes: size of the tensor.
        write: job that writes the tensor.
    """

    region: FileRegion
    num_bytes: int
    write: FileTransfer


@dataclass(frozen=True)
class _Mark:
    """Position in the order of the copies: the last write, the last read, and the last copy to the host."""

    write: FileTransfer | None
    read: _Read | None
    link: Any


@dataclass(eq=False)
class _Read:
    """A read that has started.

    Attributes:
        job: job of the reader thread.
        mark: position of the copy to the device in the copy stream; None until the job is complete.
    """

    job: FileTransfer
    mark: Any = None


class DiskCopies(Copies):
    """Copies to disk and back; see [Note: activations on disk].

    Args:
        device: device that holds the tensors while they are not on disk.
        scratch: scratch file for the tensors. :meth:`close` closes this file.

    Attributes:
        bytes_read, bytes_written: number of bytes read from and written to the disk, including padding.
    """

    place = "on disk"

    def __init__(self, device: torch.device, scratch: Scratch) -> None:
        super().__init__(device)
        self.saves = True
        self.bytes_read = self.bytes_written = 0
        self._link = None if device.type == "cpu" else copies_on(device)
        if self._link is None:
            # without this call, the memory of freed activations remains in the process
            always_give_back_blocks(MIN_BYTES)
        self._scratch = scratch
        self._regions = Regions(scratch)
        self._write: FileTransfer | None = None
        self._read: _Read | None = None

    def to_host(self, tensor: Tensor) -> Any:
        """Start writing ``tensor`` (uint8) to disk.

        Raises:
            TierError: the disk is full, or an earlier transfer failed.
        """
        self._scratch.check()
        region = self._regions.allocate(len(tensor))
        source, wait = tensor, None
        if self._link is not None:
            source = self._link.to_host(tensor)
            mark = self._link.mark()
            wait = None if mark is None else mark.synchronize

        def then() -> None:
            self.bytes_written += region.num_bytes

        self._write = FileTransfer(source, region.position, wait, then=then)
        self._scratch.transfers.write(self._write)
        return _Stored(region, len(tensor), self._write)

    def to_device(self, copy: Any) -> Tensor:
        """Start reading a tensor. The tensor can be used after :meth:`wait`.

        Raises:
            TierError: an earlier transfer failed.
        """
        self._scratch.check()
        stored: _Stored = copy
        link = self._link
        host = allocate(stored.region.num_bytes, pinned=isinstance(link, StreamCopies))
        content = host[: stored.num_bytes]
        finish, made = None, content
        read = _Read(FileTransfer(host, stored.region.position, after=stored.write))
        if link is not None:
            made = torch.empty(stored.num_bytes, dtype=torch.uint8, device=self.device)
            finish = partial(link.finish, content, made, link.start())

        def run() -> None:
            if finish is not None:
                read.mark = finish()
            self.bytes_read += stored.region.num_bytes  # this reference keeps the region until the read is complete

        read.job.finish = run
        self._read = read
        self._scratch.transfers.read(read.job)
        return made

    def mark(self) -> Any:
        return _Mark(self._write, self._read, None if self._link is None else self._link.mark())

    def wait(self, mark: Any) -> None:
        """Block the host until the disk transfers that precede ``mark`` are complete, and make computation wait for the
        copies between device and host.

        Raises:
            TierError: a transfer failed.
        """
        jobs = [job for job in (mark.write, mark.read and mark.read.job) if job is not None]
        self._scratch.wait_for(lambda: all(job.is_done for job in jobs))
        self.wait_to_free(mark)
        if self._link is not None and mark.read is not None and mark.read.mark is not None:
            self._link.wait(mark.read.mark)

    def wait_to_free(self, mark: Any) -> None:
        if self._link is not None:
            self._link.wait(mark.link)  # on a CPU, the writer holds the tensors until they are written

    def close(self) -> None:
        """End all transfers and remove the file."""
        self._scratch.close()
        if self._link is None:
            retain_freed_blocks()

    def _finished_ns(self) -> int:
        self.wait(self.mark())
        return super()._finished_ns()


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
