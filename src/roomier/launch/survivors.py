"""Ranks that continue after other ranks were killed: they learn of the loss, agree on the survivors, and meet again.

On one machine, rank 0 started the other ranks, so it learns first that one was killed. It publishes the loss in the
store of the rendezvous, which a thread of each rank reads. This thread then closes the connections of all process
groups, because a rank whose connection to the killed rank is not in use would otherwise wait for ranks that have
already failed. On several machines, the ranks whose collectives fail first publish the loss, and torchft's lighthouse
determines the ranks that are left. A node that has lost a rank ends, so all nodes keep the same number of ranks.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from roomier.core import torch_private
from roomier.core.errors import TrainingError
from roomier.core.ranks import announce, announced, close_connections, sendable, stop_waiting_after
from roomier.core.world import World
from roomier.launch.failure import PATIENCE_S
from roomier.launch.lighthouse import Lighthouse
from roomier.launch.meet import serve
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
        folder: new folder, through which this survivor passes its state to the others.
        nodes: previous numbers of the nodes of the survivors, in the order of their new numbers.
        store: address of the store of the new process group; None for the previous store.
    """

    ranks: list[int]
    lost: list[str]
    step: int
    source: int
    folder: str
    nodes: list[int] | None = None
    store: str | None = None

    def world_of(self, world: World) -> World:
        """Return the new position of the rank whose position was ``world``."""
        rank, size = self.ranks.index(world.rank), len(self.ranks)
        if self.nodes is None:
            return World(rank, size, local_rank=rank, local_size=size)
        return replace(world, rank=rank, size=size, node_rank=self.nodes.index(world.node_rank))


class KillWatch:
    """Thread that learns that a rank was killed, and then ends the collectives of this process.

    Args:
        world: position of this process.
        store: connection to the store that no other thread uses, with keys of the current rendezvous.
        children: the ranks that this process started; None on the other ranks.
        rejoin: function that leaves the process group and creates a new one, in which this process has the given
            position. The store of the rendezvous is the given one, or the previous one.
        lighthouse: connection to the lighthouse; required if the ranks run on several machines.
    """

    def __init__(
        self,
        world: World,
        store: Store,
        children: Children | None,
        rejoin: Callable[[World, TCPStore | None], None],
        lighthouse: Lighthouse | None = None,
    ) -> None:
        self._world, self._store, self._children = world, store, children
        self._rejoin, self._lighthouse = rejoin, lighthouse
        self._is_lost, self._stop = threading.Event(), threading.Event()
        if lighthouse is None and children is not None:
            children.may_lose = True
        stop_waiting_after(self._is_lost)
        self._thread = threading.Thread(target=self._watch, name="roomier-lost", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread. If a rank is killed afterwards, the run ends."""
        self._stop.set()
        self._thread.join(1.0)  # the process that serves the store may not answer
        stop_waiting_after(None)
        if self._lighthouse is not None:
            self._lighthouse.close()
        if self._children is not None:
            self._children.may_lose = False

    def continues_without_silent_ranks(self) -> bool:
        """End the collectives of this process until :meth:`close`, because the machine of other ranks may have lost
        power. Return False if the run cannot continue without them."""
        if self._lighthouse is None or self._stop.is_set():
            return False
        self._is_lost.set()
        while not self._stop.wait(_POLL_S):
            _close_all()
        return True

    def survivors(self, progress: tuple[int, bool], place: Path, timeout_s: float) -> Survivors | None:
        """Agree with the other ranks on the survivors. Every survivor must call this method.

        Args:
            progress: step of which this rank has the complete state, or -1 if it has none; and True if no work is left
                in this step. The survivor with the largest value is the source.
            place: folder for the folder of the state. On several machines, all nodes must share it.
            timeout_s: maximum time to wait for the other survivors in seconds.

        Returns:
            The survivors; None if the run ends, for example because no rank was killed.

        Raises:
            TrainingError: a survivor does not call this method in time.
        """
        if self._lighthouse is not None:
            return self._members(self._lighthouse, progress, place, timeout_s)
        if not self._is_lost.wait(PATIENCE_S):
            return None
        store, until = self._store, time.monotonic() + timeout_s
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

    def _members(
        self, lighthouse: Lighthouse, progress: tuple[int, bool], place: Path, timeout_s: float
    ) -> Survivors | None:
        if announced() is not None:
            return None
        if not self._is_lost.is_set():
            self._is_lost.set()
            with suppress(DistError, RuntimeError):  # rank 0 and its store may have ended
                self._store.set(_LOST, "")
        world, store = self._world, ""
        if world.local_rank == 0:
            self._server = serve(lighthouse.host, timeout_s)
            store = f"{lighthouse.host}:{self._server.port}"
        data = {"progress": progress, "node": world.node_rank}
        try:
            found = lighthouse.members(store, data, timeout_s)
        except (RuntimeError, TimeoutError) as error:
            problem = f"the lighthouse did not determine the ranks that are left: {error}"
            action = "Start the run again with ckpt_path='last'"
            raise TrainingError("rank", world.rank, problem, action) from error
        num_by_node = Counter(each["node"] for _, each in found.values())
        nodes = sorted(node for node, number in num_by_node.items() if number == world.local_size)
        if world.node_rank not in nodes or len(found) == world.size:
            return None
        ranks = sorted(rank for rank, (_, each) in found.items() if each["node"] in nodes)
        source = max(ranks, key=lambda rank: found[rank][1]["progress"])
        if self._children is not None:
            self._children.keep(ranks)
        lost = [f"node {node} was lost" for node in range(world.size // world.local_size) if node not in nodes]
        folder = place / f"roomier-state-{lighthouse.run.rpartition('/')[2]}"
        folder.mkdir(parents=True, exist_ok=True)
        step = found[source][1]["progress"][0]
        return Survivors(ranks, lost, step, source, str(folder), nodes, found[ranks[0]][0])

    def end_others(self, error: Exception) -> None:
        """Let the ranks of other machines end with ``error``, which ends this rank."""
        if self._lighthouse is not None:
            announce(sendable(error))
            _close_all()

    def rejoin(self, survivors: Survivors) -> None:
        """Leave the process group, and create one of ``survivors``. Every survivor must call this method after
        :meth:`close`."""
        store = None
        if survivors.store is not None:
            host, _, port = survivors.store.rpartition(":")
            is_server = survivors.ranks[0] == self._world.rank
            store = self._server if is_server else TCPStore(host, int(port), wait_for_workers=False)
        self._rejoin(survivors.world_of(self._world), store)

    def _sleep(self, until: float, rank: int) -> None:
        if time.monotonic() > until:
            action = "Start the run again with ckpt_path='last'"
            raise TrainingError("rank", rank, "did not continue after the loss of another rank", action)
        time.sleep(_POLL_S)

    def _watch(self) -> None:
        with suppress(DistError, RuntimeError):  # rank 0 and its store may have ended
            while not self._stop.wait(_POLL_S):
                if self._children is not None and any(code < 0 for code in self._children.codes().values()):
                    self._store.set(_LOST, "")
                if self._is_lost.is_set() or self._store.check([_LOST]):
                    self._is_lost.set()
                    _close_all()  # again in each round, because groups can be new
            return
        if self._lighthouse is not None:
            self._is_lost.set()
            while not self._stop.wait(_POLL_S):
                _close_all()


def _close_all() -> None:
    for group in torch_private.process_groups():
        with suppress(ValueError):  # the training thread has destroyed this group
            close_connections(group)
