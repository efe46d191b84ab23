"""Functions that run in daemon threads, which do not delay the exit of the process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_daemon(function: Callable[[], T], name: str) -> Future[T]:
    """Call ``function`` in a new daemon thread named ``name``, and return its future result or error. The threads of an
    executor would delay the exit of the process."""
    outcome: Future[T] = Future()

    def call() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=call, name=name, daemon=True).start()
    return outcome
