"""Return freed memory of this process to the operating system."""

import ctypes
import sys
from collections.abc import Callable
from functools import cache


def give_back_freed() -> None:
    """Return freed memory to the operating system. This function has no effect without glibc.

    glibc retains freed blocks of up to 32 MiB for later allocations. If large temporary and permanent tensors are
    allocated alternately, few of the free blocks have a suitable size. The total size of the free blocks can then
    exceed the total size of the tensors.
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
