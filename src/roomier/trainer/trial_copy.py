"""The Trainer of a trial, which has the settings of another Trainer and retains no state after the trial."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from roomier.api.callback import Callback
from roomier.loggers.silent import SilentLogger
from roomier.plan import Plan
from roomier.run.options import LoopOptions
from roomier.run.progress import Progress
from roomier.run.states import TrainerState
from roomier.trainer.attributes import TrainerAttributes

T = TypeVar("T", bound=TrainerAttributes)


def copied_for_trial(trainer: T, plan: Plan, options: LoopOptions, callback: Callback) -> T:
    """Return a Trainer that has the settings of ``trainer`` and writes no files. The only callback of the new Trainer
    is ``callback``."""
    trial = copy.copy(trainer)
    own = vars(trial)
    own.update({name: _container(value) for name, value in own.items()})
    own["options"] = options
    trial.callbacks = [callback]
    trial.loggers, trial.file_loggers = [SilentLogger()] if trainer.loggers else [], []
    trial.plan = trial.requested_plan = plan
    trial.logger_is_on = trial.enable_checkpointing = False
    trial.state = TrainerState()
    trial.set_path = None
    trial.forget_runs(Progress())
    trial.predict_loop = trainer.predict_loop
    return trial


def _container(value: Any) -> Any:
    """Return a copy of a list, dict or set. Return any other value unchanged."""
    if isinstance(value, dict):
        return {name: _container(item) for name, item in value.items()}
    return copy.copy(value) if isinstance(value, (list, set)) else value
