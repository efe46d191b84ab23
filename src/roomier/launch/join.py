"""The process group of a run: joined when the first run begins, left when the process ends."""

from __future__ import annotations

import atexit
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from roomier.core.errors import RoomierError
from roomier.core.ranks import Ranks
from roomier.core.world import World
from roomier.launch.environment import launch_of
from roomier.launch.failure import FailureNews
from roomier.launch.meet import connect_again, meet, open_store
from roomier.launch.network import choose_interface
from roomier.launch.start import start_ranks

JOIN_TIMEOUT = "ROOMIER_JOIN_TIMEOUT_S"
"""Environment variable: how many seconds the ranks wait for each other at the start (600)."""

_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
# Longer than rank 0 takes for what it does alone, such as a download or a large file.
_COLLECTIVE_TIMEOUT = timedelta(minutes=30)

_news: FailureNews | None = None


def join(world: World, device_type: str) -> Ranks:
    """The ranks of ``world``, once they have found each other. A process group that is there already is used.

    Where nobody started the other ranks of this machine, they are started here.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``: where the tensors are that the ranks exchange.

    Raises:
        RoomierError: they cannot be started, or did not come; or the group that is there is another one.
    """
    if world.size == 1:
        return Ranks(world)
    if device_type not in _BACKENDS:
        action = "Use accelerator='cpu', or strategy='single'"
        raise RoomierError("accelerator", device_type, "several ranks cannot exchange tensors of it", action)
    if device_type == "cuda":
        torch.cuda.set_device(_device_index(world))
    if not dist.is_initialized():
        _initialise(world, device_type)
    if dist.get_world_size() != world.size or dist.get_rank() != world.rank:
        found = f"rank {dist.get_rank()} of {dist.get_world_size()}"
        problem = f"the process group that is initialised says {found}, the run needs rank {world.rank} of {world.size}"
        raise RoomierError("devices", world.local_size, problem, "Let roomier initialise it, or make both agree")
    return Ranks(world)


def is_worth_telling(error: BaseException) -> bool:
    """Whether ``error``, which ends this rank, has not been told by another rank already."""
    return _news is None or _news.claim(f"{type(error).__name__}: {error}")


def _initialise(world: World, device_type: str) -> None:
    global _news
    timeout_s = float(os.environ.get(JOIN_TIMEOUT, 600))
    if launch_of(os.environ) is None:
        store, children = start_ranks(world)
        _news = news = FailureNews(world, children.news)
        children.main_is_failing = lambda: news.is_failing
    else:
        store, _news = None, FailureNews(world)
    _news.install()
    choose_interface(world, os.environ["MASTER_ADDR"], os.environ)
    store = store or open_store(world, os.environ, timeout_s)
    meeting = meet(world, store, timeout_s)
    _news.store = PrefixStore(meeting, connect_again(store, timeout_s))
    dist.init_process_group(
        _BACKENDS[device_type],
        store=PrefixStore(meeting, store),
        rank=world.rank,
        world_size=world.size,
        timeout=_COLLECTIVE_TIMEOUT,
        device_id=torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else None,
    )
    atexit.register(_leave)


def _device_index(world: World) -> int:
    """The CUDA device of this rank. Where the launcher shows each rank one device only, it is that one.

    Raises:
        RoomierError: there are fewer devices than ranks.
    """
    count = torch.cuda.device_count()
    if world.local_rank < count and (world.local_size <= count or count > 1):
        if world.local_size > count:
            raise _too_few(world, count)
        return world.local_rank
    if count == 1 and "CUDA_VISIBLE_DEVICES" in os.environ:
        return 0
    raise _too_few(world, count)


def _too_few(world: World, count: int) -> RoomierError:
    problem = f"this machine shows {count} CUDA devices, and each rank needs one"
    return RoomierError("devices", world.local_size, problem, f"Use devices={count}, or accelerator='cpu'")


def _leave() -> None:
    if dist.is_initialized():  # else threads of the group abort the process when the interpreter ends
        dist.destroy_process_group()
