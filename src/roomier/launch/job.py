"""Identity of a job, which remains the same when a launcher restarts the ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

import psutil


def job_names(environ: Mapping[str, str]) -> list[str]:
    """Return the names that identify this job to restarted ranks; empty if the launcher cannot restart the job.

    Different runs can have the same run id in torchrun, so the name also identifies the agent process that started this
    rank. The agent continues to run when the ranks are restarted. A job that SLURM requeues keeps its job id and step
    ids.
    """
    names = []
    if "TORCHELASTIC_RUN_ID" in environ:
        agent = psutil.Process(os.getppid())
        started = f"{agent.create_time():.2f}"
        names.append(f"torchrun {environ['TORCHELASTIC_RUN_ID']} {socket.gethostname()} {agent.pid} {started}")
    if "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" in environ:
        cluster = environ.get("SLURM_CLUSTER_NAME", "")
        names.append(f"slurm {cluster} {environ['SLURM_JOB_ID']} {environ['SLURM_STEP_ID']}")
    return names


def num_restarts(environ: Mapping[str, str]) -> int:
    """Return how many times the launcher has restarted this job. torchrun does not count restarts that a change in its
    set of nodes causes."""
    counts = (environ.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return sum(int(count) for count in counts if count.isdecimal())
