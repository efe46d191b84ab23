"""Which job a process belongs to: what stays the same when a launcher starts the ranks of a job anew."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

import psutil


def job_names(environ: Mapping[str, str]) -> list[str]:
    """The names by which the ranks of this job, restarted, would know it again; none where nobody would restart it.

    torchrun's id of a run may be one that other runs have as well, so the agent that started this process is named:
    it outlives the ranks. A job that SLURM puts back into its queue keeps its number and those of its steps.
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
    """How often the launcher says it has restarted this job; torchrun does not count changes of its nodes."""
    counts = (environ.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return sum(int(count) for count in counts if count.isdecimal())
