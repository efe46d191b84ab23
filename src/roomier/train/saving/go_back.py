"""Return of a running fit to its newest checkpoint; see [Note: rollback] in ``callbacks/spike_guard.py``."""

from __future__ import annotations

from roomier.api.go_back import GoBackError
from roomier.core.device.rng import set_rng_state
from roomier.core.errors import TrainingError
from roomier.core.log import notice
from roomier.run.run import Run
from roomier.train.saving.restore import restore
from roomier.train.saving.save import settle_background_save


def go_back(run: Run, error: GoBackError) -> None:
    """Restore the newest checkpoint of the run as a resumed run does.

    Raises:
        TrainingError: the run has no checkpoint.
    """
    settle_background_save(run)
    path, step = run.saves.path, run.saves.step
    if path is None:
        problem = f"{error.reason}, but the run has no checkpoint to return to"
        action = "Add ModelCheckpoint(every_n_train_steps=...), or skip bad steps before the update"
        raise TrainingError("loss", None, problem, action) from error
    run.results.is_in_batch, run.results.batch = False, None
    run.source.close()
    restore(run, path)
    run.saves.deferred.clear()
    run.now.is_finishing, run.now.is_in_step = False, True
    run.saves.state_at_end = run.now.last_loss = None
    if run.now.random_state is not None:
        set_rng_state(run.now.random_state)
    if run.ranks.is_zero:
        notice(f"the run returns to step {step}: {path}")
