"""Save, load and peek."""

import enum
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roomier.checkpoint import tree
from roomier.checkpoint.agree import all_ranks, together
from roomier.checkpoint.commit import absolute, standing
from roomier.checkpoint.find import with_alternative
from roomier.checkpoint.record import (
    DamagedCheckpointError,
    NotACheckpointError,
    Record,
    check_sizes,
    check_sums,
    damage,
    read_record,
)
from roomier.checkpoint.saving import prepare, write
from roomier.checkpoint.tree import StoredTensor, leaves
from roomier.core.errors import CheckpointError, did_you_mean
from roomier.core.ranks import Ranks

_NUM_NAMES_SHOWN = 5


class Unread(enum.Enum):
    """What stands in ``load(into=...)`` for a tensor that is not to be read."""

    UNREAD = "UNREAD"


UNREAD = Unread.UNREAD


def save(path: str | Path, state: Mapping[str, Any], ranks: Ranks | None = None) -> None:
    """Write ``state`` as the checkpoint folder ``path``, whole or not at all.

    ``state`` is nested dicts, lists and tuples of tensors (of any shape and device), str, int, float, bool and
    None. A checkpoint that stands at ``path`` is replaced; at every moment, also after a kill, the old or the new one
    can be loaded. When this returns, the data is on the disk, not only in the page cache. Parent folders are made.

    With several ranks every rank calls this, and ``path`` is on a file system they share. Each writes its part of the
    tensors that are cut (DTensors); all else is that of rank 0.

    Memory beyond ``state`` itself: a tensor that is not contiguous, or 4 MiB of one on a device.

    Args:
        ranks: that save together; None takes those of torch's process group, or this process alone.

    Raises:
        CheckpointError: ``state`` holds something else (nothing was written then), ``path`` is not a
            checkpoint, the disk is full, or the folder cannot be written. With several ranks it is raised on all of
            them, whichever failed. Earlier checkpoints are untouched.
    """
    ranks = all_ranks() if ranks is None else ranks
    write(prepare(absolute(path), state, ranks), ranks)


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
    path: str | Path,
    into: Mapping[str, Any] | None = None,
    only: Collection[str] | None = None,
    ranks: Ranks | None = None,
) -> dict[str, Any]:
    """The state of the checkpoint ``path``, its tensors filled into ``into`` where they have a place there.

    First everything is verified: the format version, that all files are there with their full size, and the
    checksum of each file that will be read. Then ``into`` is compared, and only then is anything changed.

    Neither the number of ranks nor the way tensors were cut has to be that of the save: a DTensor in ``into`` receives
    its own part, which alone is read, any other tensor the whole.

    Args:
        path: the checkpoint folder.
        into: a nested state like the one that was saved, or a part of it. A tensor in it receives, in place
            and on its own device, the stored tensor of the same path, and is what the result holds there.
            A top-level entry of ``into`` that holds tensors must hold exactly the stored ones, each with
            equal shape and dtype, or :data:`UNREAD` for one that is not wanted: the result has None there. Other stored
            tensors are allocated on the CPU. Values that are no tensors are ignored.
        only: top-level keys to read; the result holds these alone, and files of other entries are not read.
        ranks: that load together, which shares the work of verifying; each of them calls this, and what fails on one
            fails on all. None loads on this process alone, whatever others do.

    Raises:
        CheckpointError: the checkpoint is damaged (it names the file, and the newest good checkpoint beside it), or
            does not fit ``into`` or ``only``. ``into`` is unchanged.
        OSError: the disk failed while tensors were read; ``into`` may be filled in part. (A CheckpointError where
            several ranks load.)
    """
    from roomier.checkpoint import store  # DCP takes half a second to import; peek and find_last do without

    ranks = Ranks() if ranks is None else ranks
    folder = standing(Path(path))
    targets: dict[tree.Path, Tensor] = {}
    skeleton: dict[str, Any] = {}

    def check() -> None:
        record = read_record(folder)
        check_sizes(folder, record)
        skeleton.update(_without_unread(_skeleton(record, only), into or {}))
        wanted = {key: into[key] for key in into if only is None or key in only} if into else {}
        targets.update(_match(folder, skeleton, wanted))
        names = {stored.name for _, stored in leaves(skeleton, StoredTensor)}
        needed = [file for file in record.files if not names.isdisjoint(file.tensors)]
        check_sums(folder, needed[ranks.world.rank :: ranks.world.size])
        _check_headers(folder, skeleton, store.stored_specs(folder))

    try:
        together(ranks, check)
    except (DamagedCheckpointError, NotACheckpointError) as error:
        # The others are read to be offered: once, not by every rank.
        raise ranks.from_zero(with_alternative(error, folder) if ranks.is_zero else error) from None

    def read() -> None:
        for path, stored in leaves(skeleton, StoredTensor):
            if path not in targets:
                targets[path] = torch.empty(stored.spec.shape, dtype=stored.spec.dtype)
        for batch in _by_name(skeleton, targets):
            store.read_tensors(folder, batch)

    together(ranks, read)
    state: dict[str, Any] = tree.fill_by_path(skeleton, targets)
    return state


def _without_unread(node: Any, into: Any) -> Any:
    """``node`` with None for each stored tensor that is :data:`UNREAD` in ``into``."""
    if isinstance(node, StoredTensor) and into is UNREAD:
        return None
    if isinstance(node, dict) and isinstance(into, Mapping):
        return {key: _without_unread(item, into.get(key)) for key, item in node.items()}
    if isinstance(node, (list, tuple)) and isinstance(into, (list, tuple)) and len(node) == len(into):
        return type(node)(_without_unread(item, other) for item, other in zip(node, into, strict=True))
    return node


def _by_name(skeleton: dict[str, Any], targets: Mapping[tree.Path, Tensor]) -> list[dict[str, Tensor]]:
    """The targets by stored name; those of tied tensors, which have one name, in a batch for each."""
    batches: list[dict[str, Tensor]] = []
    for path, stored in leaves(skeleton, StoredTensor):
        batch = next((each for each in batches if stored.name not in each), None)
        if batch is None:
            batches.append(batch := {})
        batch[stored.name] = targets[path]
    return batches


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


def _match(folder: Path, skeleton: dict[str, Any], into: Mapping[str, Any]) -> dict[tree.Path, Tensor]:
    """The tensors of ``into`` by their path; raises if they are not the stored ones."""
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
    return wanted


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
