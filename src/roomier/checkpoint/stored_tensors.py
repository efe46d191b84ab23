"""Read the tensors of a checkpoint in chunks of a few MiB, even if several files contain parts of a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from roomier.checkpoint.commit import surviving_path
from roomier.checkpoint.find import with_alternative
from roomier.checkpoint.reading import Piece, check_pieces, read_pieces
from roomier.checkpoint.record import (
    DamagedCheckpointError,
    NotACheckpointError,
    check_sizes,
    check_sums,
    read_record,
    read_state,
)
from roomier.checkpoint.tensor_file import CHUNK_BYTES, read_box
from roomier.checkpoint.tree import StoredTensor, TensorSpec, leaves
from roomier.core.errors import CheckpointError
from roomier.core.untrusted import open_regular


class StoredTensors:
    """Tensors of one top-level entry of a checkpoint, which are read in chunks after all required files are verified.

    Args:
        path: checkpoint folder.
        section: top-level entry.

    Attributes:
        specs: shape and dtype of each tensor by key, in the order in which they were saved.
        tied_to: mapping from each additional key of a tied tensor to the first key of the tensor.
        others: keys of the entry whose values are not tensors.

    Raises:
        CheckpointError: the checkpoint is damaged, or does not contain this entry.
    """

    def __init__(self, path: str | Path, section: str) -> None:
        self._folder = surviving_path(Path(path))
        try:
            record = read_record(self._folder)
            check_sizes(self._folder, record)
            entry = read_state(self._folder, record).get(section)
            if not isinstance(entry, dict):
                action = "Pass a checkpoint that Trainer or ModelCheckpoint saved"
                raise CheckpointError("checkpoint", str(self._folder), f"has no entry {section!r}", action)
            names = {stored.name for _, stored in leaves(entry, StoredTensor)}
            files = [file for file in record.files if not names.isdisjoint(file.tensors)]
            self._pieces = read_pieces(self._folder, files)
            for _, stored in leaves(entry, StoredTensor):
                check_pieces(self._folder, self._pieces, stored.name, stored.spec)
            check_sums(self._folder, files)
        except (DamagedCheckpointError, NotACheckpointError) as error:
            raise with_alternative(error, self._folder) from None
        self.specs: dict[str, TensorSpec] = {}
        self.tied_to: dict[str, str] = {}
        self.others = [key for key, value in entry.items() if not isinstance(value, StoredTensor)]
        self._name_of: dict[str, str] = {}
        first_key: dict[str, str] = {}
        for key, stored in entry.items():
            if not isinstance(stored, StoredTensor):
                continue
            self.specs[key], self._name_of[key] = stored.spec, stored.name
            if stored.name in first_key:
                self.tied_to[key] = first_key[stored.name]
            first_key.setdefault(stored.name, key)

    def chunks(self, key: str) -> Iterator[Tensor]:
        """Yield the elements of the tensor ``key`` in row-major order, as 1-D tensors of about ``CHUNK_BYTES``.

        If the tensor was saved unsharded or sharded by rows, only one chunk is in memory at a time. Otherwise, the full
        tensor is in memory.

        Raises:
            OSError: a file cannot be read.
        """
        spec, pieces = self.specs[key], self._pieces[self._name_of[key]]
        if all(piece.shape[1:] == spec.shape[1:] for piece in pieces):
            for piece in sorted(pieces, key=lambda each: each.offsets):
                yield from _rows_of(self._folder / piece.file, piece)
            return
        whole = torch.empty(spec.shape, dtype=spec.dtype)
        for piece in pieces:
            box = tuple(slice(at, at + size) for at, size in zip(piece.offsets, piece.shape, strict=True))
            with open_regular(self._folder / piece.file) as file:
                read_box(file, piece.first, piece.shape, [slice(0, size) for size in piece.shape], whole[box])
        yield from torch.split(whole.reshape(-1), max(1, CHUNK_BYTES // spec.dtype.itemsize))

    def whole(self, key: str) -> Tensor:
        """Return the full tensor ``key``. Raises OSError."""
        return joined(self.chunks(key), self.specs[key])


def joined(chunks: Iterable[Tensor], spec: TensorSpec) -> Tensor:
    """Return a tensor with the shape and dtype of ``spec`` from 1-D chunks of its elements in row-major order.

    The peak memory is twice the size of the tensor.
    """
    pieces = list(chunks)  # this list is empty for a tensor without elements
    return torch.cat(pieces).view(spec.shape) if pieces else torch.empty(spec.shape, dtype=spec.dtype)


def _rows_of(path: Path, piece: Piece) -> Iterator[Tensor]:
    # Read the bytes of consecutive rows as a flat array, regardless of the shape.
    num_elements = torch.Size(piece.shape).numel()
    chunk = max(1, CHUNK_BYTES // piece.dtype.itemsize)
    with open_regular(path) as file:
        for begin in range(0, num_elements, chunk):
            part = torch.empty(min(chunk, num_elements - begin), dtype=piece.dtype)
            read_box(file, piece.first, (num_elements,), [slice(begin, begin + len(part))], part)
            yield part
