"""Snapshots: checkpoints in the memory of the nodes, from which a run resumes after a failure.

[Note: snapshots]
A snapshot is written like a checkpoint (``saving.py``), but to a memory file system of each node, and each file also to
one other node. After a failure, the first fit under the same root writes the newest complete snapshot of each run whose
processes have ended to the run's folder for checkpoints. All other code then finds an ordinary checkpoint, so neither
the number of ranks nor their nodes have to stay the same. Snapshots that are no longer needed are deleted there, too.

The folder of a run in memory, ``<place>/roomier-<user>/<root>/<run folder>@<owner>``, names a process that writes the
snapshots, because the snapshots of other running processes must not be touched. It contains a link to the run folder,
so that fits under other roots can delete snapshots that a checkpoint has replaced.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from roomier.checkpoint.agree import together
from roomier.checkpoint.commit import committed_folder, disk_errors, sync_folder
from roomier.checkpoint.find import list_complete, next_commit_number
from roomier.checkpoint.record import README_NAME, StoredFile, read_commit_number, read_record, write_record
from roomier.core.errors import CheckpointError
from roomier.core.log import notice
from roomier.core.ranks import Ranks
from roomier.core.replacing import abandoned_in, new_owner
from roomier.core.untrusted import open_regular

INTERRUPTED = "interrupted-step="
"""Start of the names of checkpoints that no callback manages. A newer checkpoint of the run replaces them."""

Files: TypeAlias = Mapping[int, tuple[Path, Sequence[str]]]
"""For each rank that writes files of a snapshot, the folder of the snapshot on its node, and the names of the files."""

_LINK = ".run"


@dataclass(frozen=True)
class _Held:
    """Snapshot of which a node has files.

    Attributes:
        run: name of the run folder.
        name: name of the checkpoint.
        age: key that orders the snapshots of a run.
        path: folder on the node.
        files: complete files on the node.
        missing: names of the other files.
    """

    run: str
    name: str
    age: tuple[int, int, int]
    path: Path
    files: tuple[str, ...]
    missing: tuple[str, ...]


def folder_in_memory(place: Path, run_folder: Path) -> Path:
    """Create a folder of this process in ``place``, a memory file system, for snapshots of the run in ``run_folder``.

    Raises:
        CheckpointError: another user owns the folder of this user's snapshots.
    """
    of_root = _folder_of_root(place, run_folder.parent)
    of_root.parent.mkdir(mode=0o700, exist_ok=True)
    folder = of_root / f"{run_folder.name}@{new_owner()}"
    folder.mkdir(parents=True)
    (folder / _LINK).symlink_to(os.path.realpath(run_folder))
    return folder


def _folder_of_root(place: Path, root: Path) -> Path:
    own = place / f"roomier-{os.getuid()}"
    if own.exists() and own.stat().st_uid != os.getuid():
        raise CheckpointError("place", str(own), "belongs to another user", "Pass another folder to PeerSnapshots")
    return own / hashlib.sha256(os.fsencode(os.path.realpath(root))).hexdigest()[:16]


def copy_to_next_node(folder: Path, files: Sequence[Sequence[StoredFile]], nodes: Sequence[int], ranks: Ranks) -> None:
    """Copy the files in ``folder`` to the next node. Every rank of ``ranks`` must call this function.

    Each rank sends its files to the rank with the same place on the next node, or to an earlier rank if this node has
    fewer ranks. With one node, no files are copied.

    Args:
        folder: folder of the snapshot on this node.
        files: the files of each rank.
        nodes: index of the node of each rank.

    Raises:
        CheckpointError: the files of the previous node do not fit in memory.
    """
    num_nodes = max(nodes) + 1
    if num_nodes == 1:
        return
    own, group = ranks.world.rank, ranks.process_group
    previous, same, following = (
        [rank for rank, node in enumerate(nodes) if node == (nodes[own] + distance) % num_nodes]
        for distance in (-1, 0, 1)
    )
    place = same.index(own)
    receiver = following[place % len(following)]
    received = [(file, sender) for sender in previous[place :: len(same)] for file in files[sender]]

    def allocate() -> None:
        with disk_errors(folder, sum(file.size_bytes for file, _ in received), folder):
            for file, _ in received:
                with (folder / file.name).open("xb") as opened:  # a mapped file without space would end the process
                    os.posix_fallocate(opened.fileno(), 0, file.size_bytes)

    together(ranks, allocate)
    sent = [dist.isend(_mapped(folder, file), group=group, group_dst=receiver) for file in files[own]]
    for file, sender in received:
        dist.recv(_mapped(folder, file), group=group, group_src=sender)
    for work in sent:
        assert work is not None
        work.wait()


def _mapped(folder: Path, file: StoredFile) -> Tensor:
    return torch.from_file(str(folder / file.name), shared=True, size=file.size_bytes, dtype=torch.uint8)


def rescue(place: Path, root: Path, ranks: Ranks) -> None:
    """Write the newest complete snapshot of each run under ``root`` whose processes have ended to the checkpoints of
    the run, unless a newer checkpoint exists there, and delete the snapshots of these runs. Under other roots, delete
    the snapshots that are not newer than a checkpoint, or whose run folder was deleted.

    Every rank must call this function.

    Args:
        place: memory file system of each node.
        root: local folder of the run folders.

    Raises:
        CheckpointError: a snapshot cannot be written.
    """
    is_leader = ranks.world.local_rank == 0
    of_root = _folder_of_root(place, root)
    folders = abandoned_in(of_root, also_own=True) if is_leader else []  # also of earlier fits of this process
    of_ranks = ranks.gather([held for folder in folders for held in _held(folder)])
    for run in sorted({held.run for of_rank in of_ranks for held in of_rank}):
        checkpoints = root / run / "checkpoints"
        chosen = ranks.on_zero(lambda checkpoints=checkpoints, run=run: _choose(checkpoints, run, of_ranks))  # type: ignore[misc]
        if chosen is not None:
            _write(checkpoints, chosen, ranks)
    other_roots = {*of_root.parent.glob("*")} - {of_root}
    others = [each for path in other_roots for each in abandoned_in(path, also_own=True)]
    for folder in (*folders, *filter(_is_replaced, others if is_leader else ())):
        shutil.rmtree(folder, ignore_errors=True)


def _is_replaced(folder: Path) -> bool:
    try:
        run = folder.joinpath(_LINK).readlink()
        is_mounted, newest = any(run.parent.iterdir()), _newest_on_disk(run / "checkpoints")
    except (CheckpointError, OSError):  # an unreadable root, or another job that removes a checkpoint
        return False
    return is_mounted and (not run.is_dir() or all(held.age[:2] <= newest for held in _held(folder)))


def _newest_on_disk(checkpoints: Path) -> tuple[int, int]:
    ages = [(read_commit_number(path), read_record(path).global_step) for path in list_complete(checkpoints)]
    return max(ages, default=(0, -1))


def _held(folder: Path) -> list[_Held]:
    run = folder.name.rpartition("@")[0]
    found = []
    for path in folder.glob("[!.]*"):
        try:
            record = read_record(path)
        except (CheckpointError, OSError):
            continue
        sizes = {each.name: each.stat().st_size for each in path.iterdir()}
        files = {file.name: sizes.get(file.name) == file.size_bytes for file in record.files}
        age = (record.commit_number, record.global_step, record.saved_at_ns)
        here, missing = (tuple(name for name, is_here in files.items() if is_here is each) for each in (True, False))
        found.append(_Held(run, path.name, age, path, here, missing))
    return found


def _choose(
    checkpoints: Path, run: str, of_ranks: Sequence[Sequence[_Held]]
) -> dict[int, tuple[Path, list[str]]] | None:
    """Return the folder and the files that each rank writes; None if the newest checkpoint on disk is used."""
    by_age: dict[tuple[int, int, int], dict[int, _Held]] = defaultdict(dict)
    for rank, of_rank in enumerate(of_ranks):
        for held in of_rank:
            if held.run == run:
                by_age[held.age][rank] = held
    newest = _newest_on_disk(checkpoints)
    for age, holders in sorted(by_age.items(), reverse=True):
        if age[:2] <= newest or not checkpoints.parent.is_dir():
            return None
        rank_of = {name: rank for rank, held in reversed(holders.items()) for name in held.files}
        held = next(iter(holders.values()))
        if rank_of.keys() == {*held.files, *held.missing}:
            step = age[1]
            notice(f"the snapshot of step {step} in memory is written to {checkpoints / held.name}")
            return {
                rank: (each.path, [name for name in each.files if rank_of[name] == rank])
                for rank, each in holders.items()
            }
        lost = len(held.files) + len(held.missing) - len(rank_of)
        notice(f"the snapshot of step {age[1]} in {run} is not used, because {lost} of its files are on lost nodes")
    return None


def _write(checkpoints: Path, files: Files, ranks: Ranks) -> None:
    folder, names = files.get(ranks.world.rank, (None, []))
    recorder, (first, _) = next(iter(files.items()))
    target = checkpoints / first.name
    num_bytes = sum(ranks.gather(sum((folder / name).stat().st_size for name in names) if folder else 0))
    with ExitStack() as until_committed:
        aside = together(
            ranks, lambda: until_committed.enter_context(committed_folder(target, num_bytes)) if ranks.is_zero else None
        )[0]
        assert aside is not None

        def copy() -> None:
            is_recorder = ranks.world.rank == recorder
            with disk_errors(target, num_bytes, aside):
                for name in (*names, *([README_NAME] if is_recorder else [])):
                    assert folder is not None
                    with open_regular(folder / name) as source, (aside / name).open("xb") as file:
                        shutil.copyfileobj(source, file)
                        file.flush()
                        os.fsync(file.fileno())
                if is_recorder:
                    write_record(
                        aside, replace(read_record(first), commit_number=next_commit_number(target), write_ms=0)
                    )
                sync_folder(aside)

        together(ranks, copy)
        together(ranks, lambda: until_committed.close() if ranks.is_zero else None)
