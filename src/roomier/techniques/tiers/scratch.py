"""File of one rank that stores offloaded data during a run."""

from __future__ import annotations

import atexit
import contextlib
import errno
import mmap
import os
import secrets
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from roomier.core.disk_space import free_bytes, shortage
from roomier.core.errors import TierError
from roomier.core.log import notice
from roomier.core.units import format_bytes
from roomier.techniques.tiers import direct_io
from roomier.techniques.tiers.buffers import ALIGNMENT_BYTES, padded, register
from roomier.techniques.tiers.folder import FIELD, PREFIX, SUFFIX, file_system_of, lock, offload_folder
from roomier.techniques.tiers.folder import remove_abandoned as remove_abandoned_files
from roomier.techniques.tiers.page_sums import ChangedError, PageSums
from roomier.techniques.tiers.transfers import Transfers


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
            first = self.reserve(ALIGNMENT_BYTES)
            assert first == 0
            self.is_direct = direct_io.set_direct(self._file)
            self._records_writes = self._is_write_recorded()
        except BaseException:
            os.close(self._file)
            self.path.unlink(missing_ok=True)
            raise
        if not self.is_direct:
            kind = file_system_of(self.folder)
            notice(f"the file system of {self.folder} ({kind}) has no direct I/O, so offloading uses buffered I/O")
        self.transfers = Transfers(self._read, self._write)
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
            raise self._failed(direct_io.TruncatedError(f"the file was truncated to {size} bytes"))
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

    def _read(self, buffer: Tensor, position: int) -> None:
        direct_io.read(self._file, buffer, position, self.reserved_bytes, self.sums)

    def _write(self, buffer: Tensor, position: int) -> None:
        direct_io.write(self._file, buffer, position, self.reserved_bytes, self.sums)

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
