"""Forward passes of a rank with several stages of a pipeline. Only the pass of its last stage counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from roomier.core.device.events import Events
from roomier.core.device.rng import preserved_rng, rng_state, set_rng_state
from roomier.engine.staged import StagedEngine
from roomier.run.logged.muted import Undo, state_of
from roomier.run.run import Run
from roomier.techniques.pipeline.units import find_units

Start = Callable[..., Any]
Transfer = Callable[[Any], Any]


class EarlierPasses:
    """Contexts of the passes that run the step for all stages of a rank except its last stage.

    Logged values and random numbers of such a pass do not count. The attributes and buffers of the modules outside of
    units have separate values for each stage: a pass begins with the values that the previous micro-batch of the step
    left on its stage, so a counter in ``training_step``, for example, has the same value as on a single device. Each
    step begins with the values of the last stage.

    Args:
        run: run to which the steps belong.
    """

    def __init__(self, run: Run) -> None:
        self._results, self._now, self._events = run.results, run.now, run.events
        units = find_units(run.engine.module, run.engine.blocks).values()
        inside = {part for unit in units for part in unit.modules()}
        self._outside = [each for each in run.module.modules() if each not in inside]
        self._states: dict[int, Undo] = {}  # functions that set the values of each stage
        self._generators: dict[int, Any] = {}  # random states after the transfer of each micro-batch

    @contextmanager
    def __call__(self, stage: int, step: Any, batch: Any, index: int | None) -> Iterator[None]:
        results, now = self._results, self._now
        before, batch_idx = (results.is_in_batch, results.batch, results.is_muted), now.batch_idx
        restore = state_of(self._outside)
        if index:
            self._states[stage]()
        results.is_muted = True
        try:
            with preserved_rng():
                if index is not None:
                    results.is_in_batch, results.batch = True, batch
                    step.batch_idx = now.batch_idx = step.first_batch + index
                    self._seed(index)
                yield
        finally:
            results.is_in_batch, results.batch, results.is_muted = before
            if index is not None:
                self._states[stage] = state_of(self._outside)
                step.batch_idx = now.batch_idx = batch_idx
            restore()

    def seeded(self, start: Start, transfer: Transfer | None) -> tuple[Start, Transfer | None]:
        """Return the functions that start and transfer a micro-batch. Each pass of a micro-batch begins with the same
        random state."""

        def seeded_start(batch: Any, index: int) -> Any:
            self._seed(index)
            return start(batch, index)

        def remembered_transfer(batch: Any) -> Any:
            assert self._events is not None
            assert transfer is not None
            index = self._events.index
            moved = self._events.seeded(transfer)(batch)
            self._generators[index] = rng_state()
            return moved

        return seeded_start, None if transfer is None else remembered_transfer

    def _seed(self, index: int) -> None:
        assert self._events is not None
        if index in self._generators:
            set_rng_state(self._generators[index])
        else:
            self._events.seed_generators(index)


def passes_of(run: Run) -> EarlierPasses | None:
    """Return the contexts of the earlier passes in ``run``, and install them in its engine; None if a rank has at most
    one stage."""
    engine = run.engine
    if not (isinstance(engine, StagedEngine) and engine.has_earlier_passes):
        return None
    if engine.earlier_pass is None:
        engine.earlier_pass = EarlierPasses(run)
    assert isinstance(engine.earlier_pass, EarlierPasses)
    return engine.earlier_pass


def seeded(run: Run, events: Events, start: Start, transfer: Transfer | None) -> tuple[Start, Transfer | None]:
    """Return the functions that start and transfer a micro-batch, the first of which seeds the generators before any
    code of the user."""
    passes = passes_of(run)
    if passes is not None:
        return passes.seeded(start, transfer)
    return (events.seeded(start), None) if transfer is None else (start, events.seeded(transfer))
