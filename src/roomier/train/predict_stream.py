"""Predictions that are computed one at a time, on request.

[Note: roll call]
Ranks predict together, because they all-gather sharded weights in the forward pass and outputs after it. However, user
code runs between two predictions and may exit the stream on only one rank, with ``break``, ``close`` or an error. The
other ranks would then wait in a collective that the exited rank never enters.

Before each round, each rank therefore announces that it is present or that it has left, and starts the round only after
it has received the announcements of all ranks. The announcements are written to the store of the process group instead
of being sent in a collective, so a rank can leave at any time without waiting, including during garbage collection and
at the end of the process.
"""

from __future__ import annotations

import atexit
import time
import uuid
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import Any, Self, TypeVar

from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore, Store

from roomier.core import torch_private
from roomier.core.errors import RoomierError
from roomier.core.log import notice
from roomier.core.ranks import Ranks
from roomier.data.source import Source
from roomier.run.run import Run, call
from roomier.train.evaluate import (
    batch_runner,
    evaluation_mode,
    on_host,
    take_statistics_of_rank_zero,
    turns,
    without_gradients,
)
from roomier.train.step import transfer_of

REPORT_AFTER_S = 30.0
GIVE_UP_AFTER_S = 1800.0  # the same timeout as for collectives, because user code can process a prediction slowly
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.05
_ERROR_COMES_WITHIN_S = 1.0  # a failed rank reports its error within this time after it has left the stream
_HERE, _LEFT = "here", "left"


class _RollCall:
    """Context in which this rank participates in a stream. A rank that exits the context early informs the other ranks.

    Args:
        ranks: the ranks of the stream. All ranks must create a _RollCall at the same point.
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


T = TypeVar("T")


def opened_stream(session: AbstractContextManager[Run]) -> Generator[Any, None, None]:
    """Return a generator that yields the output of ``predict_step`` for each batch of ``run.batches.evaluated``.

    The first value of the generator is None. The first request enters the context ``session``. The generator calls the
    same hooks as ``predict``. User code runs between the yielded values. The generator therefore resets the gradient
    mode and the logging stage before it yields a value.
    """
    with session as run:
        run.engine.settle()
        take_statistics_of_rank_zero(run)
        # If the generator is closed early, no error is raised, and the hooks at the end are not called.
        with suppress(GeneratorExit), evaluation_mode(run.module, "predict"), _RollCall(run.ranks) as roll_call:
            yield from _all(run, roll_call)
        run.engine.settle()


def _all(run: Run, roll_call: _RollCall) -> Iterator[Any]:
    results, hooks = run.results, run.hooks
    with without_gradients(run):
        call(hooks.on_predict_start)
        call(hooks.on_predict_epoch_start)
    yield None
    num_sources = len(run.batches.evaluated)
    for index, (source, limit) in enumerate(zip(run.batches.evaluated, run.batches.limits, strict=True)):
        yield from _of_source(run, source, limit, index if num_sources > 1 else None, roll_call)
    with without_gradients(run):
        results.stage, results.dataloader_idx, results.is_in_batch = "predict", None, False
        results.call(hooks.on_predict_epoch_end)
        run.log_metrics(results.end_epoch("predict"))
        call(hooks.on_predict_end)
    run.vote(waits=True)  # a signal that is received on one rank stops all ranks


def _of_source(
    run: Run, source: Source, limit: float, dataloader_idx: int | None, roll_call: _RollCall
) -> Iterator[Any]:
    """Yield the output of each batch. With several ranks, yield the outputs of all ranks after each round, in the order
    of the batches."""
    results, run_batch = run.results, batch_runner(run, "predict", dataloader_idx)
    run.engine.hooks.transfer = transfer_of(run, dataloader_idx or 0)
    for batch_idx, turn in enumerate(_after_roll_call(turns(run, source, source.turns(limit)), roll_call)):
        host_batch, run.now.batch_number, counts = turn
        with without_gradients(run):
            results.stage, results.dataloader_idx = "predict", dataloader_idx
            output = on_host(run, run_batch(host_batch, batch_idx, counts))
            results.stage = None
        if run.ranks.is_alone:
            yield output
        else:
            of_round = run.ranks.data.gather((run.now.batch_number, output) if counts else None, allows_pickle=True)
            for _, each in sorted((one for one in of_round if one is not None), key=lambda one: one[0]):
                yield each
        output = None


def _after_roll_call(rounds: Iterator[T], roll_call: _RollCall) -> Iterator[T]:
    """Yield the items of ``rounds``. Before each item, wait until all ranks are present. All ranks reach the end
    together."""
    while True:
        roll_call.wait()
        try:
            yield next(rounds)
        except StopIteration:
            return
