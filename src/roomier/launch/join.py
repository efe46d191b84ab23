"""Functions that join the process group of a run. A process joins when its first run begins and leaves when the process
ends."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from roomier.core.device.names import visible_devices_variable
from roomier.core.device.resolve import group_backend
from roomier.core.errors import RoomierError
from roomier.core.ranks import Ranks
from roomier.core.world import World
from roomier.launch.ray_run import ray_run


def join(world: World, device_type: str) -> Ranks:
    """Join the process group, and return the ranks of ``world``. An initialized process group is reused.

    If no launcher started the other ranks of this machine, this function starts these ranks.

    Args:
        device_type: device type of the tensors that the ranks exchange, such as ``"cpu"`` or ``"cuda"``.

    Raises:
        RoomierError: the ranks cannot be started, the rendezvous fails, or the initialized process group does not match
            the requested ranks.
    """
    if world.size == 1:
        return Ranks(world)
    if group_backend(device_type) is None:
        action = "Use accelerator='cpu' or strategy='single'"
        raise RoomierError("accelerator", device_type, "does not support several ranks", action)
    if device_type != "cpu":
        torch.accelerator.set_device_index(_device_index(world, device_type))
    from roomier.launch import group  # late import: a single rank does not need it

    if not dist.is_initialized():
        group.initialize(world, device_type)
    elif ray_run() is not None:
        group.adopt(world)
    if dist.get_world_size() != world.size or dist.get_rank() != world.rank:
        found = f"rank {dist.get_rank()} of {dist.get_world_size()}"
        problem = f"the initialized process group has {found}, but the run requires rank {world.rank} of {world.size}"
        action = "Let roomier initialize the process group, or initialize it with the same rank and world size"
        raise RoomierError("devices", world.local_size, problem, action)
    return Ranks(world)


def exits_together(
    ranks: Ranks, where: Callable[[], str], describe: Callable[[int], str]
) -> AbstractContextManager[None]:
    """Call :func:`roomier.launch.group.exits_together`. If there is only one rank, this rank can exit at any time."""
    if ranks.is_alone:
        return nullcontext()
    from roomier.launch import group

    return group.exits_together(where, describe)


def _device_index(world: World, device_type: str) -> int:
    """Return the index of the device of this rank. The index is 0 if the launcher makes one device visible to each
    rank.

    Raises:
        RoomierError: the machine has fewer devices than ranks.
    """
    count = torch.accelerator.device_count()
    if world.local_size <= count:
        return world.local_rank
    is_chosen = visible_devices_variable(device_type) in os.environ
    if count == 1 and is_chosen and "SLURM_PROCID" in os.environ:
        return 0
    problem = f"each rank requires a {device_type} device, but this machine has only {count}"
    raise RoomierError("devices", world.local_size, problem, f"Use devices={count}, or accelerator='cpu'")
