"""Start the other ranks of this machine with the command of this process and the environment variables of each rank.

The process that the user started becomes the first rank of its node when its first run begins. The other ranks run the
same script from the beginning, as with torchrun.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import MutableMapping
from dataclasses import replace

import psutil
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from roomier.core.errors import RoomierError
from roomier.core.loopback import LOOPBACK
from roomier.core.world import World
from roomier.launch.command import command_again
from roomier.launch.environment import RANK_VARIABLES, STARTED_BY_ROOMIER, Launch, export, number_in
from roomier.launch.meet import serve
from roomier.launch.watch import Children, watch_parent

MAX_DEVICES = "ROOMIER_MAX_DEVICES"
"""Name of an environment variable: maximum number of ranks that roomier starts on this machine (default: 4 per core,
but at least 16)."""

_STORE_TIMEOUT_S = 60.0  # timeout of one request
_NUM_THREADS_AT_IMPORT = torch.get_num_threads()


def forget_if_stale(environ: MutableMapping[str, str]) -> None:
    """Remove the variables of a rank from ``environ`` if this process only inherited these variables from a rank.

    If this process is a rank, start watching the process that started this rank.

    Raises:
        SystemExit: the process that started this rank has ended.
    """
    if STARTED_BY_ROOMIER not in environ:
        return
    starter = int(environ[STARTED_BY_ROOMIER])
    if os.getpid() == starter:
        return
    if os.getppid() == starter and environ.get("LOCAL_RANK") != "0":
        watch_parent(starter)
        return
    if not psutil.pid_exists(starter):
        raise SystemExit("roomier: the process that started this rank has ended")
    for name in RANK_VARIABLES:
        environ.pop(name, None)


def start_ranks(world: World) -> tuple[TCPStore | None, Children]:
    """Start the other ranks of this node. This process becomes the first rank of the node.

    Returns:
        The store of the rendezvous (None if ranks also run on other machines), and the started ranks.

    Raises:
        RoomierError: the command cannot be run again, the address of rank 0 is unknown, or there are too many ranks.
    """
    _check_number(world.local_size)
    command = command_again(world.local_size)
    store = None
    if world.local_size == world.size:
        # The store starts before the other ranks, so no other process can take the port of the store.
        store = serve(LOOPBACK, _STORE_TIMEOUT_S)
        address, port = LOOPBACK, store.port
    else:
        address, port = _given_address(world)
    environ = os.environ
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        environ.pop(name, None)
    export(Launch("roomier", world, address, port), environ)
    environ[STARTED_BY_ROOMIER] = str(os.getpid())
    num_threads = _share_cores(world.local_size)
    processes = {}
    for local_rank in range(1, world.local_size):
        of_rank = dict(environ)
        export(Launch("roomier", replace(world, rank=world.rank + local_rank, local_rank=local_rank)), of_rank)
        of_rank.setdefault("OMP_NUM_THREADS", str(num_threads))
        processes[world.rank + local_rank] = subprocess.Popen(
            command.words, env=of_rank, stdin=subprocess.DEVNULL, cwd=command.folder
        )
    return store, Children(processes)


def _check_number(num_ranks: int) -> None:
    num_cores = _num_cores()
    default = max(4 * num_cores, 16)
    most = default if MAX_DEVICES not in os.environ else number_in(os.environ, MAX_DEVICES)
    if num_ranks > most:
        problem = f"roomier starts at most {most} ranks on this machine, which has {num_cores} cores"
        action = f"Use devices={most} or fewer, or set the environment variable {MAX_DEVICES} to a larger number"
        raise RoomierError("devices", num_ranks, problem, action)


def _given_address(world: World) -> tuple[str, int]:
    names = ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    if missing:
        num_nodes = world.size // world.local_size
        torchrun = f"torchrun --nnodes={num_nodes} --nproc-per-node={world.local_size} --rdzv-endpoint=HOST:PORT ..."
        action = (
            f"Start the script on each node with `srun` in a SLURM allocation or with `{torchrun}`, or set "
            f"{', '.join(missing)}"
        )
        raise RoomierError("num_nodes", num_nodes, "roomier can start ranks only on one machine", action)
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def _share_cores(num_ranks: int) -> int:
    """Return the number of threads per rank. Unless the user has set a number, also set this number in this process."""
    num_threads = max(1, _num_cores() // num_ranks)
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() == _NUM_THREADS_AT_IMPORT:
        torch.set_num_threads(min(num_threads, _NUM_THREADS_AT_IMPORT))
    return num_threads


def _num_cores() -> int:
    """Return the number of cores that this process can use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
