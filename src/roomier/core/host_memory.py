"""Freed memory of this process, back to the system."""

import ctypes
import sys
from collections.abc import Callable
from functools import cache


def give_back_freed() -> None:
    """Return what was freed to the system; nothing where the C library is not glibc.

    glibc keeps freed memory of up to 32 MiB a piece for what comes next. Where large and lasting tensors are made in
    turns, the holes between them are seldom of the right size, and add up to more than the tensors.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Callable[[int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return found
