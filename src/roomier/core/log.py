"""Notices: messages from roomier to the user, on standard error."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_is_quiet: ContextVar[bool] = ContextVar("is_quiet", default=False)


def is_first_rank() -> bool:
    """Return whether this process is rank 0 or the only process. Launchers set ``RANK``."""
    return os.environ.get("RANK", "0") == "0"


def notice(message: str, *, every_rank: bool = False) -> None:
    """Print one line on standard error, so that standard output contains only data.

    Args:
        every_rank: if True, print on each rank that calls this function. By default, only rank 0 prints.
    """
    if not _is_quiet.get() and (every_rank or is_first_rank()):
        sys.stderr.write(f"roomier: {message}\n")  # in one write, because ranks share the terminal
        sys.stderr.flush()


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress notices inside the context, for example while a model is built only for a dry run."""
    token = _is_quiet.set(True)
    try:
        yield
    finally:
        _is_quiet.reset(token)
