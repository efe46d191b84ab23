"""Worker processes of a DataLoader that ignore the signals that are sent to the training process."""

import functools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor

# Seconds after which a worker exits if it received SIGTERM during a run, even if the training process was killed. This
# time must be longer than a step and a save.
_GRACE_S = 300


@functools.cache
def _is_running() -> Tensor:
    """Return a flag that is True during a run (0-dim bool), in memory that is shared with worker processes."""
    return torch.zeros((), dtype=torch.bool).share_memory_()  # type: ignore[no-untyped-call, no-any-return]


@contextmanager
def workers_outlive_signals() -> Iterator[None]:
    """Return a context in which workers ignore SIGTERM.

    After the context, SIGTERM terminates workers again, so the loader can end them. If an error ends the training
    process, the process first terminates its workers and waits for their exit.
    """
    is_running = _is_running()
    is_running.fill_(True)
    try:
        yield
    finally:
        is_running.fill_(False)


def end_with_signals() -> None:
    """Allow SIGTERM to terminate workers from now on, even within :func:`workers_outlive_signals`."""
    _is_running().fill_(False)


class OutlivesSignals:
    """``worker_init_fn`` that calls ``inner`` and makes the worker ignore Ctrl-C and SIGTERM during a run.

    A terminal, SLURM or systemd sends these signals to all processes of a job. If workers exited immediately, the
    training process would fail before it could complete its step and save a checkpoint. Workers exit when the training
    process exits.

    Args:
        inner: the user's ``worker_init_fn``; None if the user passed no function.
    """

    def __init__(self, inner: Callable[[int], Any] | None) -> None:
        self.inner = inner
        self._is_running = _is_running()

    def __call__(self, worker_id: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if "SLURM_JOB_ID" in os.environ:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._end_in_time)
        if self.inner is not None:
            self.inner(worker_id)

    def _end_in_time(self, number: int, frame: FrameType | None) -> None:
        if self._is_running:
            signal.alarm(_GRACE_S)
        else:
            os._exit(0)  # torch treats this exit status as the end of a worker without remaining work
