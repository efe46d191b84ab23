"""Ranks that continue after other ranks were killed: they learn of the loss, agree on the survivors, and meet again.

Rank 0 started the other ranks, so it learns first that one was killed. It publishes the loss in the store of the
rendezvous, which a thread of each rank reads. This thread then closes the connections of all process groups, because a
rank whose connection to the killed rank is not in use would otherwise wait for ranks that have already failed.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from roomier.core import torch_private
from roomier.core.errors import TrainingError
from roomier.core.ranks import close_connections, stop_waiting_after
from roomier.core.world import World
from roomier.launch.failure import PATIENCE_S
from roomier.launch.watch import Children, ended

_POLL_S = 0.05
_LOST, _SURVIVORS = "roomier/lost", "roomier/survivors"


@dataclass(frozen=True)
class Survivors:
    """The ranks that continue.

    Attributes:
        ranks: previous numbers of the survivors, in the order of their new numbers.
        lost: descriptions of the ends of the other ranks.
        step: newest step of which a survivor has the complete state; -1 if there is none.
        source: previous number of a survivor that has the state of ``step``.
        folder: empty folder in memory, through which this survivor passes its state to the others.
    """

    ranks: list[int]
    lost: list[str]
    step: int
    source: int
    folder: str

    def world_of(self, world: World) -> World:
        """Return the new position of the rank whose position was ``world``."""
        rank, size = self.ranks.index(world.rank), len(self.ranks)
        return World(rank, size, local_rank=rank, local_size=size)


class KillWatch:
    """Thread that learns that a rank was killed, and then ends the collectives of this process.

    Args:
        world: position of this process.
        connect: function that opens a connection to the store, with keys of the current rendezvous.
        children: the ranks that this process started; None on the other ranks.

    Attributes:
        rejoin: function that leaves the process group and creates a new one, in which this process has the given
            position. Every survivor must call it after :meth:`close`.
    """

    def __init__(
        self,
        world: World,
        connect: Callable[[], Store],
        children: Children | None,
        rejoin: Callable[[World], None],
    ) -> None:
        self._world, self._connect, self._children = world, connect, children
        self.rejoin = rejoin
        self._is_lost, self._stop = threading.Event(), threading.Event()
        if children is not None:
            children.may_lose = True
        stop_waiting_after(self._is_lost)
        self._thread = threading.Thread(target=self._watch, name="roomier-lost", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread. If a rank is killed afterwards, the run ends."""
        self._stop.set()
        self._thread.join()
        stop_waiting_after(None)
        if self._children is not None:
            self._children.may_lose = False

    def survivors(self, progress: tuple[int, bool], place: Path, timeout_s: float) -> Survivors | None:
        """Agree with the other ranks on the survivors. Every survivor must call this method.

        Args:
            progress: step of which this rank has the complete state, or -1 if it has none; and True if no work is left
                in this step. The survivor with the largest value is the source.
            place: folder in which rank 0 creates the folder for the state.
            timeout_s: maximum time to wait for the other survivors in seconds.

        Returns:
            The survivors; None if the run ends, for example because no rank was killed.

        Raises:
            TrainingError: a survivor does not call this method in time.
        """
        if not self._is_lost.wait(PATIENCE_S):
            return None
        store, until = self._connect(), time.monotonic() + timeout_s
        store.set(f"{_SURVIVORS}/{self._world.rank}", json.dumps(progress))
        while self._children is None and not store.check([_SURVIVORS]):
            self._sleep(until, 0)
        while self._children is not None and not store.check([_SURVIVORS]):
            lost = self._children.codes()
            if not lost:  # this process ends the run, because a rank failed otherwise
                return None
            ranks = [rank for rank in range(self._world.size) if rank not in lost]
            missing = [rank for rank in ranks if not store.check([f"{_SURVIVORS}/{rank}"])]
            if missing:
                self._sleep(until, missing[0])
                continue
            found = {rank: json.loads(store.get(f"{_SURVIVORS}/{rank}")) for rank in ranks}
            source = max(found, key=found.__getitem__)
            ends = [f"rank {rank} {ended(code)}" for rank, code in lost.items()]
            folder = tempfile.mkdtemp(prefix="roomier-state-", dir=place)  # only this user can write to this folder
            self._children.keep(ranks)
            store.set(_SURVIVORS, json.dumps([ranks, ends, found[source][0], source, folder]))
        return Survivors(*json.loads(store.get(_SURVIVORS)))

    def _sleep(self, until: float, rank: int) -> None:
        if time.monotonic() > until:
            action = "Start the run again with ckpt_path='last'"
            raise TrainingError("rank", rank, "did not continue after the loss of another rank", action)
        time.sleep(_POLL_S)

    def _watch(self) -> None:
        with suppress(DistError, RuntimeError):  # rank 0 and its store may have ended
            store = self._connect()
            while not self._stop.wait(_POLL_S):
                if self._children is not None and any(code < 0 for code in self._children.codes().values()):
                    store.set(_LOST, "")
                if self._is_lost.is_set() or store.check([_LOST]):
                    self._is_lost.set()
                    for group in torch_private.process_groups():  # again in each round, because groups can be new
                        with suppress(ValueError):  # the training thread has destroyed this group
                            close_connections(group)
