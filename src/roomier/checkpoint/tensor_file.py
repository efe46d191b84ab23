"""Write and read one safetensors file without buffering its tensors.

A file contains eight bytes that encode the length of the header, the header as JSON, and the tensors one after another
(https://huggingface.co/docs/safetensors). All shapes are known before the first byte is written, so the tensors are not
collected in memory. The checksum is computed during the write.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roomier.core.forms import FormError, anything, count, fields, item_of, items, list_of, mapping_of, one_of, text
from roomier.core.untrusted import open_regular, parse_json, size_of

CODES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
_DTYPES = {code: dtype for dtype, code in CODES.items()}
_LENGTH = struct.Struct("<Q")
_ALIGNMENT_BYTES = 8
_MAX_HEADER_BYTES = 100 * 2**20  # the same limit as in the safetensors library
_ENTRY_FORM = fields({"dtype": one_of(*_DTYPES), "shape": list_of(count), "data_offsets": items(count, count)})
CHUNK_BYTES = 4 * 2**20
_SKIP_BYTES = 2**18
_SUMMED_BYTES = 2**18  # small enough to remain in the processor's cache until the checksum is computed


@dataclass(frozen=True)
class Header:
    """Header of a safetensors file.

    Attributes:
        tensors: dtype, shape and offset of the first byte in the file, for each tensor.
        metadata: entries of ``__metadata__``.
    """

    tensors: dict[str, tuple[torch.dtype, tuple[int, ...], int]]
    metadata: dict[str, str]


class TensorFile:
    """New safetensors file that is written from front to end.

    Args:
        specs: mapping from the name of each tensor to its dtype and shape.
        metadata: entries of ``__metadata__``.

    Attributes:
        names: names of the tensors in the order of the file. Tensors of the widest dtype come first, so all tensors are
            aligned.
        size_bytes: size of the complete file.
        crc32: CRC-32 of the bytes that were written.
    """

    def __init__(self, specs: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str]) -> None:
        self.names = sorted(specs, key=lambda name: -specs[name][0].itemsize)
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        end = 0
        for name in self.names:
            dtype, shape = specs[name]
            begin, end = end, end + num_bytes_of(dtype, shape)
            header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT_BYTES)
        self.size_bytes = _LENGTH.size + len(text) + end
        self.crc32 = 0
        self._num_written = 0
        self._head = _LENGTH.pack(len(text)) + text

    def write(self, path: Path, data_of: Callable[[str], Iterable[memoryview]]) -> None:
        """Create the file ``path``, write all tensors and flush them to the disk. ``data_of`` returns the bytes of the
        tensor with a name, in one or more parts. Raises OSError, also if ``path`` exists."""
        with path.open("xb", buffering=0) as file:
            self.append(file, self._head)
            for name in self.names:
                for data in data_of(name):
                    self.append(file, data)
            assert self._num_written == self.size_bytes, "the number of bytes differs from the number in the header"
            os.fsync(file.fileno())

    def append(self, file: io.FileIO, data: bytes | memoryview) -> None:
        """Append ``data`` to ``file``. Raises OSError."""
        view = memoryview(data)
        self.crc32 = zlib.crc32(view, self.crc32)
        self._num_written += len(view)
        while len(view):
            view = view[file.write(view) :]


def num_bytes_of(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Return the size of a dense tensor in bytes."""
    return dtype.itemsize * torch.Size(shape).numel()


def bytes_of(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a dense tensor in row-major order, ``CHUNK_BYTES`` at a time.

    A tensor that is not contiguous is copied completely. A tensor on a device is copied chunk by chunk.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    for begin in range(0, flat.numel(), CHUNK_BYTES):
        yield memoryview(flat[begin : begin + CHUNK_BYTES].cpu().numpy().data)


def read_header(path: Path) -> Header:
    """Return the header of the safetensors file ``path``.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
        ValueError: the header is malformed, or contains an unsupported dtype.
    """
    with open_regular(path) as raw, io.BufferedReader(raw) as file:
        size_bytes = size_of(raw)
        start = file.read(_LENGTH.size)
        length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else 0
        longest = min(size_bytes - _LENGTH.size, _MAX_HEADER_BYTES)
        if not 0 < length <= longest:
            raise FormError("the length of the header", length, f"from 1 to {longest} bytes")
        entries = parse_json(file.read(length))
    first = _LENGTH.size + length
    fields({}, others=anything)(entries, "header")
    metadata = entries.pop("__metadata__", {})
    mapping_of(text)(metadata, "header.__metadata__")
    mapping_of(_ENTRY_FORM)(entries, "header")
    tensors = {}
    for name, entry in entries.items():
        dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        if not (end - begin == dtype.itemsize * math.prod(shape) and first + end <= size_bytes):
            raise FormError(item_of("header", name), entry, "a tensor whose offsets fit its shape and the file")
        tensors[name] = dtype, shape, first + begin
    return Header(tensors, metadata)


class SummedFile:
    """Regular file that is read from front to end, with the CRC-32 of all its bytes.

    Skipped bytes are read into a small buffer for the checksum, so the file is read exactly once. :func:`read_box`
    can read from this class instead of an unbuffered file.

    Args:
        file: unbuffered file at its beginning.

    Attributes:
        position: number of bytes that were read or skipped.
        crc32: CRC-32 of these bytes.
    """

    def __init__(self, file: io.RawIOBase) -> None:
        self._file = file
        self.position = 0
        self.crc32 = 0

    def seek(self, position: int) -> None:
        """Skip to ``position``, which must not be before the current position. Raises OSError."""
        assert position >= self.position, "a file is read from front to end"
        buffer = memoryview(bytearray(min(_SKIP_BYTES, position - self.position)))
        while self.position < position:
            if not self.readinto(buffer[: position - self.position]):
                raise OSError(errno.EIO, "The file ends before its tensors")

    def readinto(self, view: memoryview) -> int:
        """Fill ``view`` completely or in part and return the number of bytes read, which is 0 at the end of the file.
        Raises OSError.
        """
        num_read = self._file.readinto(view[:_SUMMED_BYTES]) or 0
        self.crc32 = zlib.crc32(view[:num_read], self.crc32)
        self.position += num_read
        return num_read

    def read_rest(self) -> None:
        """Read the remaining bytes of the file. Raises OSError."""
        buffer = memoryview(bytearray(_SKIP_BYTES))
        while self.readinto(buffer):
            pass


def read_box(
    file: io.RawIOBase | SummedFile, first: int, shape: Sequence[int], box: Sequence[slice], target: Tensor
) -> None:
    """Fill ``target`` with a box of a stored tensor, ``CHUNK_BYTES`` at a time, in the order of the file.

    Full rows are read from the file directly into the memory of a contiguous target on the CPU.

    Args:
        file: unbuffered file that contains the tensor.
        first: offset of the tensor's first byte in the file.
        shape: shape of the stored tensor.
        box: part to read, as one slice for each dimension.
        target: tensor with the shape of the box and the stored dtype, on any device.

    Raises:
        OSError: the file cannot be read, or ends before the box.
    """
    if not target.numel():
        return
    if not shape:
        shape, box, target = (1,), (slice(0, 1),), target.reshape(1)  # a view, so a read into it fills target
    row_bytes = num_bytes_of(target.dtype, shape[1:])
    num_rows = max(1, CHUNK_BYTES // row_bytes)
    takes_whole_rows = all(each == slice(0, size) for each, size in zip(box[1:], shape[1:], strict=True))
    goes_in_place = takes_whole_rows and target.is_cpu and target.is_contiguous()
    for row in range(0, target.shape[0], num_rows):
        place = target[row : row + num_rows]
        rows = place if goes_in_place else torch.empty((place.shape[0], *shape[1:]), dtype=target.dtype)
        file.seek(first + (box[0].start + row) * row_bytes)
        view = memoryview(rows.detach().reshape(-1).view(torch.uint8).numpy().data)
        while len(view):
            num_read = file.readinto(view)
            if not num_read:
                raise OSError(errno.EIO, "The file ends before its tensors")
            view = view[num_read:]
        if not goes_in_place:
            place.copy_(rows[(slice(None), *box[1:])])
