"""Rendezvous: every rank reports to rank 0, and rank 0 answers when all ranks have reported.

The rendezvous of torch cannot report which ranks are missing. Each rendezvous uses separate keys, because the store can
still contain the keys of earlier ranks if torchrun restarted the ranks.
"""

from __future__ import annotations

import json
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import timedelta

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from roomier.core.errors import RoomierError
from roomier.core.loopback import LOOPBACK, interface_of, is_loopback
from roomier.core.world import World

_POLL_S = 0.02
_ROUND = "roomier/round"


def meet(
    world: World, store: Store, timeout_s: float, ended_rank: Callable[[], tuple[int, str] | None] = lambda: None
) -> str:
    """Wait until all ranks call this function.

    Args:
        ended_rank: function that returns the number of a started rank that has ended, and a description of its end. It
            returns None if this process started no rank that has ended.

    Returns:
        A prefix for the keys of this rendezvous.

    Raises:
        RoomierError: a rank has ended, ranks did not connect within ``timeout_s``, or the launcher gave the ranks
            different world sizes.
    """
    until = time.monotonic() + timeout_s
    if world.rank > 0:
        return _answer(world, store, until, timeout_s)
    return _call(world, store, until, timeout_s, ended_rank)


def open_store(world: World, environ: Mapping[str, str], timeout_s: float) -> TCPStore:
    """Open the store at ``MASTER_ADDR:MASTER_PORT``. Rank 0 serves the store, unless torchrun serves it.

    If all ranks run on this machine, rank 0 serves the store on the loopback interface, regardless of ``MASTER_ADDR``.
    If ``MASTER_ADDR`` is an IPv4 address of this machine, the store listens only on this address. Otherwise, the store
    listens on all addresses.

    Raises:
        RoomierError: the store cannot be reached within ``timeout_s``, or rank 0 cannot listen on the port.
    """
    address, port = environ["MASTER_ADDR"], environ["MASTER_PORT"]
    is_served_by_torchrun = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not is_served_by_torchrun and (world.is_one_node or is_loopback(address)):
        address = LOOPBACK
    is_server = world.rank == 0 and not is_served_by_torchrun
    try:
        if is_server and interface_of(address) is not None:
            return serve(address, timeout_s, int(port))
        return TCPStore(
            address, int(port), is_master=is_server, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
        )
    except (DistError, OSError) as error:
        if is_server:
            action = "Set MASTER_PORT to a free port, the same for all ranks"
            problem = f"rank 0 cannot listen on this port of {address}: {str(error).partition(chr(10))[0]}"
            raise RoomierError("MASTER_PORT", port, problem, action) from error
        problem = f"rank {world.rank} could not connect to rank 0 within {timeout_s:g} s"
        action = "Check that rank 0 is running, that its host name resolves on this node, and that the port is open"
        raise RoomierError("MASTER_ADDR", f"{address}:{port}", problem, action) from error


def serve(address: str, timeout_s: float, port: int = 0) -> TCPStore:
    """Serve a store that listens only on ``address``. A socket that TCPStore opens itself listens on all interfaces.

    Args:
        address: an IPv4 address of this machine.
        port: number of the port; 0 selects a free port.

    Raises:
        OSError: the socket cannot be opened, for example because the port is taken.
    """
    listener = socket.create_server((address, port))
    return TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store closes this socket, whether or not it uses libuv
    )


def connect_again(store: TCPStore, timeout_s: float) -> TCPStore:
    """Open and return another connection to the server of ``store``."""
    return TCPStore(store.host, store.port, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def _call(
    world: World, store: Store, until: float, timeout_s: float, ended_rank: Callable[[], tuple[int, str] | None]
) -> str:
    """On rank 0, call the other ranks, collect their answers, and publish all answers."""
    meeting = f"roomier/{uuid.uuid4().hex}"
    store.set(_ROUND, meeting)
    answers: dict[str, str] = {}
    while missing := [rank for rank in range(1, world.size) if str(rank) not in answers]:
        for rank in missing:
            if store.check([f"{meeting}/{rank}"]):
                answers[str(rank)] = store.get(f"{meeting}/{rank}").decode()
        if missing and (ended := ended_rank()) is not None:
            rank, how = ended
            action = "See the output of this rank above. Every rank runs the same command and must reach the same call"
            raise RoomierError("rank", rank, how, action) from DistError(f"rank {rank} {how}")
        if time.monotonic() > until:
            problem = f"of {world.size} ranks, these did not connect within {timeout_s:g} s: {_shown(missing)}"
            action = "Check the logs of these ranks. Every rank must reach the same call"
            raise RoomierError("rank", missing[0], problem, action)
        time.sleep(_POLL_S)
    store.set(f"{meeting}/all", json.dumps({"answers": answers, "world": asdict(world)}))
    _check_equal(world, answers)
    return meeting


def _answer(world: World, store: Store, until: float, timeout_s: float) -> str:
    """On the other ranks, answer calls until rank 0 publishes the answer of this rank. A call may belong to an earlier
    rendezvous."""
    mine = json.dumps({"name": uuid.uuid4().hex, "size": world.size, "local_size": world.local_size})
    answered = None
    while True:
        if store.check([_ROUND]):
            meeting = store.get(_ROUND).decode()
            if meeting != answered:
                store.set(f"{meeting}/{world.rank}", mine)
                answered = meeting
            if store.check([f"{meeting}/all"]):
                published = json.loads(store.get(f"{meeting}/all"))
                if published["answers"].get(str(world.rank)) == mine:
                    _check_equal(World(**published["world"]), published["answers"])
                    return meeting
        if time.monotonic() > until:
            problem = f"rank 0 did not start the rendezvous of {world.size} ranks within {timeout_s:g} s"
            raise RoomierError("rank", world.rank, problem, "Check the logs of rank 0 and of the other ranks")
        time.sleep(_POLL_S)


def _check_equal(zero: World, answers: Mapping[str, str]) -> None:
    for rank, answer in sorted(answers.items(), key=lambda item: int(item[0])):
        found = json.loads(answer)
        if (found["size"], found["local_size"]) != (zero.size, zero.local_size):
            of_rank = f"{found['size']} ranks with {found['local_size']} per node"
            problem = f"rank {rank} expects {of_rank}, but rank 0 expects {zero.size} with {zero.local_size}"
            raise RoomierError("devices", zero.local_size, problem, "Start the same number of processes on each node")


def _shown(ranks: list[int], limit: int = 16) -> str:
    text = ", ".join(map(str, ranks[:limit]))
    return text if len(ranks) <= limit else f"{text} and {len(ranks) - limit} more"
