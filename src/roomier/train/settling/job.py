"""Resume a job from its last complete checkpoint after the launcher restarted the job.

[Note: whose checkpoint]
Many runs write to folders under the same root, and ``"last"`` is the newest checkpoint of all runs. A restarted job
must resume from one of its own checkpoints. Therefore, ``job.json`` in each run folder records the job that wrote the
folder (``launch/job.py``). The file also records the index of the fit in the script, because a script may call fit
several times. After a restart, the script calls the same fits in the same order as before.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from roomier import checkpoint
from roomier.api.module import Module
from roomier.checkpoint.find import NoUsableCheckpointError
from roomier.core.log import notice, quiet
from roomier.core.ranks import Ranks
from roomier.core.replacing import replacing
from roomier.core.untrusted import read_json
from roomier.launch.job import job_names, num_restarts
from roomier.plan import Plan
from roomier.run.accumulation import GlobalBatch
from roomier.run.loaders import RunLoaders
from roomier.train.opening.run_folder import is_run_folder
from roomier.train.settling.micro_batch import with_accumulation

FILE_NAME = "job.json"

_num_fits: Counter[Path] = Counter()  # number of fits in this process, by root


@dataclass(frozen=True)
class Earlier:
    """The latest state of this fit before its job was restarted.

    Attributes:
        checkpoint: the newest complete checkpoint.
        batch: the global batch of the fit before the restart.
    """

    checkpoint: Path
    batch: GlobalBatch


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

    def find_earlier(self, root: Path) -> Earlier | None:
        """Return the newest complete checkpoint of this fit under ``root``, with its global batch; None if none
        exists.

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
            except (OSError, ValueError, KeyError, TypeError):
                continue
            try:
                found = checkpoint.find_last(folder, rejects_damage=True) if is_own else None
            except NoUsableCheckpointError as error:  # an older run folder of this job may have a usable checkpoint
                damaged = damaged or error
                continue
            if found is not None:
                notice(f"this job was restarted and resumes from {found}")
                return Earlier(found, batch)
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
    return None if earlier is None else earlier.checkpoint


def _next_job(root: Path, ranks: Ranks) -> Job | None:
    names = frozenset(name for names in ranks.gather(job_names(os.environ)) for name in names)
    return Job(names, _num_fits[root.absolute()]) if names else None


def with_global_batch(plan: Plan, module: Module, data: RunLoaders, num_ranks: int, earlier: GlobalBatch) -> Plan:
    """Return ``plan`` for ``num_ranks`` ranks, with the global batch ``earlier`` that the job used before its restart.

    The size of the micro-batches in ``data`` is adjusted to the plan. With manual optimization, ``plan`` is returned
    unchanged.

    Raises:
        RoomierError: the global batch cannot be divided among the ranks.
    """
    now = global_batch_of(plan, data, num_ranks)
    if now.size == earlier.size and (now.batch_size is None) == (earlier.batch_size is None):
        return plan
    if not module.automatic_optimization:
        reason = "because manual optimization accumulates gradients itself"
        notice(f"the global batch was {earlier} and is now {now}, {reason}")
        return plan
    kept = earlier.on(now.num_ranks, now.batch_size)
    if kept.batch_size is not None and kept.batch_size != now.batch_size:
        data.set_batch_size(kept.batch_size)
    notice(f"the global batch was {earlier} and is kept as {kept}")
    return with_accumulation(plan, kept.accumulate)


def global_batch_of(plan: Plan, data: RunLoaders, num_ranks: int) -> GlobalBatch:
    """Return the global batch of a fit with ``plan``."""
    return GlobalBatch(data.batch_size, plan.batch.accumulate_grad_batches, num_ranks)
