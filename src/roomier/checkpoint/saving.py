"""How several ranks write one checkpoint: what each of them does, and where they wait for each other.

[Note: all ranks or none]
Rank 0 makes the folder beside the target and tells its path; every rank writes its files into it and flushes them;
their names and checksums are gathered; rank 0 writes the record and renames. After each of these steps all ranks know
whether it was done everywhere. If not, rank 0 removes what is there, and all raise the same error. If a rank dies, the
others learn it from the broken connection, and nothing was renamed.
"""

import importlib.metadata
import time
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roomier.checkpoint import store, tree
from roomier.checkpoint.agree import together
from roomier.checkpoint.commit import committed_folder, disk_errors, sync_folder
from roomier.checkpoint.find import next_commit_number
from roomier.checkpoint.parts import Part, is_cut, parts_to_write
from roomier.checkpoint.record import FORMAT_VERSION, Record, StoredFile, write_record
from roomier.checkpoint.tree import StoredTensor, leaves
from roomier.core.errors import CheckpointError
from roomier.core.ranks import Ranks


@dataclass(frozen=True)
class Prepared:
    """A state taken apart for its checkpoint.

    Attributes:
        target: the folder that it becomes.
        json_tree: all that is not a tensor.
        parts: what this rank writes.
        section_of: top-level key of each tensor, by name.
        num_cut_elements: of each tensor that is cut among ranks, as a whole, by name.
    """

    target: Path
    json_tree: tree.Json
    parts: list[Part]
    section_of: dict[str, Any]
    num_cut_elements: dict[str, int]

    @property
    def num_bytes(self) -> int:
        """What this rank writes."""
        return sum(part.tensor.nbytes for part in self.parts)


def prepare(target: Path, state: Mapping[str, Any], ranks: Ranks) -> Prepared:
    """Take ``state`` apart, on every rank; no tensor is copied.

    Raises:
        CheckpointError: it cannot be stored, or the ranks cut other tensors.
    """
    prepared: list[Prepared] = []

    def take_apart() -> int:
        tensors, json_tree = tree.split(state)
        parts = parts_to_write(tensors, writes_whole=ranks.is_zero)
        num_cut = {name: tensor.numel() for name, tensor in tensors.items() if is_cut(tensor)}
        prepared.append(Prepared(target, json_tree, parts, _sections(json_tree), num_cut))
        cut = [(path, tuple(each.shape), each.dtype) for path, each in leaves(state, Tensor) if is_cut(each)]
        return zlib.crc32(repr(cut).encode("utf-8", "backslashreplace"))

    sums = together(ranks, take_apart)
    if len(set(sums)) > 1:
        others = [rank for rank, each in enumerate(sums) if each != sums[0]]
        raise CheckpointError(
            "state",
            sorted(map(str, state)),
            f"the tensors that are cut among ranks have other names or shapes on rank {others[0]} than on rank 0",
            "Give every rank the state of the same model and optimizers",
        )
    return prepared[0]


def write(prepared: Prepared, ranks: Ranks) -> None:
    """Write what :func:`prepare` gave, on every rank, and commit it.

    Raises:
        CheckpointError: it could not be written on one of the ranks; raised on all.
    """
    target, num_bytes = prepared.target, prepared.num_bytes
    with ExitStack() as until_committed:

        def make_folder() -> Path | None:
            return until_committed.enter_context(committed_folder(target, num_bytes)) if ranks.is_zero else None

        folder = together(ranks, make_folder)[0]
        assert folder is not None

        def write_own() -> tuple[list[StoredFile], dict[str, int]]:
            _check_shared(folder, target)
            with disk_errors(target, num_bytes, folder):
                files = store.write_parts(folder, prepared.parts, prepared.section_of, ranks.world.rank)
                sync_folder(folder)
            return files, {part.name: part.tensor.numel() for part in prepared.parts if part.is_cut}

        written = together(ranks, write_own)

        def commit() -> None:
            if not ranks.is_zero:
                return
            _check_whole(prepared, [num_elements for _, num_elements in written])
            with disk_errors(target, num_bytes, folder):
                write_record(folder, _record(prepared, [file for files, _ in written for file in files]))
            until_committed.close()

        together(ranks, commit)


def _sections(json_tree: tree.Json) -> dict[str, Any]:
    sections: dict[str, Any] = {}
    for path, stored in leaves(tree.join(json_tree), StoredTensor):
        sections.setdefault(stored.name, path[0])
    return sections


def _record(prepared: Prepared, files: list[StoredFile]) -> Record:
    return Record(
        format_version=FORMAT_VERSION,
        commit_number=next_commit_number(prepared.target),
        roomier_version=importlib.metadata.version("roomier"),
        torch_version=str(torch.__version__),
        saved_at_ns=time.time_ns(),
        files=tuple(sorted(files, key=lambda file: file.name)),
        tree=prepared.json_tree,
    )


def _check_shared(folder: Path, target: Path) -> None:
    if not folder.is_dir():
        raise CheckpointError(
            "path",
            str(target),
            "is not on a file system that all ranks share: what rank 0 made there is not to be seen here",
            "Choose a folder on shared storage",
        )


def _check_whole(prepared: Prepared, num_elements: Sequence[Mapping[str, int]]) -> None:
    written: Counter[str] = Counter()
    for of_rank in num_elements:
        written.update(of_rank)
    for name, num_all in prepared.num_cut_elements.items():
        if written[name] == num_all:
            continue
        raise CheckpointError(
            "state",
            f"{written[name]} of {num_all} elements of {name}",
            "the ranks that save hold only a part of the tensors that are cut",
            "Call save on every rank of the process group",
        )
