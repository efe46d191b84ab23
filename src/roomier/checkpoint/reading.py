"""Read tensors from the files of a checkpoint: determine the location of each box of a tensor, and the rank that
verifies each file.

[Note: each file once]
The checksum of a file is computed from the bytes that are read into the tensors. If a file is damaged, however, a
tensor that already has values, such as a weight of a model, must not change. Such a tensor is filled only after all
files are verified, so its file is read a second time, usually from the page cache. With several ranks, each file is
verified by the rank that reads most of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from roomier.checkpoint.record import Record, StoredFile, damage, malformed, reading, summed
from roomier.checkpoint.tensor_file import num_bytes_of, read_box, read_header
from roomier.checkpoint.tree import StoredTensor, TensorSpec, leaves
from roomier.core import torch_private
from roomier.core.forms import FormError, count, fields, item_of, list_of, mapping_of
from roomier.core.ranks import Ranks
from roomier.core.sharded import is_sharded, local_part
from roomier.core.untrusted import open_regular, parse_json

_OFFSETS_FORM = mapping_of(fields({"saved_offsets": list_of(count)}))


@dataclass(frozen=True)
class Piece:
    """Box (a rectangular region) of a tensor, and its location in a file.

    Attributes:
        file: name of the file.
        first: offset of the first byte in the file.
        dtype: dtype of the tensor.
        shape: shape of the box.
        offsets: first index of the box in the full tensor, for each dimension.
    """

    file: str
    first: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]


Pieces: TypeAlias = Mapping[str, Sequence[Piece]]
"""Mapping from the name of each tensor to its boxes."""


def find_pieces(folder: Path, record: Record, state: Any) -> tuple[list[StoredFile], Pieces]:
    """Return the files of ``record`` that contain the stored tensors in ``state``, and the boxes that the headers of
    these files describe.

    Raises:
        CheckpointError: a header cannot be read, is malformed, or does not match the record.
    """
    specs = {stored.name: stored.spec for _, stored in leaves(state, StoredTensor)}
    files = [file for file in record.files if not specs.keys().isdisjoint(file.tensors)]
    pieces: dict[str, list[Piece]] = {}
    for file in files:
        with reading(folder, file.name), malformed(folder, file.name):
            header = read_header(folder / file.name)
            offsets_of = parse_json(header.metadata.get("DCP_SHARDING_INFO", "{}"))
            _OFFSETS_FORM(offsets_of, "DCP_SHARDING_INFO")
            if set(header.tensors) != set(file.tensors):
                raise FormError("header", sorted(header.tensors), f"a header of the tensors {sorted(file.tensors)}")
            for name, (dtype, shape, first) in header.tensors.items():
                offsets = tuple(offsets_of[name]["saved_offsets"]) if name in offsets_of else (0,) * len(shape)
                if len(offsets) != len(shape):
                    raise FormError(item_of("DCP_SHARDING_INFO", name), offsets, f"a list of {len(shape)} offsets")
                pieces.setdefault(name, []).append(Piece(file.name, first, dtype, shape, offsets))
    for name, spec in specs.items():
        check_pieces(folder, pieces, name, spec)
    return files, pieces


def check_pieces(folder: Path, pieces: Pieces, name: str, spec: TensorSpec) -> None:
    """Check that the boxes of the tensor ``name`` have the dtype of ``spec`` and fill its shape without overlaps.

    Raises:
        CheckpointError: the dtype or the shape does not match.
    """
    found = pieces.get(name, [])
    if not all(piece.dtype == spec.dtype for piece in found) or not _fill([*found], spec.shape):
        raise damage(folder, f"its files and its record differ in {name!r}, which is {spec} in the record")


def _fill(pieces: list[Piece], shape: tuple[int, ...]) -> bool:
    """Return True if ``pieces`` form a grid of boxes that covers ``shape``, like the shards of a tensor."""
    if not pieces or any(len(piece.shape) != len(shape) for piece in pieces):
        return False
    num_boxes = 1
    for dim, size in enumerate(shape):
        intervals = sorted({(piece.offsets[dim], piece.shape[dim]) for piece in pieces})
        ends = [begin + length for begin, length in intervals]
        if [begin for begin, _ in intervals] != [0, *ends[:-1]] or ends[-1] != size:
            return False
        num_boxes *= len(intervals)
    return num_boxes == len(pieces) == len({piece.offsets for piece in pieces})


@dataclass(frozen=True)
class _BoxRead:
    """Box of a piece, and the tensor that receives it."""

    piece: Piece
    box: tuple[slice, ...]
    target: Tensor

    @property
    def begin(self) -> int:
        row_bytes = num_bytes_of(self.piece.dtype, self.piece.shape[1:])
        return self.piece.first + (self.box[0].start * row_bytes if self.box else 0)


class TensorReader:
    """Reader that fills tensors from the checkpoint ``folder``: first the tensors in ``empty``, then the tensors in
    ``filled``.

    Args:
        folder: checkpoint folder.
        files: all files that contain one of the tensors; the files can differ between ranks.
        pieces: boxes of each tensor.
        empty: tensors without values, with the names under which they are stored. Only this rank's shard of a sharded
            tensor is filled.
        filled: tensors with values, which must not change if a file is damaged.
    """

    def __init__(
        self,
        folder: Path,
        files: Iterable[StoredFile],
        pieces: Pieces,
        empty: Iterable[tuple[str, Tensor]],
        filled: Iterable[tuple[str, Tensor]],
    ) -> None:
        self._folder = folder
        self._files = {file.name: file for file in files}
        self._of_empty = _reads_by_file(pieces, empty)
        self._of_filled = _reads_by_file(pieces, filled)

    def read_empty(self, ranks: Ranks) -> None:
        """Fill the empty tensors and verify all files. Every rank of ``ranks`` must call this method.

        Raises:
            CheckpointError: a file is damaged, or cannot be read.
        """
        verified = self._share(ranks)
        for name in sorted({*self._of_empty, *(file.name for file in verified)}):
            reads = self._of_empty.get(name, [])
            if self._files[name] in verified:
                reads = self._read_summed(self._files[name], reads)
            self._read(name, reads)

    def read_filled(self) -> None:
        """Fill the tensors that have values. Call :meth:`read_empty` first, because it verifies the files.

        Raises:
            CheckpointError: the disk failed; tensors may be partially filled.
        """
        for name, reads in self._of_filled.items():
            self._read(name, reads)

    def _share(self, ranks: Ranks) -> list[StoredFile]:
        """Return the files that this rank verifies. Each file is verified by the rank that reads the most bytes of it.
        If several ranks read equally many bytes, the rank with the least load verifies the file."""
        own = {name: sum(each.target.nbytes for each in self._of_empty.get(name, [])) for name in self._files}
        by_rank = ranks.gather([(file, own[file.name]) for file in self._files.values()])
        wanted = [{file.name: num_bytes for file, num_bytes in of_rank} for of_rank in by_rank]
        load_bytes = [0] * len(wanted)
        share = []
        for file in sorted({file for file, _ in chain(*by_rank)}, key=lambda file: file.name):
            order = [(-wanted[rank].get(file.name, 0), load_bytes[rank], rank) for rank in range(len(wanted))]
            rank = min(order)[-1]
            load_bytes[rank] += file.size_bytes
            if rank == ranks.world.rank:
                share.append(file)
        return share

    def _read_summed(self, file: StoredFile, reads: Sequence[_BoxRead]) -> list[_BoxRead]:
        """Read a file from front to end and verify its checksum. Return the reads that would have to seek backward."""
        left = []
        with summed(self._folder, file) as opened:
            for read in reads:
                if read.begin < opened.position:  # this read belongs to a tied tensor, which is stored once
                    left.append(read)
                    continue
                read_box(opened, read.piece.first, read.piece.shape, read.box, read.target)
        return left

    def _read(self, name: str, reads: Sequence[_BoxRead]) -> None:
        if not reads:
            return
        with reading(self._folder, name), open_regular(self._folder / name) as opened:
            for read in reads:
                read_box(opened, read.piece.first, read.piece.shape, read.box, read.target)


def _reads_by_file(pieces: Pieces, targets: Iterable[tuple[str, Tensor]]) -> dict[str, list[_BoxRead]]:
    reads: dict[str, list[_BoxRead]] = {}
    for name, target in targets:
        own, origin = _own_part(target.detach())
        for piece in pieces[name] if own.numel() else ():
            read = _overlap(piece, own, origin)
            if read is not None:
                reads.setdefault(piece.file, []).append(read)
    return {name: sorted(found, key=lambda read: read.begin) for name, found in sorted(reads.items())}


def _own_part(target: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return the part of ``target`` that is on this rank, and its offsets in the full tensor."""
    own = local_part(target)
    has_offsets = is_sharded(target) and own.numel()
    return own, torch_private.offsets_of_shard(target) if has_offsets else (0,) * own.dim()


def _overlap(piece: Piece, own: Tensor, origin: tuple[int, ...]) -> _BoxRead | None:
    """Return the read of the elements that ``piece`` and ``own`` have in common; None if there are no such elements."""
    box, part = [], []
    for begin, size, own_begin, own_size in zip(piece.offsets, piece.shape, origin, own.shape, strict=True):
        first, last = max(begin, own_begin), min(begin + size, own_begin + own_size)
        if first >= last:
            return None
        box.append(slice(first - begin, last - begin))
        part.append(slice(first - own_begin, last - own_begin))
    return _BoxRead(piece, tuple(box), own[tuple(part)])
