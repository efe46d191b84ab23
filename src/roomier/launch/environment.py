"""Detects the launcher that started this process (torchrun, Ray, SLURM, MPI or roomier itself) and its rank.

All launchers set environment variables. :func:`export` writes the detected values under the names that torchrun uses,
so that roomier and torch read the same variables.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from roomier.core.errors import RoomierError
from roomier.core.loopback import LOOPBACK
from roomier.core.world import World
from roomier.launch.ray_run import ray_run

STARTED_BY_ROOMIER = "ROOMIER_STARTER_PID"
"""Name of an environment variable that roomier sets for the ranks that it starts. Its value is the id of the process
that started the ranks of this machine."""

RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    STARTED_BY_ROOMIER,
)
"""Names of the environment variables that roomier sets for a rank that it starts."""

_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # Smallest step id that SLURM uses for batch scripts and interactive shells.
_DEFAULT_PORT = 29500  # The default of torch.


@dataclass(frozen=True)
class Launch:
    """Settings that a launcher provides.

    Attributes:
        launcher: name of the launcher, for messages.
        world: rank of this process and number of ranks, in the job and on this node.
        address: host name or IP address of rank 0; None if the launcher does not set it.
        port: port on which rank 0 accepts connections; None if the launcher does not set it.
    """

    launcher: str
    world: World
    address: str | None = None
    port: int | None = None

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.world.size // self.world.local_size


@dataclass(frozen=True)
class LaunchedNode:
    """A node on which the launcher started one process, which starts the ranks of the node.

    Attributes:
        launcher: name of the launcher, for messages.
        rank_name: name of the environment variable with ``rank``.
        rank: index of this node.
        size: number of nodes; None if the launcher does not set it.
        address: host name or IP address of node 0; None if the launcher does not set it.
        port: port on which rank 0 accepts connections; None if the launcher does not set it.
    """

    launcher: str
    rank_name: str
    rank: int
    size: int | None
    address: str | None
    port: int | None


# For each launcher: its name, and its variables of the rank and number of nodes, the address and the port.
_NODES = (
    ("your script", "NODE_RANK", "", "MASTER_ADDR", "MASTER_PORT"),
    ("Kubeflow Trainer", "PET_NODE_RANK", "PET_NNODES", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
    ("SkyPilot", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_IPS", ""),
    ("dstack", "DSTACK_NODE_RANK", "DSTACK_NODES_NUM", "DSTACK_MASTER_NODE_IP", ""),
    ("Kubernetes", "JOB_COMPLETION_INDEX", "", "MASTER_ADDR", "MASTER_PORT"),
)


def node_of(environ: Mapping[str, str]) -> LaunchedNode | None:
    """Return the node that ``environ`` describes; None if no launcher started a process on each node.

    Raises:
        RoomierError: a variable is not an integer, or the rank is not less than the number of nodes.
    """
    for launcher, rank, size, address, port in _NODES:
        if rank not in environ:
            continue
        own_port = number_in(environ, port) if port in environ else _DEFAULT_PORT if not port else None
        addresses = environ.get(address, "").split()  # SkyPilot lists the addresses of all nodes
        node = LaunchedNode(
            launcher,
            rank,
            number_in(environ, rank),
            number_in(environ, size) if size in environ else None,
            addresses[0] if addresses else None,
            own_port,
        )
        if node.rank < 0 or (node.size is not None and node.rank >= node.size):
            problem = f"is not the index of a node, because {size or 'the launcher'} is {node.size}"
            raise RoomierError(rank, node.rank, problem, f"Correct {rank} or {size}, or unset both")
        return node
    return None


def launch_of(environ: Mapping[str, str]) -> Launch | None:
    """Return the launch that ``environ`` describes; None if no launcher started this process.

    torchrun has precedence over SLURM, because torchrun can run inside a SLURM allocation.

    Raises:
        RoomierError: the variables are invalid or inconsistent.
    """
    launch = _of_torchrun(environ) or _of_slurm(environ) or _of_mpi(environ)
    if launch is not None:
        _check(launch)
    return launch


def export(launch: Launch, environ: MutableMapping[str, str]) -> None:
    """Write ``launch`` to ``environ`` under the names of torchrun. Existing values of the address and the port are
    preserved."""
    world = launch.world
    environ.update(
        RANK=str(world.rank),
        WORLD_SIZE=str(world.size),
        LOCAL_RANK=str(world.local_rank),
        LOCAL_WORLD_SIZE=str(world.local_size),
        GROUP_RANK=str(world.node_rank),
    )
    if launch.address is not None:
        environ.setdefault("MASTER_ADDR", launch.address)
    if launch.port is not None:
        environ.setdefault("MASTER_PORT", str(launch.port))


def _of_torchrun(environ: Mapping[str, str]) -> Launch | None:
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    rank, size = number_in(environ, "RANK"), number_in(environ, "WORLD_SIZE")
    # Some schedulers (such as PyTorchJob of Kubernetes) start one process per machine and set only the rank of this
    # process. Ray Train sets the variables of torchrun, except GROUP_RANK.
    local_rank = number_in(environ, "LOCAL_RANK", 0)
    local_size = number_in(environ, "LOCAL_WORLD_SIZE", size if "LOCAL_RANK" in environ else 1)
    node_rank = number_in(environ, "GROUP_RANK", rank // local_size)
    name = "roomier" if STARTED_BY_ROOMIER in environ else "torchrun" if ray_run() is None else "Ray"
    return Launch(
        name,
        World(rank, size, local_rank=local_rank, node_rank=node_rank, local_size=local_size),
        environ.get("MASTER_ADDR", LOOPBACK if local_size == size else None),
        number_in(environ, "MASTER_PORT", _DEFAULT_PORT),
    )


def _of_slurm(environ: Mapping[str, str]) -> Launch | None:
    """Return the launch of this process if ``srun`` started it as one of several tasks; otherwise, None. A batch script
    and a shell in an allocation are not tasks."""
    if "SLURM_PROCID" not in environ or "SLURM_STEP_ID" not in environ:
        return None
    step = number_in(environ, "SLURM_STEP_ID")
    size = number_in(environ, "SLURM_STEP_NUM_TASKS", number_in(environ, "SLURM_NTASKS", 1))
    if step >= _FIRST_SPECIAL_STEP or size == 1:
        return None
    node_rank = number_in(environ, "SLURM_NODEID", 0)
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    # All tasks of a job must derive the same port. Jobs on the same machine should derive different ports.
    port = 12000 + (number_in(environ, "SLURM_JOB_ID", 0) * 7 + step) % 20000
    return Launch(
        "SLURM",
        World(
            number_in(environ, "SLURM_PROCID"),
            size,
            local_rank=number_in(environ, "SLURM_LOCALID", 0),
            node_rank=node_rank,
            local_size=_tasks_here(environ, node_rank, size),
        ),
        environ.get("MASTER_ADDR") or (first_host(nodes) if nodes else None),
        number_in(environ, "MASTER_PORT", port),
    )


def _tasks_here(environ: Mapping[str, str], node_rank: int, size: int) -> int:
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if name in environ:
            try:
                return tasks_per_node(environ[name])[node_rank]
            except (ValueError, IndexError) as error:
                raise _wrong(name, environ[name], "must be a SLURM list of tasks per node") from error
    return size // number_in(environ, "SLURM_STEP_NUM_NODES", number_in(environ, "SLURM_NNODES", 1))


def _of_mpi(environ: Mapping[str, str]) -> Launch | None:
    names = {
        "OMPI_COMM_WORLD_RANK": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        "PMI_RANK": ("PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    }
    for rank_name, (size_name, local_rank_name, local_size_name) in names.items():
        if rank_name not in environ or size_name not in environ:
            continue
        rank, size = number_in(environ, rank_name), number_in(environ, size_name)
        if size == 1:
            return None
        local_size = number_in(environ, local_size_name, size)
        job = environ.get("PMIX_NAMESPACE")
        return Launch(
            "MPI",
            World(
                rank,
                size,
                local_rank=number_in(environ, local_rank_name, rank % local_size),
                node_rank=rank // local_size,
                local_size=local_size,
            ),
            environ.get("MASTER_ADDR") or (LOOPBACK if local_size == size else None),
            number_in(environ, "MASTER_PORT", 12000 + zlib.crc32(job.encode()) % 20000 if job else _DEFAULT_PORT),
        )
    return None


def _check(launch: Launch) -> None:
    world, launcher = launch.world, launch.launcher
    if not (0 <= world.rank < world.size and 0 <= world.local_rank < world.local_size <= world.size):
        problem = f"{launcher} set a rank that is out of range"
        raise RoomierError("RANK", str(world), problem, "Check RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE")
    if world.size % world.local_size:
        problem = f"must be a multiple of {world.local_size}, the number of ranks on this node"
        raise RoomierError("WORLD_SIZE", world.size, problem, "Start the same number of processes on each node")
    if launch.address is None:
        problem = f"{launcher} started {world.size} ranks on {launch.num_nodes} nodes without the address of rank 0"
        raise RoomierError("MASTER_ADDR", None, problem, "Set MASTER_ADDR to the host name of the first node")


def number_in(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return the integer in the environment variable named ``name``, or ``default`` if the variable is not set.

    Raises:
        RoomierError: the value is not an integer.
    """
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError as error:
        raise _wrong(name, text, "must be an integer") from error


def _wrong(name: str, value: str | None, problem: str) -> RoomierError:
    action = "Unset this environment variable if no launcher started this process"
    if name.startswith("ROOMIER_"):
        action = "Unset this environment variable, or set it to an integer"
    return RoomierError(name, value, problem, action)


_RANGES = re.compile(r"\[(\w+)[^]]*\]")  # the numbers of several hosts
_COUNT = re.compile(r"(?P<count>\d+)(\(x(?P<times>\d+)\))?")


def first_host(text: str) -> str:
    """Return the first host of a SLURM list: ``"a[1-2]b,c"`` becomes ``"a1b"``."""
    host = _RANGES.sub(r"\1", text).partition(",")[0]
    if not host or "[" in host or "]" in host:
        raise _wrong("SLURM_STEP_NODELIST", text, "must be a SLURM list of hosts")
    return host


def tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks on each node: ``"2(x3),1"`` becomes ``[2, 2, 2, 1]``.

    Raises:
        ValueError: ``text`` is not a list of tasks per node.
    """
    counts: list[int] = []
    for part in text.split(","):
        found = _COUNT.fullmatch(part.strip())
        if found is None:
            raise ValueError(text)
        counts += [int(found["count"])] * int(found["times"] or 1)
    return counts
