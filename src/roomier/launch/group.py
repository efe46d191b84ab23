"""Create the default process group: start the other ranks if necessary, and connect all ranks."""

from __future__ import annotations

import atexit
import gc
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from roomier.core import torch_private
from roomier.core.device.resolve import group_backend, resolve_device
from roomier.core.errors import RoomierError, TrainingError
from roomier.core.loopback import interface_of, keep_on_loopback
from roomier.core.ranks import COLLECTIVE_TIMEOUT
from roomier.core.world import World
from roomier.launch import heartbeat
from roomier.launch.environment import STARTED_BY_ROOMIER, Launch, export, launch_of
from roomier.launch.failure import FailureNews
from roomier.launch.lighthouse import LIGHTHOUSE, Lighthouse
from roomier.launch.meet import connect_again, meet, open_store
from roomier.launch.start import start_ranks
from roomier.launch.survivors import KillWatch
from roomier.launch.watch import Children

JOIN_TIMEOUT = "ROOMIER_JOIN_TIMEOUT_S"
"""Name of an environment variable: maximum time in seconds that ranks wait for each other at the start (default:
600)."""

# This limit must be longer than operations that only rank 0 runs, such as a download or a write of a large file.

_NUM_FILES = 24  # files that a rank opens in addition to one connection per rank

_news: FailureNews | None = None
_watch_kills: Callable[[], KillWatch | None] | None = None


def should_report(error: BaseException) -> bool:
    """Return whether this rank must report ``error``, which terminates the rank: True unless another rank failed first
    with the same error."""
    return _news is None or _news.claim(f"{type(error).__name__}: {error}")


def failure_is_reported(within_s: float) -> bool:
    """Wait up to ``within_s`` seconds, and return whether a rank reports the error that terminates it."""
    return _news is not None and _news.is_reported(within_s)


def initialize(world: World, device_type: str) -> None:
    """Initialize the default process group.

    Raises:
        RoomierError: the ranks cannot be started, or the rendezvous fails.
    """
    global _news
    timeout_s = float(os.environ.get(JOIN_TIMEOUT, 600))
    if launch_of(os.environ) is None:
        _check_open_files(world)
        store, children = start_ranks(world)
        _news = children.main = FailureNews(world, children.news)
    else:
        store, children, _news = None, None, FailureNews(world)
    _news.install()
    choose_interface(world, os.environ["MASTER_ADDR"], os.environ)
    store = store or open_store(world, os.environ, timeout_s)
    _join(world, device_type, store, children, _news)
    atexit.register(_leave)


def _join(world: World, device_type: str, store: TCPStore, children: Children | None, news: FailureNews) -> None:
    global _watch_kills
    timeout_s = float(os.environ.get(JOIN_TIMEOUT, 600))
    meeting = meet(world, store, timeout_s, (lambda: None) if children is None else children.news)

    def connect() -> PrefixStore:
        return PrefixStore(meeting, connect_again(store, timeout_s))

    torch_private.hide_cpp_warnings()
    news.world, news.store = world, connect()
    _check_open_files(world)  # if the check fails here, the other ranks end
    _connect(world, device_type, PrefixStore(meeting, store), news, timeout_s)
    if children is not None:
        children.have_met = True
    heartbeat.prepare(world, connect, news)
    if STARTED_BY_ROOMIER not in os.environ or device_type != "cpu":
        return

    def watch_kills() -> KillWatch | None:
        again = partial(_join, device_type=device_type, children=children, news=news)
        lighthouse = None
        if not world.is_one_node:
            host, address = _own_address_towards(os.environ["MASTER_ADDR"]), os.environ.get(LIGHTHOUSE)
            if host is None or address is None:
                return None
            lighthouse = Lighthouse(address, meeting, world.rank, host)
        watch = KillWatch(world, connect(), children, partial(_rejoin, again, store), lighthouse)
        news.continues = watch.continues_without_silent_ranks
        return watch

    _watch_kills = watch_kills


def watch_kills() -> KillWatch | None:
    """Watch for killed ranks, without which the run continues; None if another launcher started the ranks, if they run
    on accelerators, or if they run on several machines without a lighthouse.

    Raises:
        RoomierError: the ranks run on several machines, and the lighthouse cannot be used.
    """
    return None if _watch_kills is None else _watch_kills()


def _rejoin(join: Callable[..., None], store: TCPStore, world: World, other_store: TCPStore | None) -> None:
    assert _news is not None
    _leave(waits=False)  # the lost ranks publish no last record
    store = other_store or store
    os.environ.update(MASTER_ADDR=store.host, MASTER_PORT=str(store.port))
    export(Launch("roomier", world), os.environ)
    hook = sys.excepthook
    if world.size > 1:
        join(world, store=store)
    sys.excepthook = hook  # torch added its hook again


def adopt(world: World) -> None:
    """Connect the exchange of failures and the heartbeat to the store of the process group that Ray Train initialized.

    Ray calls the user's function in a thread and reports the errors that this function raises, so roomier handles no
    uncaught exceptions. Ray also destroys the process group.

    Raises:
        RoomierError: the group has no backend for the CPU, or other ranks do not call this function.
    """
    global _news
    if _news is not None:
        return
    if "cpu:" not in dist.get_backend_config():
        problem = "cannot exchange objects in host memory"
        action = "Pass torch_config=TorchConfig(backend='cpu:gloo,cuda:nccl') to ray.train.torch.TorchTrainer"
        raise RoomierError("torch_config", dist.get_backend_config(), problem, action)
    store, _news = torch_private.default_store().clone(), FailureNews(world)
    meeting = meet(world, store, float(os.environ.get(JOIN_TIMEOUT, 600)))
    torch_private.hide_cpp_warnings()
    _news.store = PrefixStore(meeting, store)
    heartbeat.prepare(world, lambda: PrefixStore(meeting, store.clone()), _news)


def _check_open_files(world: World) -> None:
    """Check that this process can open its sockets. torch's errors do not name the limit."""
    import resource  # late import: does not exist on Windows

    most, num_needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], _NUM_FILES + world.size
    if most < num_needed:
        problem = f"is too small a limit: a rank of {world.size} opens at least {num_needed} files and sockets"
        raise RoomierError("ulimit -n", most, problem, f"Run `ulimit -n {max(1024, num_needed)}` before the command")


def _connect(world: World, device_type: str, store: PrefixStore, news: FailureNews, timeout_s: float) -> None:
    # torch also uses the timeout of collectives as the time limit for connecting the ranks. A shorter timeout would
    # apply to all collectives, so a thread limits the time for connecting instead.
    is_connected = threading.Event()
    threading.Thread(target=news.watch_connecting, args=(is_connected, timeout_s), daemon=True).start()
    try:
        dist.init_process_group(
            group_backend(device_type),
            store=store,
            rank=world.rank,
            world_size=world.size,
            timeout=COLLECTIVE_TIMEOUT,
            device_id=None if device_type == "cpu" else resolve_device(device_type),
        )
    finally:
        is_connected.set()


@contextmanager
def exits_together(where: Callable[[], str], describe: Callable[[int], str]) -> Iterator[None]:
    """Raise an error if this rank exits with code 0 inside the context while other ranks continue.

    Args:
        where: function that returns the current position in the run, for messages.
        describe: function that returns the name of a rank, for messages.

    Raises:
        TrainingError: this rank exits with code 0, but other ranks do not exit.
    """
    if _news is None:  # the process group was initialized by the user
        yield
        return
    before, _news.where, _news.describe = _news.where, where, describe
    try:
        with _reported_exit(_news):
            yield
    except SystemExit as exit:
        if exit.code not in (None, 0):
            _news.claim(f"SystemExit: {exit.code}")
            raise
        missing = _news.wait_for_exits()
        if not missing:
            raise
        problem = f"exited with code 0 {where()}, but ranks {missing} did not exit"
        action = "Exit on all ranks in the same step, or set trainer.should_stop = True, which stops all ranks"
        raise TrainingError("rank", _news.world.rank, problem, action) from exit
    except KeyboardInterrupt:
        _news.claim("KeyboardInterrupt")
        raise
    _news.where = before


@contextmanager
def _reported_exit(news: FailureNews) -> Iterator[None]:
    """If this process started the other ranks, report ``os._exit(0)`` inside the context, and exit with code 1 instead.

    Otherwise, the exit code of the command would be 0, although training is incomplete. The exit code of another rank
    is reported by the process that started it.
    """
    original, pid = os._exit, os.getpid()

    def leave(status: int) -> NoReturn:
        if status == 0 and os.getpid() == pid:  # a forked process also ends with this function
            problem = f"rank {news.world.rank} called os._exit(0) {news.where()}, so the run is incomplete"
            sys.stderr.write(f"roomier: {problem}\n")
            sys.stderr.flush()
            status = 1
        original(status)

    if os.environ.get(STARTED_BY_ROOMIER) == str(pid):
        os._exit = leave
    try:
        yield
    finally:
        os._exit = original


def _leave(*, waits: bool = True) -> None:
    # If a process group still exists when the interpreter exits, threads of the group can abort the process. These
    # threads are joined when the last reference to the process group is deleted. Sharded models contain such references
    # in cycles, which the garbage collector deletes.
    heartbeat.close(waits=waits)
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


_ANYWHERE = "192.0.2.1"  # this address is reserved for documentation (RFC 5737), so packets to it use the default route


def choose_interface(world: World, address: str, environ: MutableMapping[str, str]) -> None:
    """Set the network interface of gloo. If all ranks run on one machine, also set the interface of NCCL. An interface
    that the user has set is not changed.

    By default, gloo uses the interface to which the host name resolves. If the host name does not resolve, gloo has no
    interface. On many Linux systems, the host name resolves to the loopback interface, over which other nodes are
    unreachable.

    Args:
        address: host name or IP address of rank 0.
    """
    if world.is_one_node:
        keep_on_loopback(environ)
    elif "GLOO_SOCKET_IFNAME" not in environ and (name := _interface_towards(address)) is not None:
        environ["GLOO_SOCKET_IFNAME"] = name


def _interface_towards(address: str) -> str | None:
    own = _own_address_towards(address)
    return None if own is None else interface_of(own)


def _own_address_towards(address: str) -> str | None:
    try:
        target = socket.gethostbyname(address)
    except OSError:
        return None
    if target.startswith("127.") and address not in ("localhost", target):
        target = _ANYWHERE  # rank 0 may resolve its own host name to the loopback interface
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 1))  # this call sends no packet; the system only selects the route
        except OSError:
            return None
        own: str = probe.getsockname()[0]
    return own
