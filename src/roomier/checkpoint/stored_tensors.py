"""The tensors of a checkpoint, read a few MiB at a time, whatever the number of files each is spread over."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roomier.checkpoint import tree
from roomier.checkpoint.commit import standing
from roomier.checkpoint.find import with_alternative
from roomier.checkpoint.record import (
    DamagedCheckpointError,
    NotACheckpointError,
    check_sizes,
    check_sums,
    damage,
    read_record,
)
from roomier.checkpoint.tensor_file import CHUNK_BYTES, read_box, read_header
from roomier.checkpoint.tree import StoredTensor, TensorSpec, leaves
from roomier.core.errors import CheckpointError


@dataclass(frozen=True)
class _Piece:
    """A box of a tensor in a file."""

    path: Path
    first: int
    shape: tuple[int, ...]
    offsets: tuple[int, ...]


class StoredTensors:
    """The tensors in the top-level entry ``section`` of the checkpoint ``path``; none of them is held in memory.

    Raises:
        CheckpointError: damaged, or without such an entry. All files that will be read are verified first.

    Attributes:
        specs: by key, in the order they were saved.
        tied_to: key -> the first key of the same tensor, where one stands under several.
        others: keys of the entry that hold no tensor.
    """

    def __init__(self, path: str | Path, section: str) -> None:
        self._folder = standing(Path(path))
        try:
            record = read_record(self._folder)
            check_sizes(self._folder, record)
            entry = tree.join(record.tree).get(section)
            if not isinstance(entry, dict):
                action = "Give a checkpoint that Trainer or ModelCheckpoint saved"
                raise CheckpointError("checkpoint", str(self._folder), f"has no entry {section!r}", action)
            names = {stored.name for _, stored in leaves(entry, StoredTensor)}
            files = [file for file in record.files if not names.isdisjoint(file.tensors)]
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
        self._pieces = _pieces_in([self._folder / file.name for file in files])

    def chunks(self, key: str) -> Iterator[Tensor]:
        """The elements of a tensor in row-major order, some ``CHUNK_BYTES`` at a time, each flat. Where it was cut into
        rows, no more than that is in memory; else, it is as a whole.

        Raises:
            OSError: a file cannot be read.
        """
        spec, pieces = self.specs[key], self._pieces.get(self._name_of[key], [])
        num_elements = sum(torch.Size(piece.shape).numel() for piece in pieces)
        if num_elements != torch.Size(spec.shape).numel():
            raise damage(self._folder, f"its files do not hold all of {key!r}")
        if all(piece.shape[1:] == spec.shape[1:] for piece in pieces):
            for piece in sorted(pieces, key=lambda each: each.offsets):
                yield from _rows_of(piece, spec.dtype)
            return
        whole = torch.empty(spec.shape, dtype=spec.dtype)
        for piece in pieces:
            box = tuple(slice(at, at + size) for at, size in zip(piece.offsets, piece.shape, strict=True))
            with open(piece.path, "rb", buffering=0) as file:
                read_box(file, piece.first, piece.shape, [slice(0, size) for size in piece.shape], whole[box])
        yield from torch.split(whole.reshape(-1), max(1, CHUNK_BYTES // spec.dtype.itemsize))

    def whole(self, key: str) -> Tensor:
        """All of a tensor, in memory. Raises OSError."""
        return joined(self.chunks(key), self.specs[key])


def joined(chunks: Iterable[Tensor], spec: TensorSpec) -> Tensor:
    """The tensor of ``spec`` from its elements in row-major order, in flat pieces; in twice its memory at most."""
    pieces = list(chunks)  # none of a tensor without elements
    return torch.cat(pieces).view(spec.shape) if pieces else torch.empty(spec.shape, dtype=spec.dtype)


def _rows_of(piece: _Piece, dtype: torch.dtype) -> Iterator[Tensor]:
    # As the bytes of rows that follow each other, whatever the shape.
    num_elements = torch.Size(piece.shape).numel()
    chunk = max(1, CHUNK_BYTES // dtype.itemsize)
    with open(piece.path, "rb", buffering=0) as file:
        for begin in range(0, num_elements, chunk):
            part = torch.empty(min(chunk, num_elements - begin), dtype=dtype)
            read_box(file, piece.first, (num_elements,), [slice(begin, begin + len(part))], part)
            yield part


def _pieces_in(paths: list[Path]) -> dict[str, list[_Piece]]:
    pieces: dict[str, list[_Piece]] = {}
    for path in paths:
        header = read_header(path)
        cut: dict[str, Any] = json.loads(header.metadata.get("DCP_SHARDING_INFO", "{}"))
        for name, (_, shape, first) in header.tensors.items():
            offsets = tuple(cut[name]["saved_offsets"]) if name in cut else (0,) * len(shape)
            pieces.setdefault(name, []).append(_Piece(path, first, shape, offsets))
    return pieces
