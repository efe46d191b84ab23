"""Threads that read and write a file in the background.

[Note: one reader and one writer]
One thread reads and one thread writes. More threads would lower the total bandwidth of a disk, because large direct
transfers already use the full bandwidth. The writer completes its jobs in order. If an earlier job writes the same
bytes, a read waits until this write is complete.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


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

    def release(self) -> None:
        """Remove the references to the buffer and to the functions."""
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.wait = self.after = self.finish = self.then = None


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
                job.release()
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
