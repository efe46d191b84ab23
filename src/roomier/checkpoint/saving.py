"""Save one checkpoint on several ranks: the work of each rank, and the points at which ranks wait for each other.

[Note: all ranks or none]
Rank 0 creates a folder next to the target and broadcasts its path. Every rank writes its files into the folder and
flushes them, and all ranks gather the names and checksums of the files. Then rank 0 writes the record and renames the
folder. After each of these steps, the ranks report to each other whether it succeeded. If it failed on any rank, rank 0
removes the folder, and all ranks raise the same error. If a rank dies, the others detect the broken connection and do
not rename the folder.

[Note: the files]
Each rank writes its own files, ``shard-<rank>-model-<file>-of-<files>.safetensors``, in the layout of the
``HuggingFaceStorageWriter`` of torch.distributed.checkpoint (DCP): boxes of tensors under the names of the full
tensors, and the offsets of each box in the header. ``reading.py``, and DCP's reader in other programs, can assemble
these boxes for any other sharding layout. DCP's reader is not used, because it does not check the headers. DCP's writer
is not used, because it stores the bytes of each file in memory twice, communicates with the other ranks in additional
calls, and does not compute checksums. This module instead writes the bytes directly to the file. In addition to the
state, saving requires memory for a copy of one non-contiguous tensor, or for 4 MiB of a tensor on a device.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import shutil
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from roomier.checkpoint import tree
from roomier.checkpoint.agree import together
from roomier.checkpoint.commit import committed_folder, disk_errors, sync_folder
from roomier.checkpoint.find import next_commit_number
from roomier.checkpoint.record import (
    FORMAT_VERSION,
    README_NAME,
    README_START,
    TENSOR_SUFFIX,
    Record,
    StoredFile,
    write_record,
)
from roomier.checkpoint.snapshots import copy_to_next_node
from roomier.checkpoint.tensor_file import TensorFile, bytes_of
from roomier.checkpoint.tree import StoredTensor, leaves
from roomier.core import torch_private
from roomier.core.errors import CheckpointError
from roomier.core.ranks import Ranks
from roomier.core.sharded import is_sharded

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

T = TypeVar("T")

README = (
    f"{README_START}\n"
    + """
Load the model:              roomier.checkpoint.load_module(ModelClass, "{name}")
Resume the run:              trainer.fit(model, ckpt_path="{name}")

Lightning's load_from_checkpoint reads this folder if `from roomier import Trainer` follows the import of Lightning.
torch.load and processes without roomier read files. In these cases, convert this folder to a file:

    roomier export {name} {name}.ckpt --to lightning

ModelCheckpoint(format="lightning") writes such files instead of folders.
"""
)


@dataclass(frozen=True)
class Prepared:
    """State that is ready to be written.

    Attributes:
        target: path of the checkpoint folder.
        json_tree: all values that are not tensors.
        parts: parts of tensors that this rank writes.
        section_of: mapping from the name of each tensor to its top-level key.
        num_cut_elements: mapping from the name of each sharded tensor to its number of elements, summed over all ranks.
        is_of_run: True if a Trainer wrote the state.
        num_bytes: size of the data that all ranks write.
        memory: folder of this node in memory to which a snapshot is written instead of ``target``; None for a
            checkpoint. See [Note: snapshots] in ``snapshots.py``.
    """

    target: Path
    json_tree: tree.Json
    parts: list[TensorBox]
    section_of: dict[str, Any]
    num_cut_elements: dict[str, int]
    is_of_run: bool
    num_bytes: int = 0
    memory: Path | None = None


def prepare(target: Path, state: Mapping[str, Any], ranks: Ranks) -> Prepared:
    """Split ``state`` into tensors and other values, on every rank. No tensor is copied.

    Raises:
        CheckpointError: the state cannot be saved, or the ranks have different sharded tensors.
    """
    prepared: list[Prepared] = []

    def take_apart() -> tuple[int, int]:
        tensors, json_tree = tree.split(state)
        parts = parts_to_write(tensors, writes_whole=ranks.is_zero)
        num_cut = {name: tensor.numel() for name, tensor in tensors.items() if is_sharded(tensor)}
        is_of_run = {"module", "progress"} <= state.keys()
        prepared.append(Prepared(target, json_tree, parts, _sections(json_tree), num_cut, is_of_run))
        cut = [(path, tuple(each.shape), each.dtype) for path, each in leaves(state, Tensor) if is_sharded(each)]
        num_bytes = sum(part.tensor.nbytes for part in parts)
        return zlib.crc32(repr(cut).encode("utf-8", "backslashreplace")), num_bytes

    sums, num_bytes = zip(*together(ranks, take_apart), strict=True)
    if len(set(sums)) > 1:
        others = [rank for rank, each in enumerate(sums) if each != sums[0]]
        problem = f"the sharded tensors have different names or shapes on rank {others[0]} than on rank 0"
        action = "Pass the state of the same model and optimizers on every rank"
        raise CheckpointError("state", sorted(map(str, state)), problem, action)
    return replace(prepared[0], num_bytes=sum(num_bytes))


def write(prepared: Prepared, ranks: Ranks) -> None:
    """Write the result of :func:`prepare` on every rank and commit it.

    Raises:
        CheckpointError: writing failed on one of the ranks. All ranks raise the same error.
    """
    memory, num_bytes, start_s = prepared.memory, prepared.num_bytes, time.monotonic()
    target = prepared.target if memory is None else memory / prepared.target.name
    is_leader = ranks.is_zero if memory is None else ranks.world.local_rank == 0
    nodes = [0] * ranks.world.size if memory is None else ranks.gather(ranks.world.node_rank)
    with ExitStack() as until_committed:

        def make_folder() -> Path | None:
            return until_committed.enter_context(committed_folder(target, num_bytes)) if is_leader else None

        folder = together(ranks, make_folder)[nodes.index(nodes[ranks.world.rank])]
        assert folder is not None

        def write_own() -> tuple[list[StoredFile], dict[str, int]]:
            if not folder.is_dir():
                problem = "is not on a shared file system. The folder that rank 0 created does not exist for this rank"
                raise CheckpointError("path", str(target), problem, "Choose a folder on shared storage")
            with disk_errors(target, num_bytes, folder):
                files = write_parts(folder, prepared.parts, prepared.section_of, ranks.world.rank)
                sync_folder(folder)
            return files, {part.name: part.tensor.numel() for part in prepared.parts if part.is_sharded}

        written = together(ranks, write_own)
        if memory is not None:
            copy_to_next_node(folder, [files for files, _ in written], nodes, ranks)
        number, saved_at_ns = ranks.on_zero(lambda: (next_commit_number(prepared.target), time.time_ns()))

        def commit() -> None:
            if not is_leader:
                return
            _check_whole(prepared, [num_elements for _, num_elements in written])
            with disk_errors(target, num_bytes, folder):
                if prepared.is_of_run:
                    (folder / README_NAME).write_text(README.format(name=target.name), encoding="utf-8")
                files = tuple(sorted((file for files, _ in written for file in files), key=lambda file: file.name))
                record = Record(
                    format_version=FORMAT_VERSION,
                    commit_number=number,
                    roomier_version=importlib.metadata.version("roomier"),
                    torch_version=str(torch.__version__),
                    saved_at_ns=saved_at_ns,
                    files=files,
                    tree=prepared.json_tree,
                    write_ms=round(1000 * (time.monotonic() - start_s)),
                )
                write_record(folder, record)
            until_committed.close()

        together(ranks, commit)
    if memory is not None and is_leader:
        for path in memory.glob("[!.]*"):  # all nodes have the new snapshot
            if path != target:
                shutil.rmtree(path, ignore_errors=True)


def _sections(json_tree: tree.Json) -> dict[str, Any]:
    stored = reversed(list(leaves(tree.join(json_tree), StoredTensor)))  # a tied tensor belongs to its first section
    return {each.name: path[0] for path, each in stored}


def _check_whole(prepared: Prepared, num_elements: Sequence[Mapping[str, int]]) -> None:
    written: Counter[str] = Counter()
    for of_rank in num_elements:
        written.update(of_rank)
    for name, num_all in prepared.num_cut_elements.items():
        if written[name] == num_all:
            continue
        problem = "the ranks that save have only some shards of the sharded tensors"
        action = "Call save on every rank of the process group"
        raise CheckpointError("state", f"{written[name]} of {num_all} elements of {name}", problem, action)


_FILE_BYTES = 128 * 2**20


def write_parts(folder: Path, parts: Sequence[TensorBox], section_of: Mapping[str, Any], rank: int) -> list[StoredFile]:
    """Write ``parts`` to files of this rank in ``folder`` and flush the files to the disk.

    Parts of different sections (top-level keys of the state) are never in the same file.

    Args:
        folder: folder of the checkpoint that is being written.
        parts: parts of tensors that this rank writes.
        section_of: mapping from the name of each tensor to its top-level key.
        rank: rank of this process.

    Raises:
        OSError: a file cannot be written, for example because the disk is full.
    """
    groups = file_groups(parts, lambda part: part.tensor.nbytes, _FILE_BYTES, lambda part: section_of[part.name])
    return [
        _write_file(folder / f"shard-{rank + 1:05}-model-{index:05}-of-{len(groups):05}{TENSOR_SUFFIX}", group)
        for index, group in enumerate(groups, start=1)
    ]


def _write_file(path: Path, parts: Sequence[TensorBox]) -> StoredFile:
    by_name = {part.name: part for part in parts}
    metadata = {
        "DCP_SHARDING_INFO": json.dumps({part.name: {"saved_offsets": part.offsets} for part in parts}),
        "DCP_VERSION": "1.0",
        "format": "pt",
    }
    specs = {part.name: (part.tensor.dtype, tuple(part.tensor.shape)) for part in parts}
    file = TensorFile(specs, metadata)
    file.write(path, lambda name: bytes_of(by_name[name].tensor))
    return StoredFile(path.name, file.size_bytes, file.crc32, tuple(file.names))


def file_groups(
    parts: Sequence[T], num_bytes_of: Callable[[T], int], most_bytes: int, section_of: Callable[[T], Any]
) -> list[list[T]]:
    """Group ``parts`` by file. A new file is started for each section, and if a part does not fit into the file."""
    groups: list[list[T]] = []
    held_bytes, section = 0, object()
    for part in parts:
        if section_of(part) != section or held_bytes + num_bytes_of(part) > most_bytes:
            groups.append([])
            held_bytes, section = 0, section_of(part)
        groups[-1].append(part)
        held_bytes += num_bytes_of(part)
    return groups


@dataclass(frozen=True)
class TensorBox:
    """Box (a rectangular region) of a tensor on this rank.

    Attributes:
        name: name of the full tensor.
        offsets: first index of the box in the full tensor, for each dimension.
        tensor: the box.
        is_sharded: True if the full tensor is sharded across ranks.
    """

    name: str
    offsets: tuple[int, ...]
    tensor: Tensor
    is_sharded: bool = False


def parts_to_write(tensors: Mapping[str, Tensor], *, writes_whole: bool) -> list[TensorBox]:
    """Return the parts of ``tensors`` that this rank writes. No tensor is copied.

    Each rank writes its shard of a sharded tensor. If several ranks have the same shard (HSDP), these ranks take turns:
    each rank writes the shards of different tensors. Empty shards are skipped.

    Args:
        tensors: mapping from names to the tensors of a state.
        writes_whole: True if this rank writes the tensors that are not sharded.
    """
    found, turn = [], 0
    for name, tensor in tensors.items():
        if not is_sharded(tensor):
            if writes_whole:
                found.append(TensorBox(name, (0,) * tensor.dim(), tensor))
            continue
        turn += 1  # Count sharded tensors only, because only these tensors are the same on all ranks.
        if not tensor.numel():  # no rank has a shard with elements
            if writes_whole:
                found.append(TensorBox(name, (0,) * tensor.dim(), torch.empty(tensor.shape, dtype=tensor.dtype)))
        elif _is_mine(tensor, turn) and tensor.to_local().numel():
            found.append(TensorBox(name, torch_private.offsets_of_shard(tensor), tensor.to_local(), is_sharded=True))
    return found


def _is_mine(tensor: DTensor, turn: int) -> bool:
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return False
    sizes = mesh.shape
    copies = [dim for dim, placement in enumerate(tensor.placements) if placement.is_replicate()]
    writer = turn % math.prod(sizes[dim] for dim in copies)
    for dim in copies:
        writer, at = divmod(writer, sizes[dim])
        if coordinate[dim] != at:
            return False
    return True
