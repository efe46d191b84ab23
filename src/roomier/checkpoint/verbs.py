"""Functions that save, load and inspect a checkpoint."""

import enum
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roomier.checkpoint import tree
from roomier.checkpoint.agree import all_ranks, together
from roomier.checkpoint.commit import absolute, surviving_path
from roomier.checkpoint.find import naming_alternative
from roomier.checkpoint.reading import TensorReader, find_pieces
from roomier.checkpoint.record import Record, check_sizes, read_record, read_state
from roomier.checkpoint.saving import prepare, write
from roomier.checkpoint.tree import StoredTensor, leaves
from roomier.core.errors import CheckpointError, did_you_mean, first_few
from roomier.core.ranks import Ranks


class Unread(enum.Enum):
    """Marker in ``load(into=...)`` for a tensor that is not read."""

    UNREAD = "UNREAD"


UNREAD = Unread.UNREAD


def save(path: str | Path, state: Mapping[str, Any], ranks: Ranks | None = None) -> None:
    """Write ``state`` as the checkpoint folder ``path``, atomically.

    An existing checkpoint at ``path`` is replaced. At every moment, even if the process is killed, either the old or
    the new checkpoint can be loaded. When this function returns, the data is on the disk, not only in the page cache.

    With several ranks, every rank must call this function, and ``path`` must be on a shared file system. Each rank
    writes its shards of DTensors, and rank 0 writes all other values.

    In addition to ``state``, saving requires memory for a copy of one non-contiguous tensor, or for 4 MiB of a tensor
    on a device.

    Args:
        path: checkpoint folder. Missing parent folders are created.
        state: nested dicts, lists and tuples of tensors (of any shape, on any device), str, int, float, bool and None.
        ranks: ranks that save together. None means the ranks of the default process group, or only this process if
            there is no process group.

    Raises:
        CheckpointError: ``state`` contains an unsupported type, ``path`` exists and is not a checkpoint, the disk is
            full, or the folder is not writable. If a type is unsupported, no file is written. An error on one rank is
            raised on all ranks. Existing checkpoints are unchanged.

    Example:
        >>> roomier.checkpoint.save("checkpoints/step-100", {"model": model.state_dict(), "step": 100})
        >>> state = roomier.checkpoint.load("checkpoints/step-100")
    """
    ranks = all_ranks() if ranks is None else ranks
    write(prepare(absolute(path), state, ranks), ranks)


def peek(path: str | Path, *, check_files: bool = False) -> dict[str, Any]:
    """Return the state of the checkpoint ``path`` with a :class:`TensorSpec` for each tensor. No tensor is read.

    Args:
        path: checkpoint folder.
        check_files: if True, also check that every file exists and has its full size.

    Raises:
        CheckpointError: ``path`` is not a checkpoint, or is damaged.
    """
    folder = surviving_path(path)
    with naming_alternative(folder):
        record = read_record(folder)
        if check_files:
            check_sizes(folder, record)
        state: dict[str, Any] = tree.fill(read_state(folder, record), lambda _, stored: stored.spec)
    return state


def load(
    path: str | Path,
    into: Mapping[str, Any] | None = None,
    only: Collection[str] | None = None,
    ranks: Ranks | None = None,
    *,
    empty: Collection[str] = (),
    check: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Return the state of the checkpoint ``path`` and fill the tensors of ``into`` in place.

    Before a tensor of ``into`` changes, the function verifies the record, the size of every file, the checksum of each
    file that is read, and the names, shapes and dtypes of the tensors in ``into``.

    The number of ranks and the sharding of tensors can differ between saving and loading. For a DTensor in ``into``,
    only the shard of this rank is read. Any other tensor is read completely.

    Args:
        path: checkpoint folder.
        into: nested state with the structure of the saved state, or of a part of the saved state. Each tensor in
            ``into`` is filled in place, on its device, with the stored tensor that has the same path. A top-level entry
            of ``into`` that contains tensors must contain exactly the stored tensors, each with equal shape and dtype.
            To skip a tensor, replace it in ``into`` with :data:`UNREAD`. The result then contains None for this tensor.
            Other stored tensors are allocated on the CPU. Values in ``into`` that are not tensors are ignored.
        only: top-level keys to read. The result contains only these entries, and the files of other entries are not
            read.
        ranks: ranks that load together and share the verification. Each of these ranks must call this function, and an
            error on one rank is raised on all ranks. If None, only this process loads the checkpoint.
        empty: top-level keys of ``into`` whose tensors have no values yet. The files of these tensors are read only
            once, but the tensors can be partially filled if a file is damaged.
        check: function that ``load`` calls with the state before it fills the tensors of ``into`` that have values. If
            the function raises an error, ``load`` raises the same error, and ``into`` is unchanged, except for the
            entries in ``empty``.

    Raises:
        CheckpointError: the checkpoint is damaged (the error names the file, and the newest valid checkpoint next to
            it), or does not match ``into`` or ``only``. ``into`` is unchanged, except for the entries in ``empty``. If
            the disk fails after the verification, ``into`` can be partially filled.

    Example:
        >>> state = load("checkpoints/step-100", only=["model"])
        >>> load("checkpoints/step-100", into={"model": model.state_dict()})  # fills the tensors of the model in place
    """
    ranks = Ranks() if ranks is None else ranks
    folder = surviving_path(path)
    skeleton: dict[str, Any] = {}
    state: dict[str, Any] = {}

    def prepare_reader() -> TensorReader:
        record = read_record(folder)
        check_sizes(folder, record)
        unread = {path for path, _ in leaves(into or {}, Unread)}
        stored_state = _skeleton(folder, record, only)
        skeleton.update(tree.fill(stored_state, lambda path, stored: None if path in unread else stored))
        wanted = {key: into[key] for key in into if only is None or key in only} if into else {}
        filled = _match(folder, skeleton, wanted)
        needed, pieces = find_pieces(folder, record, skeleton)
        parts: tuple[list[Any], list[Any]] = ([], [])

        def target_of(path: tree.Path, stored: StoredTensor) -> Tensor:
            new = None if path in filled else torch.empty(stored.spec.shape, dtype=stored.spec.dtype)
            target = filled[path] if new is None else new
            parts[new is None and path[0] not in empty].append((stored.name, target))
            return target

        state.update(tree.fill(skeleton, target_of))
        return TensorReader(folder, needed, pieces, *parts)

    readers: list[TensorReader] = []

    def verify() -> None:
        readers[0].read_empty(ranks)
        if check is not None:
            check(state)

    with naming_alternative(folder, ranks):
        together(ranks, lambda: readers.append(prepare_reader()))
        together(ranks, verify)
    together(ranks, readers[0].read_filled)
    return state


def _skeleton(folder: Path, record: Record, only: Collection[str] | None) -> dict[str, Any]:
    skeleton = read_state(folder, record)
    if only is None:
        return skeleton
    if isinstance(only, str):
        raise CheckpointError("only", only, "is a string, not a collection", f"Pass only=({only!r},)")
    for key in only:
        if key not in skeleton:
            raise CheckpointError("only", key, "is not in the checkpoint", did_you_mean(key, map(str, skeleton)))
    return {key: value for key, value in skeleton.items() if key in only}


def _match(folder: Path, skeleton: dict[str, Any], into: Mapping[str, Any]) -> dict[tree.Path, Tensor]:
    """Return the tensors of ``into``, keyed by path. Raise CheckpointError if they do not match the stored tensors."""
    stored_at: dict[tree.Path, StoredTensor] = dict(leaves(skeleton, StoredTensor))
    wanted: dict[tree.Path, Tensor] = dict(leaves(into, Tensor))
    sections = {path[0] for path in wanted}
    missing = [path for path in wanted if path not in stored_at]
    unexpected = [path for path in stored_at if path[0] in sections and path not in wanted]
    different = [
        f"{tree.show_path(path)} is {stored_at[path].spec} in the checkpoint, {_shown(tensor)} here"
        for path, tensor in wanted.items()
        if path in stored_at and _shown(tensor) != str(stored_at[path].spec)
    ]
    if missing or unexpected or different:
        problem = "belongs to another model: " + "; ".join(
            [
                *some_of("missing in the checkpoint", [tree.show_path(path) for path in missing]),
                *some_of("only in the checkpoint", [tree.show_path(path) for path in unexpected]),
                *some_of("different", different),
            ]
        )
        action = "Pass a checkpoint of this model, or create the model that was saved"
        raise CheckpointError("checkpoint", str(folder), problem, action)
    return wanted


def _shown(tensor: Tensor) -> str:
    # " on meta" never equals a stored spec. Meta tensors are therefore rejected, because copying into them would
    # silently discard the values.
    return f"{tree.TensorSpec(tuple(tensor.shape), tensor.dtype)}{' on meta' if tensor.is_meta else ''}"


def some_of(title: str, names: list[str]) -> list[str]:
    """Return a list with the text ``title: a, b, ...`` of the first few ``names``; an empty list without names."""
    return [f"{title}: {first_few(names)}"] if names else []
