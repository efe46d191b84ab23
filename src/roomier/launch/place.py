"""Determine the rank of this process, and check that the launcher started the requested ranks."""

from __future__ import annotations

import os

import torch.distributed as dist

from roomier.core.errors import PlanError, RoomierError
from roomier.core.world import World
from roomier.launch.environment import Launch, export, launch_of, node_of
from roomier.launch.start import forget_if_stale

_OPTIONS = {
    "Ray": {"devices": "num_workers"},
    "torchrun": {"devices": "--nproc-per-node", "num_nodes": "--nnodes"},
    "SLURM": {"devices": "--ntasks-per-node", "num_nodes": "--nodes"},
}


def present_launch() -> Launch | None:
    """Return the launch of this process. If a launcher started this process as a rank, also write the settings of the
    launch to environment variables. If the user initialized a process group of several ranks, return a launch that
    describes this group. Otherwise, return None.

    Raises:
        RoomierError: the variables of the launcher are inconsistent.
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
    """Return the position of this process among ``devices`` ranks on each of ``num_nodes`` nodes.

    Without a launch, this process is the first rank of its node, and the environment variables of the node contain its
    index (:func:`roomier.launch.environment.node_of`).

    Raises:
        PlanError: the launcher started a different number of ranks.
        RoomierError: the index of the node is out of range.
    """
    if launch is None:
        size = devices * num_nodes
        node = node_of(os.environ) if num_nodes > 1 else None
        if node is None:
            return World(0, size, local_size=devices)
        if node.size not in (None, num_nodes):
            problem = f"does not match the {node.size} nodes that {node.launcher} started"
            raise PlanError("num_nodes", num_nodes, problem, "Set num_nodes='auto', or start the same number of nodes")
        if not 0 <= node.rank < num_nodes:
            action = f"Set {node.rank_name} to the index of this node, counted from 0"
            raise RoomierError(node.rank_name, node.rank, f"must be from 0 to {num_nodes - 1}", action)
        return World(node.rank * devices, size, node_rank=node.rank, local_size=devices)
    counts = {"devices": (devices, launch.world.local_size), "num_nodes": (num_nodes, launch.num_nodes)}
    for name, (wanted, started) in counts.items():
        if wanted != started:
            what = "processes on each node" if name == "devices" else "nodes"
            problem = f"does not match the {started} {what} that {launch.launcher} started"
            raise PlanError(name, wanted, problem, _fix(launch, name, wanted))
    return launch.world


def _fix(launch: Launch, name: str, wanted: int) -> str:
    if launch.launcher == "roomier":
        return f"Use the same {name} in all Trainers of a script, or move the other run to a separate script"
    option = _OPTIONS.get(launch.launcher, {}).get(name)
    return f"Set {name}='auto', or start {wanted}{f' with {option}={wanted}' if option else ''}"
