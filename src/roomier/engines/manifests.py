"""Manifests: descriptions of a job for SLURM, Kubernetes (Kubeflow Trainer and JobSet), SkyPilot and dstack.

Each target is one function that returns plain data. The launchers start one process on each node, which starts the
other ranks of its node (``launch/environment.py``), except SLURM, which starts each rank.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from roomier.core.errors import RoomierError
from roomier.launch.job import JOB

_GIB = 2**30
_PORT = 29400
NUM_RESTARTS = 10
"""How often a launcher restarts a job after failures."""
_NAME = re.compile(r"[a-z](?:[a-z0-9-]{0,38}[a-z0-9])?")
_SHORTEST_GRACE_S = 30.0  # to finish the loggers, and to leave the process group
_KUBERNETES_DEVICES = {
    "cuda": "nvidia.com/gpu",
    "amd": "amd.com/gpu",
    "xpu": "gpu.intel.com/xe",
    "tpu": "google.com/tpu",
}
_SYSTEM_GIB = 100  # for the system, the packages and the image, on a disk that also stores offloaded data
_NODE = "node"  # of the jobs and containers in the runtimes of Kubeflow Trainer


@dataclass(frozen=True)
class Nodes:
    """Number of nodes of a job.

    Attributes:
        least, most: smallest and largest number of nodes. Only some launchers support a range.
    """

    least: int
    most: int

    @classmethod
    def of(cls, text: str) -> Nodes:
        """Return the nodes that ``text`` describes, such as ``"4"`` or ``"1:4"``.

        Raises:
            RoomierError: ``text`` is neither a number nor a range.
        """
        parts = text.split(":")
        numbers = [int(each) for each in parts if each.isdecimal()]
        if len(numbers) != len(parts) or len(parts) > 2 or not 0 < numbers[0] <= numbers[-1]:
            raise RoomierError("--nodes", text, "must be a number or a range", "Use a number such as 4, or 1:4")
        return cls(numbers[0], numbers[-1])


@dataclass(frozen=True)
class ClusterJob:
    """A job for a launcher.

    Attributes:
        name: name of the job, which identifies it to restarted ranks.
        command: words of the command that each process runs.
        nodes: number of nodes.
        devices: number of devices, and ranks, on each node.
        kind: kind of the devices, such as ``"cuda"`` or ``"cpu"``.
        device: name of the device in the table of devices, such as ``"a100-80gb"``.
        memory_bytes: host memory that a node needs.
        disk_bytes: local disk that a node needs for offloaded data.
        grace_s: seconds from a notice until the launcher kills the job.
        image: container image; None if the launcher does not need one.

    Raises:
        RoomierError: ``name`` is not a valid name of a job.
    """

    name: str
    command: tuple[str, ...]
    nodes: Nodes
    devices: int
    kind: str
    device: str
    memory_bytes: int
    disk_bytes: int
    grace_s: float
    image: str | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            action = "Use up to 40 lowercase letters, digits and hyphens, starting with a letter"
            raise RoomierError("--name", self.name, "is not a valid name of a job", action)

    @property
    def memory_gib(self) -> int:
        """Host memory of a node in GiB, rounded up."""
        return math.ceil(self.memory_bytes / _GIB)

    @property
    def disk_gib(self) -> int:
        """Local disk of a node in GiB, rounded up."""
        return math.ceil(self.disk_bytes / _GIB)

    @property
    def whole_grace_s(self) -> int:
        """Grace period in seconds, rounded up."""
        return math.ceil(self.grace_s)


def grace_s(step_s: float, save_s: float) -> float:
    """Return the time that a launcher must grant a run between a signal and its end.

    Args:
        step_s: duration of a step.
        save_s: duration of a save. Both are doubled, because they vary.
    """
    return _SHORTEST_GRACE_S + 2 * (step_s + save_s)


def manifest(target: str, job: ClusterJob) -> str:
    """Return the manifest of ``job`` for ``target``, one of :data:`TARGETS`.

    Raises:
        RoomierError: the target does not support the job.
    """
    if target == "slurm":
        return _slurm(job)
    if job.nodes.least < job.nodes.most:
        nodes = f"{job.nodes.least}:{job.nodes.most}"
        action = (
            f"Use --nodes {job.nodes.most}, or --to slurm or ray, which can change the number of nodes at a restart"
        )
        raise RoomierError("--nodes", nodes, f"is a range, but {target} cannot resize a job", action)
    if target in NEEDS_IMAGE and not job.image:
        problem, action = f"is required for {target}", "Pass --image with a container image that contains your code"
        raise RoomierError("--image", job.image, problem, action)
    text: str = yaml.safe_dump(_TARGETS[target](job), sort_keys=False, width=120)
    return text


def _slurm(job: ClusterJob) -> str:
    few, most = job.nodes.least, job.nodes.most
    options = {
        "job-name": job.name,
        "nodes": few if few == most else f"{few}-{most}",
        "ntasks-per-node": job.devices,
        **({} if job.kind == "cpu" else {"gpus-per-node": job.devices}),
        "mem": f"{job.memory_gib}G",
        **({"tmp": f"{job.disk_gib}G"} if job.disk_gib else {}),
        "requeue": None,
        "signal": f"TERM@{job.whole_grace_s}",
        "output": "%x-%j.log",
        "open-mode": "append",
    }
    lines = [f"#SBATCH --{name}" + ("" if value is None else f"={value}") for name, value in options.items()]
    container = "" if job.image is None else f"--container-image={shlex.quote(job.image)} "
    start = [
        "export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}",
        f"export {JOB}=slurm-$SLURM_JOB_ID",
        "for _ in {0..3}; do",  # after a failure, such as a rank that was killed
        f"    srun --kill-on-bad-exit=1 {container}{shlex.join(job.command)} && exit",
        "done",
    ]
    return "\n".join(["#!/bin/bash", *lines, "", *start, ""])


def _resources(job: ClusterJob) -> dict[str, Any]:
    """Return the resources of a container. Requests without a limit may be exceeded."""
    disk = {"ephemeral-storage": f"{job.disk_gib}Gi"} if job.disk_gib else {}
    limits: dict[str, Any] = {"memory": f"{job.memory_gib}Gi", **disk}
    if job.kind != "cpu":
        vendor = "amd" if job.device.startswith("mi") else job.kind
        limits[_KUBERNETES_DEVICES.get(vendor, vendor)] = str(job.devices)
    return {"requests": {"cpu": str(job.devices), **limits}, "limits": limits}


def _environment(job: ClusterJob, **more: str) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in {JOB: job.name, **more}.items()]


# The shared memory of loader workers and NCCL, which is 64 MiB in a pod by default.
_VOLUMES = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
_MOUNTS = [{"name": "shared-memory", "mountPath": "/dev/shm"}]


def _train_job(job: ClusterJob) -> dict[str, Any]:
    pod = {
        "terminationGracePeriodSeconds": job.whole_grace_s,
        "containers": [{"name": _NODE, "volumeMounts": _MOUNTS}],
        "volumes": _VOLUMES,
    }
    jobs = [{"name": _NODE, "template": {"spec": {"template": {"spec": pod}}}}]
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": job.name},
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {
                "image": job.image,
                "command": list(job.command),
                "numNodes": job.nodes.most,
                "numProcPerNode": job.devices,
                "resourcesPerNode": _resources(job),
                "env": _environment(job),
            },
            "runtimePatches": [
                {
                    "manager": "roomier.github.io/launch",
                    "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}},
                }
            ],
        },
    }


def _job_set(job: ClusterJob) -> dict[str, Any]:
    container = {
        "name": _NODE,
        "image": job.image,
        "command": list(job.command),
        "env": _environment(job, MASTER_ADDR=f"{job.name}-{_NODE}-0-0.{job.name}", MASTER_PORT=str(_PORT)),
        "resources": _resources(job),
        "volumeMounts": _MOUNTS,
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.whole_grace_s,
        "containers": [container],
        "volumes": _VOLUMES,
    }
    number = job.nodes.most
    # If one pod fails, its ranks cannot return to the run, so the JobSet starts all pods again.
    of_job = {"parallelism": number, "completions": number, "completionMode": "Indexed", "backoffLimit": 0}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": job.name},
            "failurePolicy": {"maxRestarts": NUM_RESTARTS},
            "replicatedJobs": [
                {"name": _NODE, "replicas": 1, "template": {"spec": {**of_job, "template": {"spec": pod}}}}
            ],
        },
    }


def _sky_pilot(job: ClusterJob) -> dict[str, Any]:
    name = _product(job.device)
    name = {"A100-40GB": "A100", "V100-16GB": "V100"}.get(name, name)
    return {
        "name": job.name,
        "num_nodes": job.nodes.most,
        "resources": {
            **({} if job.kind == "cpu" else {"accelerators": f"{name}:{job.devices}"}),
            "cpus": f"{job.devices}+",
            "memory": f"{job.memory_gib}+",
            **({"disk_size": job.disk_gib + _SYSTEM_GIB} if job.disk_gib else {}),
            **({} if job.image is None else {"image_id": f"docker:{job.image}"}),
            "job_recovery": {"max_restarts_on_errors": NUM_RESTARTS},
        },
        "workdir": ".",
        "envs": {JOB: job.name},
        "run": shlex.join(job.command),
    }


def _product(device: str) -> str:
    """Return the name of a device without its form factor, which the catalogs of clouds do not contain."""
    return device.removesuffix("-pcie").removesuffix("-nvl").upper()


def _dstack(job: ClusterJob) -> dict[str, Any]:
    name, _, memory = _product(job.device).rpartition("-")
    gpu = {"name": name, "memory": memory} if memory.endswith("GB") else {"name": _product(job.device).replace("-", "")}
    return {
        "type": "task",
        "name": job.name,
        "nodes": job.nodes.most,
        "image": job.image,
        "env": {JOB: job.name},
        "commands": [shlex.join(job.command)],
        "resources": {
            "cpu": f"{job.devices}..",
            "memory": f"{job.memory_gib}GB..",
            "shm_size": f"{max(1, job.memory_gib // 2)}GB",
            **({} if job.kind == "cpu" else {"gpu": {**gpu, "count": job.devices}}),
            **({"disk": f"{job.disk_gib + _SYSTEM_GIB}GB.."} if job.disk_gib else {}),
        },
        "retry": {"on_events": ["no-capacity", "interruption", "error"], "duration": "1d"},
        "stop_duration": f"{job.whole_grace_s}s",
    }


_TARGETS: Mapping[str, Any] = {"trainjob": _train_job, "jobset": _job_set, "skypilot": _sky_pilot, "dstack": _dstack}
TARGETS = ("slurm", *_TARGETS)
"""Names of the launchers for which :func:`manifest` returns a manifest."""
NEEDS_IMAGE = ("trainjob", "jobset", "dstack")
"""Targets that run containers only."""
