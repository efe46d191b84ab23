"""The job and the run folder of a fit, and the division of its steps into micro-batches. If the launcher restarts a
job, it resumes from its last complete checkpoint with the same number of samples per step.

[Note: whose checkpoint]
Many runs write to folders under the same root, and ``"last"`` is the newest checkpoint of all runs, but a restarted job
must resume from one of its own checkpoints. ``job.json`` in each run folder therefore records the job that wrote the
folder (``launch/job.py``) and, because a script may call fit several times, the index of the fit in the script. After a
restart, the script calls the same fits in the same order as before.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from roomier import checkpoint
from roomier.api.module import Module
from roomier.checkpoint.find import NoUsableCheckpointError
from roomier.core.errors import CheckpointError, RoomierError
from roomier.core.log import notice, quiet
from roomier.core.ranks import Ranks
from roomier.core.replacing import new_owner, replacing
from roomier.core.untrusted import read_json
from roomier.launch.job import job_names, num_restarts
from roomier.plan import Plan
from roomier.run.accumulation import GlobalBatch
from roomier.run.loaders import RunLoaders
from roomier.run.settled import Request
from roomier.storage.mirror import local_of, remote_of
from roomier.storage.remote_path import RemotePath, StorageError
from roomier.storage.sending import CLAIM_NAME, ConflictError, create, delete, fetch_newer

FILE_NAME = "job.json"

_num_fits: Counter[Path] = Counter()  # number of fits in this process, by root


@dataclass(frozen=True)
class Job:
    """The job of a fit.

    Args:
        names: identifiers of the job. One common identifier is sufficient to recognize the job, because the nodes of a
            job can change.
        fit: index of the fit in the script, starting with 0.
    """

    names: frozenset[str]
    fit: int

    def find_earlier(self, root: Path) -> tuple[Path, GlobalBatch] | None:
        """Return the newest complete checkpoint of this fit under ``root``, and the global batch before the restart of
        its job; None if none exists.

        Raises:
            CheckpointError: checkpoints of this fit exist, but none can be used.
        """
        damaged: NoUsableCheckpointError | None = None
        folders = [each for each in root.glob("*") if is_run_folder(each)]
        for folder in sorted(folders, key=lambda each: int(each.name.rpartition("_")[2]), reverse=True):
            try:
                record = read_json(folder / FILE_NAME)
                is_own = record["fit"] == self.fit and not self.names.isdisjoint(record["names"])
                batch = GlobalBatch(**record["batch"])
            except StorageError:
                raise
            except (OSError, ValueError, KeyError, TypeError):
                continue
            try:
                found = checkpoint.find_last(folder, rejects_damage=True) if is_own else None
            except NoUsableCheckpointError as error:  # an older run folder of this job may have a usable checkpoint
                damaged = damaged or error
                continue
            if found is not None:
                notice(f"this job was restarted and resumes from {found}")
                return found, batch
        if damaged is not None:
            raise damaged
        if num_restarts(os.environ):
            notice(f"this job was restarted, but found no complete checkpoint under {root}. Training starts at step 0")
        return None

    def write(self, folder: Path, batch: GlobalBatch) -> None:
        """Record in ``folder``, the run folder, that the run belongs to this job."""
        record = {"names": sorted(self.names), "fit": self.fit, "batch": dataclasses.asdict(batch)}
        with replacing(folder / FILE_NAME) as file:
            json.dump(record, file, indent=2)


def job_of_fit(root: Path, ranks: Ranks) -> Job | None:
    """Return the job of the fit that begins; None if no launcher restarts jobs. All ranks must call this function
    once per fit."""
    job = _next_job(root, ranks)
    _num_fits[root.absolute()] += 1
    return job


def checkpoint_after_restart(root: Path, ranks: Ranks) -> Path | None:
    """Return the checkpoint from which the next fit resumes if its job was restarted, otherwise None.

    All ranks must call this function before the fit begins.
    """
    job = _next_job(root, ranks)
    if job is None:
        return None
    with quiet():  # the fit prints the notice
        earlier = ranks.on_zero(lambda: job.find_earlier(root))
    return None if earlier is None else earlier[0]


def _next_job(root: Path, ranks: Ranks) -> Job | None:
    names = frozenset(name for names in ranks.gather(job_names(os.environ)) for name in names)
    return Job(names, _num_fits[root.absolute()]) if names else None


def with_global_batch(plan: Plan, module: Module, data: RunLoaders, earlier: GlobalBatch) -> Plan:
    """Return ``plan`` with the global batch ``earlier`` that the job used before its restart.

    The size of the micro-batches in ``data`` is adjusted to the plan. With manual optimization, ``plan`` is returned
    unchanged.

    Raises:
        RoomierError: the global batch cannot be divided among the ranks.
    """
    now = global_batch_of(plan, data)
    if now.size == earlier.size and (now.batch_size is None) == (earlier.batch_size is None):
        return plan
    if not module.automatic_optimization:
        reason = "because manual optimization accumulates gradients itself"
        notice(f"the global batch was {earlier} and is now {now}, {reason}")
        return plan
    kept = earlier.on(now.num_ranks, now.batch_size)
    if kept.batch_size is not None and (kept.batch_size, kept.num_in_round) != (now.batch_size, now.num_in_round):
        data.set_batch_size(kept.batch_size, kept.num_in_round)
    notice(f"the global batch was {earlier} and is kept as {kept}")
    return with_accumulation(plan, kept.accumulate)


def global_batch_of(plan: Plan, data: RunLoaders) -> GlobalBatch:
    """Return the global batch of a fit with ``plan``."""
    accumulate, num_ranks = plan.batch.accumulate_grad_batches, plan.parallel.num_data_ranks
    return GlobalBatch(data.batch_size, accumulate, num_ranks, data.num_in_round)


@dataclasses.dataclass(frozen=True)
class CutTo:
    """Function that reduces the size of micro-batches and increases their number per step. The number of samples per
    step stays the same.

    Args:
        size: maximum number of samples in a micro-batch on each rank. A micro-batch has the largest number of samples
            that does not exceed ``size`` and divides the number of samples in a step. None uses ``number``.
        number: number of micro-batches per step.
    """

    size: int | None = None
    number: int | None = None

    def __call__(self, plan: Plan, data: RunLoaders, request: Request) -> Plan:
        """Set the size of the micro-batches in ``data``, and return ``plan`` with the corresponding accumulation.

        Raises:
            RoomierError: the batches of the loader cannot be split.
        """
        of_step = samples_of_step(dataclasses.replace(request, plan=plan), data)
        most = self.size or max(1, of_step // (self.number or 1))
        size = next(each for each in range(min(most, of_step), 0, -1) if of_step % each == 0)
        num = of_step // size
        notice(f"a step uses {num} micro-batches of {size} samples on each rank, with the same total number of samples")
        return with_micro_batch(plan, data, size, num)


def with_micro_batch(plan: Plan, data: RunLoaders, size: int, accumulate: int) -> Plan:
    """Set the size of the micro-batches in ``data`` to ``size`` samples, and return ``plan`` with ``accumulate``
    micro-batches per step."""
    if size != data.batch_size:
        data.set_batch_size(size)
    return with_accumulation(plan, accumulate)


def with_accumulation(plan: Plan, accumulate: int) -> Plan:
    """Return ``plan`` with ``accumulate`` micro-batches per step."""
    return dataclasses.replace(plan, batch=dataclasses.replace(plan.batch, accumulate_grad_batches=accumulate))


def samples_of_step(request: Request, data: RunLoaders) -> int:
    """Return the number of samples that each rank contributes to an optimizer step in the requested plan.

    Raises:
        RoomierError: the number is unknown, or the micro-batches cannot be changed.
    """
    batch_size = data.batch_size
    reason = keeps_micro_batch(request, data, batch_size)
    if batch_size is None or reason:
        action = "Set the batch size of the loader and accumulate_grad_batches manually"
        problem = f"the size of micro-batches cannot be changed, because {reason}"
        raise RoomierError("auto_scale_batch_size", batch_size, problem, action)
    return batch_size * request.plan.batch.accumulate_grad_batches


def keeps_micro_batch(request: Request, data: RunLoaders, num_samples: int | None) -> str:
    """Return the reason why micro-batches must have the size of the loader's batches; empty if micro-batches may be
    smaller.

    Args:
        num_samples: number of samples in a batch that was read from the loader.
    """
    options, batch_size = request.options, data.batch_size
    if batch_size is None:
        return "the loader creates its batches itself"
    if batch_size != num_samples:
        return f"a batch has {num_samples} samples, but the loader has batch_size={batch_size}"
    counts = {
        "limit_train_batches": options.limit_train_batches not in (None, 1.0, options.num_dev_batches),
        "overfit_batches": bool(options.overfit_batches),
        "val_check_interval": options.val_check_interval_s is None and options.val_check_interval not in (None, 1.0),
        "fast_dev_run": bool(options.num_dev_batches),
    }
    named = [name for name, is_set in counts.items() if is_set]
    if named:
        return f"{' and '.join(named)} counts micro-batches"
    loader = data.train_loader
    assert isinstance(loader, DataLoader)
    whole = batch_size * request.plan.parallel.num_data_ranks
    sized: Any = loader.dataset
    if getattr(loader.batch_sampler, "drop_last", False) and len(sized) % whole:
        return "with drop_last=True, smaller batches would drop different samples"
    return ""


PREFIX = "version_"


def is_run_folder(folder: Path) -> bool:
    """Return True if the name of ``folder`` consists of ``version_`` and a number."""
    return folder.name.startswith(PREFIX) and folder.name[len(PREFIX) :].isdecimal()


def run_folder(root: Path, resumed: Path | None) -> Path:
    """Return the run folder, which is the folder of the checkpoint ``resumed`` or a new ``version_N`` under ``root``.

    If ``root`` is remote, return the mirror of the run folder, with the files that the storage contains.

    Raises:
        CheckpointError: the folder cannot be created.
    """
    # A Lightning checkpoint is a file in a folder that Lightning created, so the run uses a new folder.
    is_own = resumed is not None and not resumed.is_file()
    mirror, remote = local_of(root), root if isinstance(root, RemotePath) else None
    if resumed is not None and is_own and resumed.parent.parent.parent.resolve() == root.resolve():
        folder = local_of(resumed.parent.parent)
        if remote is not None:
            fetch_newer(RemotePath(resumed.parent.parent), folder)
        return folder
    try:
        mirror.mkdir(parents=True, exist_ok=True)
        while True:
            paths = [*mirror.iterdir(), *(remote.glob(f"{PREFIX}*") if remote is not None else ())]
            taken = [int(path.name[len(PREFIX) :]) for path in paths if is_run_folder(path)]
            folder = mirror / f"{PREFIX}{max(taken, default=-1) + 1}"
            try:
                folder.mkdir()
                if remote is not None:
                    create(remote / folder.name / CLAIM_NAME, new_owner().encode())
                return folder
            except (FileExistsError, ConflictError):  # another process created this folder first
                continue
    except OSError as error:
        problem = f"no run folder can be created in this folder ({error.strerror})"
        raise CheckpointError(
            "default_root_dir", str(mirror), problem, "Pass a folder with write permission"
        ) from error


def remove_empty(folder: Path) -> None:
    """Remove the run folder of a failed call, and its claim in remote storage, if the call has not written a file."""
    remote = remote_of(folder)
    if is_run_folder(folder):
        with suppress(OSError, RoomierError):  # rmdir fails if the folder contains files
            folder.rmdir()
            if remote is not None:
                delete(remote / CLAIM_NAME)


def write_plan(folder: Path, text: str) -> None:
    """Write ``plan.yaml`` atomically.

    Raises:
        CheckpointError: the file cannot be written.
    """
    try:
        with replacing(folder / "plan.yaml") as file:
            file.write(text)
    except OSError as error:
        problem = f"plan.yaml cannot be written to {folder.name} in this folder ({error.strerror})"
        action = "Free some space, or pass another folder"
        raise CheckpointError("default_root_dir", str(folder.parent), problem, action) from error
