"""Freed memory of this process: return it to the operating system, or retain it for later allocations.

glibc retains freed blocks of up to 32 MiB for later allocations. If a program alternately allocates large temporary and
permanent tensors, few of the free blocks have a suitable size. The total size of the free blocks can then be larger
than the total size of the tensors.
"""

import ctypes
import sys
from collections.abc import Callable
from functools import cache


def give_back_freed() -> None:
    """Return freed memory to the operating system. This function has no effect without glibc."""
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(0)


def always_give_back_blocks(num_bytes: int) -> None:
    """Make glibc return each block of at least ``num_bytes`` to the operating system when the block is freed. This
    setting affects blocks that are allocated after this call.

    Allocating such a block takes longer than reusing a retained block, because the kernel clears its pages. This
    function has no effect without glibc.
    """
    _set_thresholds(mapped_bytes=num_bytes, trimmed_bytes=num_bytes)


def retain_freed_blocks(num_bytes: int = 2**26) -> None:
    """Make glibc retain freed blocks of up to 32 MiB, for example again after :func:`always_give_back_blocks`.

    Args:
        num_bytes: size of the retained memory at the end of the heap. The default is the largest size that glibc sets
            automatically.
    """
    _set_thresholds(mapped_bytes=2**25, trimmed_bytes=num_bytes)


def _set_thresholds(mapped_bytes: int, trimmed_bytes: int) -> None:
    set_option = _of_glibc("mallopt")
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, mapped_bytes)
        set_option(_M_TRIM_THRESHOLD, trimmed_bytes)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from malloc.h


@cache
def _of_glibc(name: str) -> Callable[..., int] | None:
    if not sys.platform.startswith("linux"):
        return None
    found: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
    return found
