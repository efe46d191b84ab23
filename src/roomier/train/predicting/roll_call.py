"""Synchronization of all ranks before each round of a prediction stream.

[Note: roll call]
Ranks predict together, because they all-gather sharded weights in forward and outputs after the forward pass. However,
user code runs between two predictions and may exit the stream on only one rank, with ``break``, ``close`` or an error.
The other ranks would then wait in a collective that the exited rank never enters.

Therefore, before each round, each rank announces that it is present or that it has left. The rank starts the round only
after it has received the announcements of all ranks. The announcements are written to the store of the process group,
not sent in a collective. A rank can therefore leave at any time without waiting, including during garbage collection
and at the end of the process.
"""

from __future__ import annotations

import atexit
import time
import uuid
from contextlib import suppress
from types import TracebackType
from typing import Self

from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore, Store

from roomier.core import torch_private
from roomier.core.errors import RoomierError
from roomier.core.log import notice
from roomier.core.ranks import Ranks

REPORT_AFTER_S = 30.0
GIVE_UP_AFTER_S = 1800.0  # the same timeout as for collectives, because user code can process a prediction slowly
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.05
_ERROR_COMES_WITHIN_S = 1.0  # a failed rank reports its error within this time after it has left the stream
_HERE, _LEFT = "here", "left"


class RollCall:
    """Context in which this rank participates in a stream. A rank that exits the context early informs the other ranks.

    Args:
        ranks: the ranks of the stream. All ranks must create a RollCall at the same point.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._world = ranks.world
        self._num_rounds = 0
        self._store: Store | None = None
        if not ranks.is_alone:
            name = ranks.from_zero(f"roomier/predict_stream/{uuid.uuid4().hex}")
            self._store = PrefixStore(name, torch_private.default_store())

    def __enter__(self) -> Self:
        atexit.register(self._leave)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        atexit.unregister(self._leave)
        if kind is not None:
            self._leave()

    def wait(self) -> None:
        """Wait until all ranks are present for the next round.

        Raises:
            RoomierError: a rank has left the stream, or a rank has not requested a prediction within the timeout.
        """
        if self._store is None:
            return
        self._store.set(self._key(self._world.rank), _HERE)
        left = [rank for rank, word in enumerate(self._announcements(self._store)) if word == _LEFT]
        self._num_rounds += 1  # before any error below, because this rank has joined the round
        if left:
            raise _left(left) from (DistError(f"ranks {left} have failed") if _have_failed() else None)
        if self._num_rounds > 1:  # all ranks are present, so no rank will read the previous round again
            self._store.delete_key(f"{self._num_rounds - 2}/{self._world.rank}")

    def _announcements(self, store: Store) -> list[str]:
        """Return the announcements of all ranks, in the order of the ranks."""
        began_s, pause_s, is_reported = time.monotonic(), _FIRST_PAUSE_S, False
        keys = [self._key(rank) for rank in range(self._world.size)]
        while not store.check(keys):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            waited_s = time.monotonic() - began_s
            if waited_s < (GIVE_UP_AFTER_S if is_reported else REPORT_AFTER_S):
                continue
            absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
            if not absent:
                break
            if is_reported:
                problem = f"have requested no prediction for {waited_s:.0f} s, but this rank waits for them"
                action = "Iterate over the stream on every rank. Run code that concerns only one rank after the stream"
                raise RoomierError("predict_stream", f"ranks {absent}", problem, action)
            waits = f"rank {self._world.rank} waits for ranks {absent} to request the next prediction"
            notice(f"predict_stream: {waits}; every rank must request the same number of predictions", every_rank=True)
            is_reported = True
        return [store.get(key).decode() for key in keys]

    def _leave(self) -> None:
        if self._store is not None:
            with suppress(DistError, RuntimeError):  # rank 0 has exited, which closed the store
                self._store.set(self._key(self._world.rank), _LEFT)

    def _key(self, rank: int) -> str:
        return f"{self._num_rounds}/{rank}"


def _left(ranks: list[int]) -> RoomierError:
    problem = "left the stream before its end, but this rank requests another prediction"
    action = "Iterate to the end of the stream on all ranks, or leave the stream at the same prediction"
    return RoomierError("predict_stream", f"ranks {ranks}", problem, action)


def _have_failed() -> bool:
    from roomier.launch.group import failure_is_reported  # late import: a single process needs no process group

    return failure_is_reported(_ERROR_COMES_WITHIN_S)
