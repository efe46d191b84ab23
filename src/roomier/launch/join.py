"""The process group of a run: joined when the first run begins, left when the process ends."""

from __future__ import annotations

import atexit

import torch.distributed as dist

from roomier.core.errors import RoomierError
from roomier.core.ranks import Ranks
from roomier.core.world import World


def join(world: World, device_type: str) -> Ranks:
    """The ranks of ``world``, once they have found each other. A group that is there already is used.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``: where the tensors are that the ranks add up.

    Raises:
        RoomierError: the group that is there is another one.
    """
    if world.size == 1:
        return Ranks(world)
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo")
        atexit.register(_leave)
    if dist.get_world_size() != world.size or dist.get_rank() != world.rank:
        found = f"rank {dist.get_rank()} of {dist.get_world_size()}"
        problem = f"the process group that is initialised says {found}, the run needs rank {world.rank} of {world.size}"
        raise RoomierError("devices", world.local_size, problem, "Let roomier initialise it, or make both agree")
    return Ranks(world)


def _leave() -> None:
    if dist.is_initialized():  # else threads of the group abort the process when the interpreter ends
        dist.destroy_process_group()
