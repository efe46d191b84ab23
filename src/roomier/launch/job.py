"""Identity of a job, which remains the same when a launcher restarts the ranks, and the requeueing of a SLURM job."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping

import psutil

from roomier.core.log import notice
from roomier.launch.ray_run import ray_run

REQUEUE = "ROOMIER_REQUEUE"
"""Name of an environment variable: if its value is 0, roomier does not return SLURM jobs to the queue."""

JOB = "ROOMIER_JOB"
"""Name of an environment variable: a name that identifies this job to restarted ranks, for any launcher."""

_REQUEUED = {"JobState=RUNNING", "Requeue=1", "BatchFlag=1"}
_SCONTROL_S = 60.0


def job_names(environ: Mapping[str, str]) -> list[str]:
    """Return the names that identify this job to restarted ranks; empty if the launcher cannot restart the job.

    Different runs can have the same run id in torchrun, so the name also identifies the agent process that started this
    rank. The agent continues to run when the ranks are restarted. A job that SLURM requeues keeps its job id and step
    ids. A run of Ray Train is identified by its name, as in Ray itself.
    """
    names = [f"job {environ[JOB]}"] if environ.get(JOB) else []
    if "TORCHELASTIC_RUN_ID" in environ:
        agent = psutil.Process(os.getppid())
        started = f"{agent.create_time():.2f}"
        names.append(f"torchrun {environ['TORCHELASTIC_RUN_ID']} {socket.gethostname()} {agent.pid} {started}")
    if "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" in environ:
        cluster = environ.get("SLURM_CLUSTER_NAME", "")
        names.append(f"slurm {cluster} {environ['SLURM_JOB_ID']} {environ['SLURM_STEP_ID']}")
    if (run := ray_run()) is not None:
        names.append(f"ray {run.name}")
    return names


def num_restarts(environ: Mapping[str, str]) -> int:
    """Return how many times the launcher has restarted this job. torchrun does not count restarts that a change in its
    set of nodes causes."""
    counts = (environ.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return sum(int(count) for count in counts if count.isdecimal())


def may_requeue(environ: Mapping[str, str]) -> bool:
    """Return whether this process is a rank of a SLURM job that roomier may requeue."""
    return "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" in environ and environ.get(REQUEUE) != "0"


def requeue(environ: Mapping[str, str]) -> None:
    """Return the SLURM job of this process to the queue after a signal, so that SLURM restarts the job.

    A job that was cancelled or preempted, or that reached its time limit, is no longer running, so it is not requeued.
    The same applies to jobs that were submitted with ``--no-requeue``, and to the shell of ``salloc``. SLURM ends the
    ranks immediately after this call.
    """
    job = environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_TASK_ID" in environ:  # SLURM_JOB_ID of one of the tasks is also the number of the complete array
        job = f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    try:
        if set(_scontrol("--oneliner", "show", "job", job).split()) >= _REQUEUED:
            notice(f"returning SLURM job {job} to the queue. The restarted job resumes from this checkpoint")
            _scontrol("requeue", job)
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        notice(f"SLURM job {job} was not returned to the queue: {reason}. Run `scontrol requeue {job}`")


def _scontrol(*words: str) -> str:
    done = subprocess.run(("scontrol", *words), capture_output=True, text=True, check=True, timeout=_SCONTROL_S)
    return done.stdout
