"""Save, load and peek."""

import importlib.metadata
import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roomier.checkpoint import tree
from roomier.checkpoint.commit import committed_folder, standing
from roomier.checkpoint.find import with_alternative
from roomier.checkpoint.record import (
    FORMAT_VERSION,
    DamagedCheckpointError,
    NotACheckpointError,
    Record,
    check_sizes,
    check_sums,
    damage,
    read_record,
    write_record,
)
from roomier.checkpoint.tree import StoredTensor, leaves
from roomier.core.errors import CheckpointError, did_you_mean

_NUM_NAMES_SHOWN = 5


def save(path: str | Path, state: Mapping[str, Any]) -> None:
    """Write ``state`` as the checkpoint folder ``path``, whole or not at all.

    ``state`` is nested dicts, lists and tuples of tensors (of any shape and device), str, int, float, bool and
    None. A checkpoint that stands at ``path`` is replaced; at every moment, also after a kill, the old or the new one
    can be loaded. When this returns, the data is on the disk, not only in the page cache. Parent folders are made.

    Memory beyond ``state`` itself: 256 to 384 MiB, or two to three times the largest tensor if that is more.

    Raises:
        CheckpointError: ``state`` holds something else (nothing was written then), ``path`` is not a
            checkpoint, the disk is full, or the folder cannot be written. Earlier checkpoints are untouched.
    """
    from roomier.checkpoint import store  # DCP takes half a second to import; peek and find_last do without

    _refuse_many_ranks()
    target = Path(os.path.abspath(path))
    tensors, json_tree = tree.split(state)
    with committed_folder(target, num_bytes=sum(tensor.nbytes for tensor in tensors.values())) as folder:
        store.write_tensors(folder, tensors, section_of=_sections(json_tree))
        record = Record(
            format_version=FORMAT_VERSION,
            roomier_version=importlib.metadata.version("roomier"),
            torch_version=str(torch.__version__),
            saved_at_ns=time.time_ns(),
            files=store.stored_files(folder),
            tree=json_tree,
        )
        write_record(folder, record)


def peek(path: str | Path) -> dict[str, Any]:
    """The state of the checkpoint ``path`` with a :class:`TensorSpec` for each tensor; none is read.

    Raises:
        CheckpointError: ``path`` is no checkpoint, or its record is damaged.
    """
    folder = standing(Path(path))
    try:
        skeleton = _skeleton(read_record(folder), None)
    except (DamagedCheckpointError, NotACheckpointError) as error:
        raise with_alternative(error, folder) from None
    state: dict[str, Any] = tree.fill(skeleton, lambda stored: stored.spec)
    return state


def load(
    path: str | Path, into: Mapping[str, Any] | None = None, only: Collection[str] | None = None
) -> dict[str, Any]:
    """The state of the checkpoint ``path``, its tensors filled into ``into`` where they have a place there.

    First everything is verified: the format version, that all files are there with their full size, and the
    checksum of each file that will be read. Then ``into`` is compared, and only then is anything changed.

    Args:
        path: the checkpoint folder.
        into: a nested state like the one that was saved, or a part of it. A tensor in it receives, in place
            and on its own device, the stored tensor of the same path, and is what the result holds there.
            A top-level entry of ``into`` that holds tensors must hold exactly the stored ones, each with
            equal shape and dtype. Other stored tensors are allocated on the CPU. Values that are no tensors
            are ignored.
        only: top-level keys to read; the result holds these alone, and files of other entries are not read.

    Raises:
        CheckpointError: the checkpoint is damaged (it names the file, and the newest good checkpoint beside it), or
            does not fit ``into`` or ``only``. ``into`` is unchanged.
        OSError: the disk failed while tensors were read; ``into`` may be filled in part.
    """
    from roomier.checkpoint import store

    folder = standing(Path(path))
    try:
        record = read_record(folder)
        check_sizes(folder, record)
        skeleton = _skeleton(record, only)
        wanted = {key: into[key] for key in into if only is None or key in only} if into else {}
        targets = _match(folder, skeleton, wanted)
        names = {stored.name for _, stored in leaves(skeleton, StoredTensor)}
        check_sums(folder, [file for file in record.files if not names.isdisjoint(file.tensors)])
        _check_headers(folder, skeleton, store.stored_specs(folder))
    except (DamagedCheckpointError, NotACheckpointError) as error:
        raise with_alternative(error, folder) from None
    for _, stored in leaves(skeleton, StoredTensor):
        if stored.name not in targets:
            targets[stored.name] = torch.empty(stored.spec.shape, dtype=stored.spec.dtype)
    store.read_tensors(folder, targets)
    state: dict[str, Any] = tree.fill(skeleton, lambda stored: targets[stored.name])
    return state


def _skeleton(record: Record, only: Collection[str] | None) -> dict[str, Any]:
    skeleton: dict[str, Any] = tree.join(record.tree)
    if only is None:
        return skeleton
    if isinstance(only, str):
        raise CheckpointError("only", only, "is a string", f"Write only=({only!r},)")
    for key in only:
        if key not in skeleton:
            raise CheckpointError("only", key, "is not in the checkpoint", did_you_mean(key, map(str, skeleton)))
    return {key: value for key, value in skeleton.items() if key in only}


def _sections(json_tree: tree.Json) -> dict[str, Any]:
    """Top-level key of each tensor, by name."""
    return {stored.name: path[0] for path, stored in leaves(tree.join(json_tree), StoredTensor)}


def _match(folder: Path, skeleton: dict[str, Any], into: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of ``into`` by stored name; raises if they are not the stored ones."""
    stored_at: dict[tree.Path, StoredTensor] = dict(leaves(skeleton, StoredTensor))
    wanted: dict[tree.Path, Tensor] = dict(leaves(into, Tensor))
    sections = {path[0] for path in wanted}
    missing = [path for path in wanted if path not in stored_at]
    unexpected = [path for path in stored_at if path[0] in sections and path not in wanted]
    different = [
        f"{tree.show_path(path)} is {stored_at[path].spec} there, {_shown(tensor)} here"
        for path, tensor in wanted.items()
        if path in stored_at and _shown(tensor) != str(stored_at[path].spec)
    ]
    if missing or unexpected or different:
        problem = "belongs to another model: " + "; ".join(
            [
                *_some("missing there", [tree.show_path(path) for path in missing]),
                *_some("only there", [tree.show_path(path) for path in unexpected]),
                *_some("different", different),
            ]
        )
        raise CheckpointError(
            "checkpoint",
            str(folder),
            problem,
            "Give the checkpoint of this model, or build the model it was saved from",
        )
    return {stored_at[path].name: tensor for path, tensor in wanted.items()}


def _shown(tensor: Tensor) -> str:
    # A meta tensor would take any value and keep none.
    return f"{tree.TensorSpec(tuple(tensor.shape), tensor.dtype)}{' on meta' if tensor.is_meta else ''}"


def _some(title: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _NUM_NAMES_SHOWN} more" if len(names) > _NUM_NAMES_SHOWN else ""
    return [f"{title}: {', '.join(names[:_NUM_NAMES_SHOWN])}{more}"]


def _check_headers(folder: Path, skeleton: dict[str, Any], specs: dict[str, tree.TensorSpec]) -> None:
    for path, stored in leaves(skeleton, StoredTensor):
        if specs.get(stored.name) != stored.spec:
            raise damage(folder, f"its files and its record disagree about {tree.show_path(path)}")


def _refuse_many_ranks() -> None:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        num_ranks = torch.distributed.get_world_size()
        if num_ranks > 1:
            raise CheckpointError(
                "world_size", num_ranks, "saving from several ranks is not built yet", "Save from one process"
            )
