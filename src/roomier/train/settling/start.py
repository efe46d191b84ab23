"""Start of a call, with its checkpoint, run folder, job and initial weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roomier.api.logger import Logger
from roomier.core.ranks import Ranks
from roomier.loggers.group import set_run_folder
from roomier.run.settled import Request, Start
from roomier.train.opening.run_folder import run_folder
from roomier.train.saving.first_weights import first_weights
from roomier.train.saving.restore import resolve_checkpoint
from roomier.train.settling.job import Job, job_of_fit


@dataclass(frozen=True)
class Found:
    """The start of a call, and the job to which a fit belongs.

    Args:
        start: the checkpoint and the folder of the run.
        job: the job that is recorded in the run folder; None if no launcher restarts jobs.
    """

    start: Start
    job: Job | None


def find_start(request: Request, ranks: Ranks, loggers: Sequence[Logger], best_path: str | None) -> Found:
    """Find the checkpoint from which ``request`` resumes, and create the run folder. Every rank must call this
    function.

    Args:
        loggers: the loggers, which receive the run folder.
        best_path: path of the best checkpoint of the last fit, for ``ckpt_path="best"``.

    Raises:
        RoomierError: the checkpoint or the weights file does not exist.
    """
    root, asked = request.root, request.ckpt_path
    path = ranks.on_zero(lambda: resolve_checkpoint(asked, root, best_path))
    job = job_of_fit(root, ranks) if request.is_fit and request.keeps_files else None
    earlier = None if job is None else ranks.on_zero(lambda: job.find_earlier(root))
    if earlier is not None:
        path = earlier.checkpoint
    folder = None if request.fitted is None else request.fitted.folder  # an evaluation adds rows to the logs of the fit
    if request.is_fit:
        folder = ranks.on_zero(lambda: run_folder(root, path)) if request.keeps_files else None
    set_run_folder(loggers, folder)
    weights = first_weights(request.weights, path, request.plan, ranks)
    is_last = asked == "last" or earlier is not None
    return Found(Start(path, folder, weights, None if earlier is None else earlier.batch, is_last), job)
