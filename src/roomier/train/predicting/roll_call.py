"""Whether all ranks go on with a stream of predictions: asked before each round of batches.

[Note: roll call]
Ranks predict together: weights that are cut are gathered in the forward, outputs behind it. But the code between two
predictions is the user's, and may leave the stream (``break``, ``close``, an error) on one rank alone. The others would
wait for it in a collective that it never enters.

So each rank says that it is there before each round, or that it is not coming any more, and none begins a round without
the word of all. It is left in the store of the process group and not sent in a collective: who leaves waits for nobody,
and may do so at any time, a garbage collection or the end of the process included.
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

TELL_AFTER_S = 30.0
GIVE_UP_AFTER_S = 1800.0  # as long as a collective waits; what the user does with a prediction may take its time
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.05
_ERROR_COMES_WITHIN_S = 1.0  # an error ends the stream on its way to where it is told
_HERE, _LEFT = "here", "left"


class RollCall:
    """Inside, this rank takes part in a stream; behind it the others are told that it has left, unless it came to the
    end.

    Args:
        ranks: of the stream. All of them make one at the same place.
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
        """Until all ranks are here for the next round.

        Raises:
            RoomierError: one has left the stream, or asks for nothing and has not left it either.
        """
        if self._store is None:
            return
        self._store.set(self._key(self._world.rank), _HERE)
        left = [rank for rank, word in enumerate(self._heard(self._store)) if word == _LEFT]
        self._num_rounds += 1  # before the error: this rank was here
        if left:
            raise _left(left) from (DistError(f"ranks {left} have failed") if _have_failed() else None)
        if self._num_rounds > 1:  # all are here, so nobody looks at the round before any more
            self._store.delete_key(f"{self._num_rounds - 2}/{self._world.rank}")

    def _heard(self, store: Store) -> list[str]:
        """The word of each rank, by rank."""
        began_s, pause_s, is_told = time.monotonic(), _FIRST_PAUSE_S, False
        keys = [self._key(rank) for rank in range(self._world.size)]
        while not store.check(keys):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            waited_s = time.monotonic() - began_s
            if waited_s < (GIVE_UP_AFTER_S if is_told else TELL_AFTER_S):
                continue
            absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
            if not absent:
                break
            if is_told:
                problem = f"have asked for no prediction in {waited_s:.0f} s, and this rank waits for them"
                action = (
                    "Take the predictions of the stream on every rank; what one of them does for itself comes after"
                )
                raise RoomierError("predict_stream", f"ranks {absent}", problem, action)
            waits = f"rank {self._world.rank} waits for ranks {absent} to ask for the next one"
            notice(f"predict_stream: {waits}; every rank must take as many", every_rank=True)
            is_told = True
        return [store.get(key).decode() for key in keys]

    def _leave(self) -> None:
        if self._store is not None:
            with suppress(DistError, RuntimeError):  # rank 0 is gone, and the store with it
                self._store.set(self._key(self._world.rank), _LEFT)

    def _key(self, rank: int) -> str:
        return f"{self._num_rounds}/{rank}"


def _left(ranks: list[int]) -> RoomierError:
    problem = "left the stream before its end, and this rank asks for another prediction"
    action = "Let all ranks come to the end of the stream, or leave it at the same prediction"
    return RoomierError("predict_stream", f"ranks {ranks}", problem, action)


def _have_failed() -> bool:
    from roomier.launch.group import failure_is_told  # late: one process needs no group

    return failure_is_told(_ERROR_COMES_WITHIN_S)
