"""Predictions that are computed one at a time, on request."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any, TypeVar

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
from roomier.train.predicting.roll_call import RollCall
from roomier.train.step import transfer_of

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
        with suppress(GeneratorExit), evaluation_mode(run.module, "predict"), RollCall(run.ranks) as roll_call:
            yield from _all(run, roll_call)
        run.engine.settle()


def _all(run: Run, roll_call: RollCall) -> Iterator[Any]:
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
    run: Run, source: Source, limit: float, dataloader_idx: int | None, roll_call: RollCall
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
            of_round = run.ranks.gather((run.now.batch_number, output) if counts else None, allows_pickle=True)
            for _, each in sorted((one for one in of_round if one is not None), key=lambda one: one[0]):
                yield each
        output = None


def _after_roll_call(rounds: Iterator[T], roll_call: RollCall) -> Iterator[T]:
    """Yield the items of ``rounds``. Before each item, wait until all ranks are present. All ranks reach the end
    together."""
    while True:
        roll_call.wait()
        try:
            yield next(rounds)
        except StopIteration:
            return
