"""File of one rank that stores offloaded data during a run.

[Note: direct I/O]
With ``O_DIRECT``, the disk reads and writes the buffers directly. The kernel neither copies the data nor retains it in
its page cache, where it would replace useful pages. Positions, sizes and addresses must be multiples of the block size.
File systems that do not support ``O_DIRECT`` reject the flag or the first transfer.

[Note: page sums]
A scratch file replaces memory, but is on a disk that other programs use. If a byte changed, training would continue
with wrong numbers, so each page of 4096 bytes has a checksum: the sum of its 64-bit words, folded to 32 bits. A random
change remains undetected with a probability of about 2**-32. The sum is computed on each chunk of a transfer, while the
chunk is in the cache of the processor. There, numpy adds 25 GB/s, whereas on the same machine, zlib's CRC-32 processes
only 2 GB/s, which is slower than many disks.

The checksums use 4 bytes of host memory for each page (1 MiB for 1 GiB). Code can also write to a record through a
mapping of the file. If the modification time of the file shows such a write, the checksums of all mapped records are
dropped. They are computed again at the next write, which is in the next step unless the weights are frozen.

[Note: one reader and one writer]
One thread reads and one thread writes. More threads would lower the total bandwidth of a disk, because large direct
transfers already use the full bandwidth. The writer completes its jobs in order, and a read waits until earlier writes
of the same bytes are complete.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import mmap
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from roomier.core.disk_space import free_bytes, shortage
from roomier.core.errors import TierError
from roomier.core.log import notice
from roomier.core.units import format_bytes
from roomier.techniques.tiers.buffers import ALIGNMENT_BYTES, allocate, padded, register
from roomier.techniques.tiers.folder import FIELD, PREFIX, SUFFIX, file_system_of, lock, offload_folder
from roomier.techniques.tiers.folder import remove_abandoned as remove_abandoned_files


@dataclass(eq=False)
class FileTransfer:
    """Transfer between a buffer and a file.

    Attributes:
        buffer: host memory (uint8), aligned.
        position: position of the first byte in the file.
        wait: function to call before the transfer; for example a function that waits for an event of a device.
        after: job that must be complete before this transfer.
        finish: function to call after the transfer, in the thread of the transfer.
        then: function that is called when the job is complete, while the lock of ``changed`` is held.
        is_done: True if the job is complete. A completed job releases its buffer and functions.
    """

    buffer: Tensor
    position: int
    wait: Callable[[], object] | None = None
    after: FileTransfer | None = None
    finish: Callable[[], object] | None = None
    then: Callable[[], None] | None = None
    is_done: bool = False


class Transfers:
    """Reader thread and writer thread. See [Note: one reader and one writer].

    Args:
        read, write: functions that move the bytes between a buffer and a position in the file.

    Attributes:
        changed: condition that protects the state of all jobs. The condition is notified when a job is complete.
        error: first error of a job. After an error, later jobs end without a transfer.
    """

    def __init__(self, read: Callable[[Tensor, int], None], write: Callable[[Tensor, int], None]) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.error: BaseException | None = None
        self._is_open = True
        self._process = os.getpid()
        self._reads: deque[FileTransfer] = deque()
        self._writes: deque[FileTransfer] = deque()
        self._threads = [
            threading.Thread(target=self._run, args=(self._reads, read), name="roomier-read", daemon=True),
            threading.Thread(target=self._run, args=(self._writes, write), name="roomier-write", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def read(self, job: FileTransfer, first: bool = False) -> None:
        """Add a job to the end of the reader's queue, or to its start if ``first`` is True."""
        self._add(self._reads, job, first)

    def write(self, job: FileTransfer) -> None:
        """Add a job to the end of the writer's queue."""
        self._add(self._writes, job, first=False)

    def _add(self, jobs: deque[FileTransfer], job: FileTransfer, first: bool) -> None:
        assert self._process == os.getpid(), "a forked process cannot use the files of its parent"
        with self.changed:
            assert self._is_open, "the file is closed"
            if first:
                jobs.appendleft(job)
            else:
                jobs.append(job)
            self.changed.notify_all()

    def cancel(self, job: FileTransfer) -> bool:
        """Remove a job if it has not started. Return whether the job was removed."""
        with self.changed:
            for jobs in (self._reads, self._writes):
                if job in jobs:
                    jobs.remove(job)
                    return True
            return False

    def close(self) -> None:
        """End both threads after their current jobs. Jobs that have not started are removed."""
        if self._process != os.getpid():  # a forked process has no threads, and its lock can be in any state
            return
        with self.changed:
            self._is_open = False
            self.changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self, jobs: deque[FileTransfer], transfer: Callable[[Tensor, int], None]) -> None:
        try:
            self._complete(jobs, transfer)
        except BaseException as error:  # such as a MemoryError. Callers must not wait for this thread
            with self.changed:
                self.error = self.error or error
                self.changed.notify_all()

    def _complete(self, jobs: deque[FileTransfer], transfer: Callable[[Tensor, int], None]) -> None:
        while (job := self._next(jobs)) is not None:
            try:
                if self.error is None:
                    if job.wait is not None:
                        job.wait()
                    transfer(job.buffer, job.position)
                    if job.finish is not None:
                        job.finish()
            except BaseException as error:  # the error is raised in the thread of the caller
                self.error = self.error or error
            with self.changed:
                job.is_done = True
                if job.then is not None:
                    job.then()
                job.buffer = torch.empty(0, dtype=torch.uint8)
                job.wait = job.after = job.finish = job.then = None
                self.changed.notify_all()
            del job

    def _next(self, jobs: deque[FileTransfer]) -> FileTransfer | None:
        with self.changed:
            self.changed.wait_for(lambda: bool(jobs) or not self._is_open)
            if not self._is_open:
                return None
            job = jobs.popleft()
            after = job.after
            if after is not None:
                self.changed.wait_for(lambda: after.is_done or not self._is_open)
            return job if self._is_open else None


_UNKNOWN = 0


class ChangedError(OSError):
    """Error for bytes that changed after they were written."""


class PageSums:
    """Checksums of the pages that were written. See [Note: page sums]. Positions and sizes are multiples of a page."""

    def __init__(self) -> None:
        self._sums: NDArray[np.uint32] = np.zeros(0, np.uint32)
        self._lock = threading.Lock()  # one thread can extend the array while other threads write to it

    def grow(self, num_bytes: int) -> None:
        """Extend the checksums to a file of ``num_bytes``."""
        with self._lock:
            added = num_bytes // ALIGNMENT_BYTES - len(self._sums)
            self._sums = np.concatenate([self._sums, np.full(added, _UNKNOWN, np.uint32)])

    def store(self, position: int, content: NDArray[np.uint8]) -> None:
        """Store the checksums of ``content``, which is written at ``position``."""
        first, sums = position // ALIGNMENT_BYTES, _sums_of(content)
        with self._lock:
            self._sums[first : first + len(sums)] = sums

    def check(self, position: int, content: NDArray[np.uint8]) -> None:
        """Compare ``content``, which was read at ``position``, with the stored checksums.

        Raises:
            ChangedError: the content of a page differs.
        """
        first, sums = position // ALIGNMENT_BYTES, _sums_of(content)
        stored = self._sums[first : first + len(sums)]
        changed = np.flatnonzero((stored != sums) & (stored != _UNKNOWN))
        if len(changed):
            where = (first + int(changed[0])) * ALIGNMENT_BYTES
            raise ChangedError(errno.EIO, f"the bytes from position {where} changed after they were written")

    def drop(self, position: int, num_bytes: int) -> None:
        """Drop the checksums of ``num_bytes`` at ``position``."""
        first = position // ALIGNMENT_BYTES
        self._sums[first : first + num_bytes // ALIGNMENT_BYTES] = _UNKNOWN


def _sums_of(content: NDArray[np.uint8]) -> NDArray[np.uint32]:
    pages = content.view(np.uint64).reshape(-1, ALIGNMENT_BYTES // 8)
    sums: NDArray[np.uint64] = np.add.reduce(pages, axis=1)
    folded: NDArray[np.uint32] = (sums ^ (sums >> np.uint64(32))).astype(np.uint32)
    folded[folded == _UNKNOWN] = 1
    return folded


class Scratch:
    """Locked file, and two threads that read and write the file. Disk space is reserved before use.

    Several tiers can use one file, but only one of them may map its records at a time. Different runs and ranks never
    use the same file, because the file has a random name and is locked. The file is removed by :meth:`close` or when
    the process ends. If the process is killed, the next run with the same folder removes the file.

    Args:
        folder: existing folder; None selects a default. See :func:`roomier.techniques.tiers.folder.offload_folder`.

    Attributes:
        folder: absolute path of the folder.
        path: path of the file.
        is_direct: True if transfers bypass the page cache.
        reserved_bytes: size of the file.
        transfers: the threads that read and write the file.
        sums: checksums of the pages of the file.

    Raises:
        TierError: the folder cannot be used.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = offload_folder(folder)
        remove_abandoned_files(self.folder)
        self.path, self._file = _create(self.folder)
        self.reserved_bytes, self.sums = 0, PageSums()
        try:
            self.reserve(ALIGNMENT_BYTES)  # the block at position 0, for the two checks
            self.is_direct = _set_direct(self._file)
            self._records_writes = self._is_write_recorded()
        except BaseException:
            os.close(self._file)
            self.path.unlink(missing_ok=True)
            raise
        if not self.is_direct:
            kind = file_system_of(self.folder)
            notice(f"the file system of {self.folder} ({kind}) has no direct I/O, so offloading uses buffered I/O")
        self.transfers = Transfers(
            lambda buffer, position: self._transfer(os.preadv, buffer, position),
            lambda buffer, position: self._transfer(os.pwritev, buffer, position),
        )
        self._process = os.getpid()
        self._is_open = True
        # When the interpreter exits, it stops daemon threads. If a thread is stopped in an operation of torch, the
        # process ends with SIGABRT.
        atexit.register(self.close)

    def reserve(self, num_bytes: int) -> int:
        """Allocate ``num_bytes`` of disk space, and return its position in the file.

        Raises:
            TierError: the disk is full.
        """
        start, num_bytes = self.reserved_bytes, padded(num_bytes)
        if num_bytes == 0:
            return start
        if num_bytes > free_bytes(self.folder):
            raise self._full(num_bytes)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file, start, num_bytes)
            else:
                os.ftruncate(self._file, start + num_bytes)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, start)
            raise self._full(num_bytes, error) from error
        self.reserved_bytes += num_bytes
        self.sums.grow(self.reserved_bytes)
        return start

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` is true. The condition is checked after each transfer.

        Raises:
            TierError: a transfer failed.
        """
        with self.transfers.changed:
            self.transfers.changed.wait_for(lambda: self.transfers.error is not None or condition())
        self.check()

    def check(self) -> None:
        """Raise the error of a failed transfer, if there is one.

        Raises:
            TierError: a read or a write failed.
        """
        error = self.transfers.error
        if isinstance(error, OSError):
            raise self._failed(error) from error
        if error is not None:
            raise error

    def mapped(self, position: int, num_bytes: int) -> tuple[Tensor, mmap.mmap]:
        """Return ``num_bytes`` of the file from ``position`` as a tensor (uint8) that shares its memory with the file.

        Returns:
            The tensor and its mapping. Before the next direct transfer, call :meth:`flush`.

        Raises:
            TierError: the file was truncated.
        """
        size = os.fstat(self._file).st_size
        if size < self.reserved_bytes:  # an access to the tensor would crash the process
            raise self._failed(OSError(f"the file was truncated to {size} bytes"))
        before = position % mmap.ALLOCATIONGRANULARITY
        try:
            mapping = mmap.mmap(self._file, before + num_bytes, offset=position - before)
        except OSError as error:
            action = "Raise the limits of this process (`ulimit -v`, `ulimit -n`)"
            raise TierError(FIELD, str(self.path), f"cannot be mapped: {error.strerror}", action) from error
        register(mapping, is_file=True)
        return torch.frombuffer(mapping, dtype=torch.uint8)[before:], mapping

    def watch(self) -> None:
        """Set the modification time of the file back by one second, so that :meth:`flush` detects writes to mappings.
        No transfer may run until the call of :meth:`flush`."""
        status = os.fstat(self._file)
        os.utime(self._file, ns=(status.st_atime_ns, status.st_mtime_ns - 10**9))
        self._watched_time = os.fstat(self._file).st_mtime_ns  # rounded by some file systems

    def flush(self, mapping: mmap.mmap) -> bool:
        """Write the changes of ``mapping`` to the file, so that direct reads return them.

        Returns:
            True if the file may have been written since the call of :meth:`watch`.
        """
        mapping.flush()
        return not self._records_writes or os.fstat(self._file).st_mtime_ns != self._watched_time

    def empty_cache(self) -> None:
        """Wait until all written data is on the disk, and remove the data from the page cache. Direct I/O does not use
        the page cache."""
        os.fsync(self._file)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """End the threads and remove the file."""
        if not self._is_open:
            return
        self._is_open = False
        atexit.unregister(self.close)
        self.transfers.close()
        os.close(self._file)
        if os.getpid() == self._process:  # a forked process does not have these threads
            self.path.unlink(missing_ok=True)

    def _is_write_recorded(self) -> bool:
        """Return whether a write to a mapping changes the modification time of the file; with tmpfs, it does not."""
        self._records_writes = True
        self.watch()
        first, mapping = self.mapped(0, 1)
        first.fill_(1)
        return self.flush(mapping)

    def _transfer(self, call: Callable[..., int], buffer: Tensor, position: int) -> None:
        """Read or write ``buffer`` at an aligned ``position``. If the buffer is not aligned, its content passes through
        an aligned chunk, and a write is padded.

        Args:
            call: ``os.preadv``, after which the checksums are compared; or ``os.pwritev``, which stores them first.

        Raises:
            OSError: the transfer failed, the file is shorter than ``reserved_bytes``, or a checksum differs.
        """
        is_aligned = buffer.data_ptr() % ALIGNMENT_BYTES == 0 and len(buffer) % ALIGNMENT_BYTES == 0
        for start in range(0, len(buffer), CHUNK_BYTES):
            part = buffer[start : start + CHUNK_BYTES]
            chunk = part if is_aligned else _chunk()[: padded(len(part))]
            content = chunk.numpy()
            if call is os.pwritev:
                if not is_aligned:
                    chunk[: len(part)].copy_(part)
                self.sums.store(position + start, content)
            done = 0
            while done < len(content):
                # A write after the file was truncated extends the file with zeros, so a later read would not detect
                # the truncation.
                size = os.fstat(self._file).st_size
                is_whole = size >= self.reserved_bytes
                moved = call(self._file, [content.data[done:]], position + start + done) if is_whole else 0
                if moved == 0:
                    raise OSError(f"the file was truncated to {size} bytes")
                done += moved
            if call is os.preadv:
                self.sums.check(position + start, content)
                if not is_aligned:
                    part.copy_(chunk[: len(part)])

    def _full(self, num_bytes: int, error: OSError | None = None) -> TierError:
        number = errno.ENOSPC if error is None else error.errno or 0
        problem = f"cannot hold the records of this rank: the scratch file {shortage(self.folder, num_bytes, number)}"
        action = "Free disk space, choose a folder on a larger disk, or offload less with offload={'share': ...}"
        return TierError(FIELD, str(self.folder), problem, action)

    def _failed(self, error: OSError) -> TierError:
        try:
            available = f"has {format_bytes(free_bytes(self.folder))} free"
        except OSError:
            available = "no longer exists"
        problem = f"cannot be read or written: {error}. The file has {format_bytes(self.reserved_bytes)}; its folder "
        problem += available
        if isinstance(error, ChangedError):
            problem = f"is damaged: {error.strerror}"
        action = "Check the disk, ensure that no other program changes the file, and resume from the last checkpoint"
        return TierError(FIELD, str(self.path), problem, action)


def _create(folder: Path) -> tuple[Path, int]:
    """Return the path and the descriptor of a new file that this process has locked.

    Raises:
        TierError: the file cannot be created.
    """
    while True:
        path = folder / f"{PREFIX}{os.getpid()}-{secrets.token_hex(6)}{SUFFIX}"
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            # A different run can lock and remove the file before this process locks it.
            if lock(file) and os.fstat(file).st_nlink > 0:
                return path, file
            os.close(file)
        except OSError as error:
            path.unlink(missing_ok=True)
            action = "Choose a writable folder on a local disk with offload={'folder': ...}"
            raise TierError(
                FIELD, str(folder), f"does not allow a scratch file to be created and locked: {error}", action
            ) from error


CHUNK_BYTES = 2**22  # Larger chunks are not faster, and smaller chunks require more CPU time.


def _set_direct(file: int) -> bool:
    """Turn on direct I/O for an open file, and return whether a write and a read of one block succeed.

    The file must be writable and at least one block long. The first block is overwritten.
    """
    if not hasattr(os, "O_DIRECT"):
        return False
    import fcntl  # late import: this module does not exist on Windows

    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    block = allocate(ALIGNMENT_BYTES, pinned=False).zero_()
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
        view = block.numpy().data
        if os.pwritev(file, [view], 0) == os.preadv(file, [view], 0) == ALIGNMENT_BYTES:
            return True
    except OSError:
        pass
    with contextlib.suppress(OSError):
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
    return False


_chunks = threading.local()


def _chunk() -> Tensor:
    """Return an aligned chunk of memory that only the current thread uses."""
    if not hasattr(_chunks, "memory"):
        _chunks.memory = allocate(CHUNK_BYTES, pinned=False)
    memory: Tensor = _chunks.memory
    return memory
