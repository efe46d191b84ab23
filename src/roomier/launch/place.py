"""The place of this process among the ranks that are wanted, and that these are the ranks that were started."""

from __future__ import annotations

import os

import torch.distributed as dist

from roomier.core.errors import PlanError, RoomierError
from roomier.core.world import World
from roomier.launch.environment import Launch, export, launch_of, number_in
from roomier.launch.start import forget_if_stale

_OPTIONS = {
    "torchrun": {"devices": "--nproc-per-node", "num_nodes": "--nnodes"},
    "SLURM": {"devices": "--ntasks-per-node", "num_nodes": "--nodes"},
}


def present_launch() -> Launch | None:
    """The launch this process is a rank of; None where it stands alone. What is recognised is exported.

    Raises:
        RoomierError: the launcher contradicts itself.
    """
    forget_if_stale(os.environ)
    launch = launch_of(os.environ)
    if launch is not None:
        export(launch, os.environ)
        return launch
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        rank, size = dist.get_rank(), dist.get_world_size()
        return Launch("your process group", World(rank, size, local_rank=rank, local_size=size))
    return None


def place(devices: int, num_nodes: int, launch: Launch | None) -> World:
    """The place of this process among ``devices`` ranks on each of ``num_nodes``.

    Where nobody started it as a rank it is the first of its node. Which node that is, of several, ``NODE_RANK`` tells.

    Raises:
        PlanError: other ranks were started; names both numbers.
    """
    if launch is None:
        size = devices * num_nodes
        node_rank = number_in(os.environ, "NODE_RANK", 0) if num_nodes > 1 else 0
        if not 0 <= node_rank < num_nodes:
            raise RoomierError("NODE_RANK", node_rank, f"there are {num_nodes} nodes", "Number them from 0")
        return World(node_rank * devices, size, node_rank=node_rank, local_size=devices)
    counts = {"devices": (devices, launch.world.local_size), "num_nodes": (num_nodes, launch.num_nodes)}
    for name, (wanted, started) in counts.items():
        if wanted != started:
            what = "processes on each node" if name == "devices" else "nodes"
            raise PlanError(name, wanted, f"{launch.launcher} started {started} {what}", _fix(launch, name, wanted))
    return launch.world


def _fix(launch: Launch, name: str, wanted: int) -> str:
    if launch.launcher == "roomier":
        return f"Use the same {name} in all Trainers of a script, or put the other run into a script of its own"
    option = _OPTIONS.get(launch.launcher, {}).get(name)
    return f"Write {name}='auto', or start {wanted}{f': {option}={wanted}' if option else ''}"
