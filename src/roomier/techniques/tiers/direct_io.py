"""Functions that read and write aligned buffers at given positions in a file. These functions bypass the page cache if
the file system supports direct I/O.

[Note: direct I/O]
With ``O_DIRECT``, the disk reads and writes the buffers directly. The kernel neither copies the data nor retains the
data in its page cache, where the data would replace useful pages. Positions, sizes and addresses must be multiples of
the block size. File systems that do not support ``O_DIRECT`` reject the flag or the first transfer.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

from torch import Tensor

from roomier.techniques.tiers.buffers import ALIGNMENT_BYTES, allocate, padded
from roomier.techniques.tiers.page_sums import PageSums

CHUNK_BYTES = 2**22  # Larger chunks are not faster, and smaller chunks require more processor time.


class TruncatedError(OSError):
    """Error for a file that is shorter than its reserved size."""


def set_direct(file: int) -> bool:
    """Turn on direct I/O for an open file, and return whether a write and a read of one block succeed.

    The file must be writable and at least one block long. The first block is overwritten.
    """
    if not hasattr(os, "O_DIRECT"):
        return False
    import fcntl  # late import: this module does not exist on Windows

    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    block = allocate(ALIGNMENT_BYTES, pinned=False).zero_()
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
        view = block.numpy().data
        if os.pwritev(file, [view], 0) == os.preadv(file, [view], 0) == ALIGNMENT_BYTES:
            return True
    except OSError:
        pass
    with contextlib.suppress(OSError):
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
    return False


def read(file: int, buffer: Tensor, position: int, reserved_bytes: int, sums: PageSums) -> None:
    """Fill ``buffer`` (uint8) with the content of the file, starting at ``position``.

    If ``buffer`` is not aligned, the content is read through an aligned chunk.

    Args:
        position: aligned position in the file.
        reserved_bytes: size of the file.
        sums: checksums of the file. A read compares them, and a write replaces them.

    Raises:
        OSError: the transfer failed, the file is shorter than ``reserved_bytes``, or a checksum differs.
    """
    if _is_aligned(buffer):
        _transfer(os.preadv, file, buffer, position, reserved_bytes, sums)
        return
    for start in range(0, len(buffer), CHUNK_BYTES):
        part = buffer[start : start + CHUNK_BYTES]
        chunk = _chunk()[: padded(len(part))]
        _transfer(os.preadv, file, chunk, position + start, reserved_bytes, sums)
        part.copy_(chunk[: len(part)])


def write(file: int, buffer: Tensor, position: int, reserved_bytes: int, sums: PageSums) -> None:
    """Write ``buffer`` to the file, padded to a multiple of the alignment. For the arguments and errors, see
    :func:`read`."""
    if _is_aligned(buffer):
        _transfer(os.pwritev, file, buffer, position, reserved_bytes, sums)
        return
    for start in range(0, len(buffer), CHUNK_BYTES):
        part = buffer[start : start + CHUNK_BYTES]
        chunk = _chunk()[: padded(len(part))]
        chunk[: len(part)].copy_(part)
        _transfer(os.pwritev, file, chunk, position + start, reserved_bytes, sums)


def _is_aligned(buffer: Tensor) -> bool:
    return buffer.data_ptr() % ALIGNMENT_BYTES == 0 and len(buffer) % ALIGNMENT_BYTES == 0


_chunks = threading.local()


def _chunk() -> Tensor:
    """Return an aligned chunk of memory that only the current thread uses."""
    if not hasattr(_chunks, "memory"):
        _chunks.memory = allocate(CHUNK_BYTES, pinned=False)
    memory: Tensor = _chunks.memory
    return memory


def _transfer(
    call: Callable[..., int], file: int, buffer: Tensor, position: int, reserved_bytes: int, sums: PageSums
) -> None:
    content = buffer.numpy()
    for start in range(0, len(content), CHUNK_BYTES):
        chunk = content[start : start + CHUNK_BYTES]
        if call is os.pwritev:
            sums.store(position + start, chunk)
        done = 0
        while done < len(chunk):
            # A write after the file was truncated extends the file with zeros, so a later read would not detect the
            # truncation.
            size = os.fstat(file).st_size
            moved = call(file, [chunk.data[done:]], position + start + done) if size >= reserved_bytes else 0
            if moved == 0:
                raise TruncatedError(f"the file was truncated to {size} bytes")
            done += moved
        if call is os.preadv:
            sums.check(position + start, chunk)
