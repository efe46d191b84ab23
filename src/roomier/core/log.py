"""The library's own messages: one way to tell the user something that matters."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_is_quiet: ContextVar[bool] = ContextVar("is_quiet", default=False)


def is_first_rank() -> bool:
    """Whether this process is the only one, or the first, of its job: launchers tell each its number in ``RANK``."""
    return os.environ.get("RANK", "0") == "0"


def notice(message: str, *, every_rank: bool = False) -> None:
    """Print one line the user must see, on standard error, so that standard output stays data.

    Of several ranks the first one alone prints, but for what holds of one rank: ``every_rank`` that calls it.
    """
    if not _is_quiet.get() and (every_rank or is_first_rank()):
        print(f"roomier: {message}", file=sys.stderr, flush=True)


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, notices are not printed: what is built there is never run."""
    token = _is_quiet.set(True)
    try:
        yield
    finally:
        _is_quiet.reset(token)
