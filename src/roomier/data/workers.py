"""Worker processes of a DataLoader that outlive the signals meant for the process that trains."""

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

# Longer than a step and its save take. A worker that hangs lives as long when it is told to end.
_GRACE_S = 300


class OutlivesSignals:
    """A ``worker_init_fn`` that lets the worker go on after Ctrl-C and SIGTERM, and then calls ``inner``.

    A terminal, SLURM or systemd sends them to all processes of a job at once. Workers that end at once take the process
    that trains with them, before it could finish its step and save. They end when it does.
    """

    def __init__(self, inner: Callable[[int], Any] | None) -> None:
        self.inner = inner

    def __call__(self, worker_id: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, _end_later)
        if self.inner is not None:
            self.inner(worker_id)


def _end_later(number: int, frame: FrameType | None) -> None:
    signal.alarm(_GRACE_S)
