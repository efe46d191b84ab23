"""Worker processes of a DataLoader that outlive the signals meant for the process that trains."""

import functools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor

# Longer than a step and its save take: a worker that has lost its run does not live for ever.
_GRACE_S = 300


@functools.cache
def _is_running() -> Tensor:
    """Whether a run is going on (0-dim bool), in memory that the worker processes see."""
    return torch.zeros((), dtype=torch.bool).share_memory_()  # type: ignore[no-untyped-call, no-any-return]


@contextmanager
def workers_outlive_signals() -> Iterator[None]:
    """Inside, workers go on after a SIGTERM. Behind it they end when they are told to: by the loader that has no use
    for them, or by the process that trains when an error ends it, which waits for them."""
    is_running = _is_running()
    is_running.fill_(True)
    try:
        yield
    finally:
        is_running.fill_(False)


def end_with_signals() -> None:
    """Let workers end at a SIGTERM from now on, though the run is still inside :func:`workers_outlive_signals`."""
    _is_running().fill_(False)


class OutlivesSignals:
    """A ``worker_init_fn`` that lets the worker go on after Ctrl-C and SIGTERM while a run is going on, and then calls
    ``inner``.

    A terminal, SLURM or systemd sends them to all processes of a job at once. Workers that end at once take the process
    that trains with them, before it could finish its step and save. They end when it does.
    """

    def __init__(self, inner: Callable[[int], Any] | None) -> None:
        self.inner = inner
        self._is_running = _is_running()

    def __call__(self, worker_id: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._end_in_time)
        if self.inner is not None:
            self.inner(worker_id)

    def _end_in_time(self, number: int, frame: FrameType | None) -> None:
        if self._is_running:
            signal.alarm(_GRACE_S)
        else:
            os._exit(0)  # a status that torch takes for a worker that had nothing left to do
