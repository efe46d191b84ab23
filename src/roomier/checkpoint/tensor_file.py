"""One safetensors file, written as its bytes come and read where they lie.

The format is eight bytes with the length of the header, the header as JSON, and the tensors one after another
(https://huggingface.co/docs/safetensors). All shapes are known before the first byte is there, so nothing has to be
gathered in memory, and the checksum is taken on the way.
"""

from __future__ import annotations

import errno
import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from torch import Tensor

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
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
_DTYPES = {code: dtype for dtype, code in CODES.items()}
_LENGTH = struct.Struct("<Q")
_ALIGNMENT_BYTES = 8
CHUNK_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Header:
    """What a file holds: for each tensor its dtype, shape, and where its bytes lie in the file."""

    tensors: dict[str, tuple[torch.dtype, tuple[int, ...], int]]
    metadata: dict[str, str]


class TensorFile:
    """A new safetensors file that is filled from front to end, in a ``with`` block, whose end flushes it to the disk.

    Args:
        path: of the file, which must not be there yet.
        specs: name -> dtype and shape of each tensor. Those of the widest dtype come first, so that all are aligned;
            the order is in ``names``.
        metadata: what readers find beside the tensors.
    """

    def __init__(
        self, path: Path, specs: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str]
    ) -> None:
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
        self._path = path

    def append(self, data: bytes | memoryview) -> None:
        """The next bytes of the tensors, in the order of ``names``. Raises OSError."""
        view = memoryview(data)
        self.crc32 = zlib.crc32(view, self.crc32)
        self._num_written += len(view)
        while len(view):
            view = view[self._file.write(view) :]

    def __enter__(self) -> TensorFile:
        self._file = self._path.open("xb", buffering=0)
        try:
            self.append(self._head)
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                assert self._num_written == self.size_bytes, "the header promises other bytes than came"
                os.fsync(self._file.fileno())
        finally:
            self._file.close()


def num_bytes_of(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return dtype.itemsize * torch.Size(shape).numel()


def bytes_of(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a dense tensor in row-major order, ``CHUNK_BYTES`` at a time; one that is not contiguous is copied
    as a whole, one on a device chunk by chunk."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    for begin in range(0, flat.numel(), CHUNK_BYTES):
        yield memoryview(flat[begin : begin + CHUNK_BYTES].cpu().numpy().data)


def read_header(path: Path) -> Header:
    """The header of the safetensors file ``path``.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no safetensors file, or holds a dtype that is not known here.
    """
    with open(path, "rb") as file:
        (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
        fields = json.loads(file.read(length))
    first = _LENGTH.size + length
    metadata = fields.pop("__metadata__", {})
    try:
        tensors = {
            name: (_DTYPES[entry["dtype"]], tuple(entry["shape"]), first + entry["data_offsets"][0])
            for name, entry in fields.items()
        }
    except KeyError as error:
        raise ValueError(f"{path.name}: {error} is not known") from None
    return Header(tensors, metadata)


def read_box(file: BinaryIO, first: int, shape: Sequence[int], box: Sequence[slice], target: Tensor) -> None:
    """Fill ``target`` with a box of a stored tensor, ``CHUNK_BYTES`` at a time: where whole rows are wanted, from the
    file into its memory.

    Args:
        file: opened without a buffer.
        first: where the tensor begins in it.
        shape: of the stored tensor.
        box: the part that is wanted, a slice for each dimension.
        target: of the box's shape and the stored dtype, on any device.

    Raises:
        OSError: the file cannot be read, or ends before.
    """
    if not target.numel():
        return
    if not shape:
        shape, box, target = (1,), (slice(0, 1),), target.reshape(1)  # a view: there is nothing to copy
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
            num_read = file.readinto(view)  # type: ignore[attr-defined]
            if not num_read:
                raise OSError(errno.EIO, "the file ends before its tensors", file.name)
            view = view[num_read:]
        if not goes_in_place:
            place.copy_(rows[(slice(None), *box[1:])])
