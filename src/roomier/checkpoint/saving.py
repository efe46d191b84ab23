"""Save one checkpoint on several ranks: the work of each rank, and the points at which ranks wait for each other.

[Note: all ranks or none]
Rank 0 creates a folder next to the target and broadcasts its path. Every rank writes its files into the folder and
flushes them. All ranks gather the names and checksums of the files. Rank 0 writes the record and renames the folder.
After each of these steps, all ranks report to each other whether the step succeeded. If the step failed on any rank,
rank 0 removes the folder, and all ranks raise the same error. If a rank dies, the other ranks detect the broken
connection and do not rename the folder.
"""

import importlib.metadata
import time
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roomier.checkpoint import store, tree
from roomier.checkpoint.agree import together
from roomier.checkpoint.boxes import TensorBox, is_sharded, parts_to_write
from roomier.checkpoint.commit import committed_folder, disk_errors, sync_folder
from roomier.checkpoint.find import next_commit_number
from roomier.checkpoint.record import FORMAT_VERSION, README_NAME, README_START, Record, StoredFile, write_record
from roomier.checkpoint.tree import StoredTensor, leaves
from roomier.core.errors import CheckpointError
from roomier.core.ranks import Ranks

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
    """

    target: Path
    json_tree: tree.Json
    parts: list[TensorBox]
    section_of: dict[str, Any]
    num_cut_elements: dict[str, int]
    is_of_run: bool
    num_bytes: int = 0


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
            return files, {part.name: part.tensor.numel() for part in prepared.parts if part.is_sharded}

        written = together(ranks, write_own)

        def commit() -> None:
            if not ranks.is_zero:
                return
            _check_whole(prepared, [num_elements for _, num_elements in written])
            with disk_errors(target, num_bytes, folder):
                if prepared.is_of_run:
                    (folder / README_NAME).write_text(README.format(name=target.name), encoding="utf-8")
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
        problem = "is not on a shared file system. The folder that rank 0 created does not exist for this rank"
        raise CheckpointError("path", str(target), problem, "Choose a folder on shared storage")


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
