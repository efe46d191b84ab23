"""Callbacks that report the metrics of a run to Optuna or Ray Tune, which can end the run early."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from roomier.api.module import Module
from roomier.api.trainer_view import TrainerView
from roomier.callbacks.monitored import ChecksMetric, Monitored
from roomier.core.errors import RoomierError
from roomier.core.forms import count, fields


class OptunaPruning(ChecksMetric):
    """Callback that reports a metric to a trial of Optuna and ends the run if the study prunes the trial.

    A pruned run ends at the next save point, like a run that :class:`EarlyStopping` stops. Its ``fit`` then raises
    ``optuna.TrialPruned``, on all ranks. The step that the callback reports is the number of its earlier checks, so
    trials with different batch sizes are compared after the same number of validations.

    Args:
        trial: the trial that the objective receives. With several ranks, it must be a trial of
            :class:`roomier.sweeps.OptunaStudy`.
        monitor: the logged metric, which the study optimizes.
        check_on_train_epoch_end: check at the end of a training epoch (True) or of a validation (False). The default is
            the end of the epoch, unless an epoch has several validations or validation does not run in every epoch.

    Raises:
        RoomierError: the metric was not logged, or the study cannot prune trials on several ranks.
        optuna.TrialPruned: the study pruned the trial.

    Example:
        >>> trainer = roomier.Trainer(callbacks=[OptunaPruning(trial, monitor="val_loss")])
    """

    reads_parameters = False

    def __init__(self, trial: Any, monitor: str, check_on_train_epoch_end: bool | None = None) -> None:
        if not hasattr(trial, "should_prune"):
            action = "Pass the trial that the objective receives"
            raise RoomierError("OptunaPruning(trial)", trial, "must be a trial of Optuna", action)
        self._monitored = Monitored(type(self).__name__, monitor)
        self.check_on_train_epoch_end = check_on_train_epoch_end
        self._trial = trial
        self._num_checks = 0
        self._pruned: str | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"num_checks": self._num_checks}

    def check_stored_state(self, state: Any, place: str) -> None:
        """See :class:`roomier.api.callback.ChecksState`."""
        fields({"num_checks": count})(state, place)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._num_checks = state_dict["num_checks"]

    def setup(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if self._is_fitting:
            self._pruned = None
        from optuna import Trial  # late import: an optional package

        if isinstance(self._trial, Trial) and not trainer.ranks.is_alone:
            problem = f"belongs to one process, but the run has {trainer.world_size} ranks"
            action = "Create the study with roomier.sweeps.OptunaStudy instead of optuna.create_study"
            raise RoomierError("OptunaPruning(trial)", self._trial, problem, action)

    def _check(self, trainer: TrainerView) -> None:
        value = None if trainer.fast_dev_run else self._monitored.read(trainer)
        if value is None:
            return
        self._trial.report(value, self._num_checks)
        self._num_checks += 1
        if self._trial.should_prune():
            trainer.should_stop = True
            self._pruned = f"pruned at step {trainer.global_step} with {self._monitored.name} = {value:.6g}"

    def teardown(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        if self._pruned is not None and stage == "fit" and not trainer.interrupted:
            from optuna import TrialPruned  # late import: an optional package

            raise TrialPruned(self._pruned)


class RayTuneReport(ChecksMetric):
    """Callback that reports metrics to Ray Tune, whose scheduler can end the trial.

    If the scheduler ends the trial, the run ends at the next save point, like a run that :class:`EarlyStopping` stops.

    Args:
        metrics: names of the logged metrics; a dict maps the names for Ray to the names of logged metrics.
        checkpoint: if True, save a checkpoint for each report and pass it to Ray. A trial resumes from the folder of
            ``ray.tune.get_checkpoint()``, passed as ``ckpt_path``.
        check_on_train_epoch_end: report at the end of a training epoch (True) or of a validation (False). The default
            is the end of the epoch, unless an epoch has several validations or validation does not run in every epoch.

    Raises:
        RoomierError: Ray is not installed, or a metric was not logged.

    Example:
        >>> trainer = roomier.Trainer(callbacks=[RayTuneReport("val_loss")])
    """

    reads_parameters = False

    def __init__(
        self,
        metrics: str | Sequence[str] | Mapping[str, str],
        checkpoint: bool = False,
        check_on_train_epoch_end: bool | None = None,
    ) -> None:
        if not isinstance(metrics, Mapping):
            metrics = {name: name for name in ([metrics] if isinstance(metrics, str) else metrics)}
        if not metrics:
            raise RoomierError("RayTuneReport(metrics)", metrics, "has no names", "Use names passed to self.log")
        self._metrics = {shown: Monitored(type(self).__name__, name, "metrics") for shown, name in metrics.items()}
        self._monitored = next(iter(self._metrics.values()))
        self.check_on_train_epoch_end = check_on_train_epoch_end
        self._saves = checkpoint
        self._exit: SystemExit | None = None

    def setup(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if self._is_fitting:
            self._exit = None
        try:
            import ray.tune  # noqa: F401  # late import: an optional package
        except ImportError as error:
            problem = f"requires a package that is not installed ({error})"
            action = "Run: pip install 'roomier[sweeps]'"
            raise RoomierError("callbacks", type(self).__name__, problem, action) from error

    def _check(self, trainer: TrainerView) -> None:
        if trainer.fast_dev_run or self._exit is not None:
            return
        for monitored in self._metrics.values():
            monitored.was_validated = self._monitored.was_validated
        values = {shown: monitored.read(trainer) for shown, monitored in self._metrics.items()}
        if None in values.values():
            return
        if not self._saves:
            self._send(trainer, values, None)
            return
        path = Path(tempfile.mkdtemp(), "checkpoint")
        trainer.save_checkpoint(path, when_committed=partial(self._send, trainer, values, path))

    def _send(self, trainer: TrainerView, values: dict[str, float | None], path: Path | None) -> None:
        from ray.tune import Checkpoint, report  # late import: an optional package

        checkpoint = Checkpoint.from_directory(path) if path is not None else None
        try:
            report(values, checkpoint=checkpoint)  # Ray copies the checkpoint
        except SystemExit as error:  # the scheduler ends the trial
            trainer.should_stop = True
            self._exit = error
        finally:
            if path is not None:
                shutil.rmtree(path.parent, ignore_errors=True)

    def teardown(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        if self._exit is not None and stage == "fit" and not trainer.interrupted:
            raise self._exit
