"""Exchange of values between the ranks of a run, on the host. With one rank, each call returns its input.

These calls are for work between steps, for example to shard a batch, to agree on a value, or to reduce metrics at log
steps. Every rank must make the same calls in the same order. The code in ``techniques/parallel/`` exchanges the tensors
of a model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from roomier.core import torch_private
from roomier.core.daemon import in_daemon
from roomier.core.mesh import INNER, OUTER, Mesh
from roomier.core.wire import decode, encode
from roomier.core.world import World

T = TypeVar("T")
_ANNOUNCED = "roomier/announced_error"
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
_NEVER_SENT = 2**31 - 1  # tag that no message has
_POLL_S = 0.5
_is_lost: threading.Event | None = None  # see stop_waiting_after


class Ranks:
    """Ranks of a run, which communicate over the process group that :mod:`roomier.launch` joined.

    Args:
        world: the position of this process among the ranks. Several ranks require an initialized ``torch.distributed``
            with a backend for the CPU (gloo).
        group: process group of the ranks, if it is not the default group: a group of some ranks, or an additional group
            of the same ranks, for calls from another thread.
        mesh: arrangement of the ranks. By default, all ranks read different samples.

    Attributes:
        data: one rank of each group of peers. Together, these ranks read each sample once. Use them to divide samples,
            and to collect values to which each sample contributes once. See :class:`roomier.core.mesh.Mesh`.
        peers: the ranks that read the same samples as this rank, including this rank.
    """

    def __init__(
        self, world: World | None = None, group: dist.ProcessGroup | None = None, mesh: Mesh | None = None
    ) -> None:
        self.world = world or World()
        self.mesh = mesh or Mesh(self.world)
        self._group = group
        self.data: Ranks = self
        self.peers: Ranks = self if self.world.size == 1 else self._of(World(), None, Mesh())
        assert self.world.size == 1 or self.world.size == dist.get_world_size(group)

    @cached_property
    def is_alone(self) -> bool:
        """True if this rank is the only rank."""
        return self.world.size == 1

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The process group of the ranks, for calls of ``torch.distributed``; None without a process group."""
        return self._group or dist.group.WORLD

    def arranged(self, mesh: Mesh) -> Ranks:
        """Return these ranks with the arrangement ``mesh``. All ranks must call this method, because it creates the
        process groups of :attr:`data` and :attr:`peers`."""
        assert mesh.world == self.world
        assert self.world.size % (mesh.shards.size * mesh.stage) == 0
        if mesh == self.mesh:
            return self
        arranged = self._of(self.world, self._group, mesh)
        if mesh.num_peers > 1:
            arranged.peers, arranged.data = arranged.along(*INNER), arranged.along(*OUTER)
            arranged.data.peers = arranged.peers
        return arranged

    def along(self, *dimensions: str) -> Ranks:
        """Return the ranks whose coordinates in :attr:`mesh` differ from those of this rank only in ``dimensions``.

        At the first call, all ranks of the run must call this method, because it creates a process group.
        """
        numbers = self.mesh.along(*dimensions)
        if len(numbers) == self.world.size:
            return self
        world = self.mesh.data if dimensions == OUTER else World(numbers.index(self.world.rank), len(numbers))
        return self._of(world, _group_of(numbers), Mesh(world))

    def among(self, parts: Iterable[Sequence[int]]) -> Ranks | None:
        """Return the ranks of the one of ``parts`` that includes this rank; None if there is none. All ranks of the run
        must call this method with the same parts, because it creates process groups."""
        found = None
        for numbers in parts:
            group = _group_of(tuple(sorted(numbers)), 0)
            if self.world.rank in numbers:
                world = World(sorted(numbers).index(self.world.rank), len(numbers))
                found = self._of(world, group, Mesh(world))
        return found

    def channels(self, num: int) -> list[dist.ProcessGroup]:
        """Return ``num`` process groups of these ranks, whose messages are independent. All ranks of the run must call
        this method."""
        return [_group_of(tuple(range(self.world.size)), channel) for channel in range(1, num + 1)]

    def _of(self, world: World, group: dist.ProcessGroup | None, mesh: Mesh) -> Ranks:
        return Ranks(world, group, mesh)

    def exchange_pairwise(self, device: torch.device) -> bool:
        """Return whether shards of a model on ``device`` are sent from rank to rank by point-to-point calls (gloo)."""
        return device.type == "cpu"

    @property
    def is_zero(self) -> bool:
        """True on rank 0, which writes files and prints messages."""
        return self.world.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of ``values`` over all ranks. The shape, dtype and device type of ``values`` must be equal on
        all ranks."""
        if self.is_alone:
            return values
        total = values.clone()
        dist.all_reduce(total, group=self._group)
        return total

    def max(self, values: Tensor) -> Tensor:
        """Return the maximum of ``values`` over all ranks, with the conditions of :meth:`sum`."""
        if self.is_alone:
            return values
        largest = values.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        return largest

    def any(self, flag: bool) -> bool:
        """Return whether ``flag`` is true on any rank."""
        return flag if self.is_alone else any(self.gather(flag))

    def gather(self, value: T, *, allows_pickle: bool = False) -> list[T]:
        """Return a list of the ``value`` of each rank, in rank order, on every rank.

        Args:
            allows_pickle: if True, pickle objects that are not plain data. Use this option only for values that come
                from the user. See :mod:`roomier.core.wire`.

        Raises:
            RoomierError: ``value`` contains an object that cannot be sent.
        """
        if self.is_alone:
            return [value]
        own = encode(value, allows_pickle=allows_pickle)
        sizes = torch.empty(self.world.size, 1, dtype=torch.int64)
        dist.all_gather(list(sizes), torch.tensor([len(own)]), group=self._group)
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        of_all = torch.empty(self.world.size, len(padded), dtype=torch.uint8)
        dist.all_gather(list(of_all), padded, group=self._group)
        rows = zip(of_all.numpy(), sizes.flatten().tolist(), strict=True)
        return [decode(row[:size].tobytes(), allows_pickle=allows_pickle) for row, size in rows]

    def from_zero(self, value: T, *, allows_pickle: bool = False) -> T:
        """Return the ``value`` of rank 0 on every rank. Data ranks return the value of data rank 0 of the first peer.

        Args:
            allows_pickle: see :meth:`gather`.
        """
        if not self.is_alone:
            data = bytearray(encode(value, allows_pickle=allows_pickle)) if self.is_zero else bytearray()
            size = torch.tensor([len(data)])
            dist.broadcast(size, group_src=0, group=self._group)
            sent = torch.frombuffer(data or bytearray(int(size)), dtype=torch.uint8)
            dist.broadcast(sent, group_src=0, group=self._group)
            value = value if self.is_zero else decode(sent.numpy().tobytes(), allows_pickle=allows_pickle)
        is_divided = self.data is self and not self.peers.is_alone
        return self.peers.from_zero(value, allows_pickle=allows_pickle) if is_divided else value

    def on_zero(self, function: Callable[[], T]) -> T:
        """Call ``function`` on rank 0 only. Every rank returns the result of ``function``, or raises the error of rank
        0.

        If the error cannot be sent, the other ranks raise a RuntimeError with the text of this error.
        """
        if self.is_alone:
            return function()
        outcome: tuple[Any, Exception | None] = (None, None)
        if self.is_zero:
            try:
                outcome = (function(), None)
            except Exception as error:
                self.from_zero((None, sendable(error)))
                raise
        value, raised = self.from_zero(outcome)
        if raised is not None:
            raise raised
        result: T = value
        return result

    def barrier(self) -> None:
        """Wait until every rank calls this method."""
        if not self.is_alone:
            dist.barrier(group=self._group)


_groups: dict[tuple[tuple[int, ...], int | None], dist.ProcessGroup] = {}
_default_group: Any = None  # default process group to which the cached groups belong


def _group_of(numbers: tuple[int, ...], channel: int | None = None) -> dist.ProcessGroup:
    """Return the process group of the ranks ``numbers``, which is created once for the default process group.

    Args:
        channel: number of the group among groups of the same ranks that all ranks of the run create together. If None,
            only the ranks ``numbers`` create the group. All of them must have created the same number of groups, from
            which torch derives the name of the group.
    """
    global _default_group
    if dist.get_backend() == "fake":  # a dry run
        return _new_group(numbers, channel)
    if dist.group.WORLD is not _default_group:
        _default_group = dist.group.WORLD
        _groups.clear()
    if (numbers, channel) not in _groups:
        _groups[numbers, channel] = _new_group(numbers, channel)
    return _groups[numbers, channel]


def _new_group(numbers: tuple[int, ...], channel: int | None) -> dist.ProcessGroup:
    with torch_private.without_interception():
        group: dist.ProcessGroup = dist.new_group(
            list(numbers), timeout=COLLECTIVE_TIMEOUT, use_local_synchronization=channel is None
        )
    return group


def announce(error: Exception) -> None:
    """Report ``error`` to the other ranks without a collective, before this rank raises it. See :func:`announced`."""
    with suppress(dist.DistError, RuntimeError):  # the process that serves the store may have ended
        torch_private.default_store().set(_ANNOUNCED, encode(error))


def close_connections(group: dist.ProcessGroup | None = None) -> None:
    """Close the gloo connections of ``group`` to the other ranks, so that ranks that wait for this rank in gloo fail.

    Args:
        group: process group; None means the default group.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for distance in range(1, size):  # a connection to a rank that has ended fails without closing the others
        with suppress(RuntimeError):  # after a timeout, gloo closes all connections
            work = dist.irecv(torch.empty(1), group=group, group_src=(rank + distance) % size, tag=_NEVER_SENT)
            assert work is not None
            work.wait(timedelta(milliseconds=1))


def stop_waiting_after(is_lost: threading.Event | None) -> None:
    """Let :func:`wait_unless_lost` stop waiting after ``is_lost`` is set; None waits in every case."""
    global _is_lost
    _is_lost = is_lost


def wait_unless_lost(wait: Callable[[], None]) -> None:
    """Call ``wait``, which waits for other ranks.

    gloo can lose the error of a transfer whose connection was closed, and no call wakes a thread that waits for this
    transfer. In a run that continues without killed ranks, a separate thread therefore calls ``wait``, and is abandoned
    if a rank was killed.

    Raises:
        DistError: a rank was killed before ``wait`` returned.
    """
    if (is_lost := _is_lost) is None:
        return wait()
    ended = in_daemon(wait, "roomier-wait")
    while not futures.wait([ended], _POLL_S).done:
        if is_lost.is_set():
            raise dist.DistError("another rank was killed")
    return ended.result()


def announced() -> Exception | None:
    """Return the error that another rank announced; None if there is no such error.

    A rank calls this function if a collective failed. If another rank has ended, its error is the cause.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    if _is_lost is not None and _is_lost.is_set():  # the store can be lost, too
        return None
    with suppress(dist.DistError, RuntimeError):  # the process that serves the store may have ended
        store = torch_private.default_store()
        if store.check([_ANNOUNCED]):
            error: Exception = decode(store.get(_ANNOUNCED))
            return error
    return None


def sendable(error: Exception) -> Exception:
    """Return ``error`` if it can be sent, otherwise a RuntimeError with the text of ``error``."""
    with suppress(Exception):  # the constructor of the error's class can raise any error
        decode(encode(error))
        return error
    return RuntimeError(f"{type(error).__name__} on rank 0: {error}")
