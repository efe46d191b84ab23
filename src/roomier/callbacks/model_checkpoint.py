"""ModelCheckpoint: callback that determines when a run is saved, the checkpoint names, and the checkpoints to keep."""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from roomier.api.callback import Callback
from roomier.api.module import Module
from roomier.api.trainer_view import TrainerView
from roomier.callbacks.checkpoint_folder import (
    DEFAULT_TEMPLATE,
    check_template,
    choose_name,
    find_complete,
    format_name,
    local_text,
    metrics_named_in,
    names_in,
    remove_saved,
)
from roomier.callbacks.checkpoint_ledger import Ledger, Retention, ledger_form
from roomier.callbacks.monitored import Monitored, acts_at_epoch_end, check_mode
from roomier.callbacks.on_exception_checkpoint import check_saves_weights, save_weights_after
from roomier.checkpoint.commit import at_home
from roomier.checkpoint.lightning import SUFFIX
from roomier.checkpoint.uploads import Uploads
from roomier.core.errors import CheckpointError, RoomierError, check_integer
from roomier.core.keywords import explain_unknown_keywords
from roomier.core.log import notice
from roomier.core.ranks import Ranks
from roomier.core.replacing import replacing_path
from roomier.core.units import parse_duration_s
from roomier.run.run import run_of
from roomier.storage.mirror import local_of, remote_of, shown


class Interval:
    """Time interval of ``length_s`` seconds, measured by the clock of rank 0. The interval restarts when it ends.

    To avoid communication in every step, rank 0 sets the number of steps until the next check: half of the steps that
    fit into the remaining time at the recent speed. An interval of any length therefore requires only a few checks.
    """

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self._began_s = self._checked_s = 0.0
        self._num_steps = self._num_until_check = 1

    def begin(self) -> None:
        """Start the interval."""
        self._began_s = self._checked_s = time.monotonic()
        self._num_steps = self._num_until_check = 1

    def is_over(self, ranks: Ranks) -> bool:
        """Return True if the interval has ended. Call this method in every step, on every rank."""
        self._num_until_check -= 1
        if self._num_until_check:
            return False
        is_over, self._num_until_check = ranks.from_zero(self._check(is_alone=ranks.is_alone))
        self._num_steps = self._num_until_check
        if is_over:
            self.begin()
        return is_over

    def _check(self, *, is_alone: bool) -> tuple[bool, int]:
        now_s = time.monotonic()
        left_s = self._length_s - (now_s - self._began_s)
        if left_s <= 0 or is_alone:
            return left_s <= 0, 1
        step_s = (now_s - self._checked_s) / self._num_steps
        self._checked_s = now_s
        return False, max(1, int(left_s / max(step_s, 1e-9) / 2))


LAST = "last"
FORMER = {
    "period": "Use every_n_epochs",
    "every_n_val_epochs": "Use every_n_epochs",
    "prefix": "Put it into filename",
    "save_best_only": "Use save_top_k=1 and monitor",
}


def check_arguments(of: Any) -> None:
    """Check the arguments of a ModelCheckpoint.

    Args:
        of: the callback.

    Raises:
        RoomierError: an argument is invalid.
    """
    if of.save_last not in (None, True, False, "link"):
        raise _wrong("save_last", of.save_last, "is unknown", "Use True, False, or 'link' (the same as True)")
    if of.format not in ("folder", "lightning"):
        raise _wrong("format", of.format, "is unknown", "Use 'folder', or 'lightning' for .ckpt files")
    if of._keep.last and of.filename == LAST:
        raise _wrong("filename", LAST, "is the name of the link that save_last creates", "Choose another name")
    check_integer("ModelCheckpoint(save_top_k)", of.save_top_k, -1, "Use -1 (all) or 0 (none)")
    if of.monitor is None and of.save_top_k > 1:
        problem = "must be at most 1 if monitor is not set"
        raise _wrong("save_top_k", of.save_top_k, problem, "Set monitor, or use -1 or 1")
    counts = ("every_n_train_steps", "every_n_epochs")
    given = {name: getattr(of, name) for name in (*counts, "train_time_interval")}
    for name in counts:
        if given[name] is not None:
            check_integer(f"ModelCheckpoint({name})", given[name], 0, "Use a positive integer, or 0 to disable")
    chosen = {name: value for name, value in given.items() if value or isinstance(value, timedelta)}
    if len(chosen) > 1:
        raise _wrong(" and ".join(chosen), chosen, "cannot be combined", "Use two ModelCheckpoints")


def _wrong(field: str, received: object, problem: str, action: str) -> RoomierError:
    return RoomierError(f"ModelCheckpoint({field})", received, problem, action)


class ModelCheckpoint(Callback):
    """Callback that saves the run at selected steps and keeps the best, the newest, or all checkpoints.

    A checkpoint is the folder ``dirpath/filename``. An older checkpoint is removed only after the new checkpoint is
    committed, so a complete checkpoint always exists. The arguments have the same meaning as in Lightning.

    Args:
        dirpath: folder of the checkpoints; by default ``checkpoints`` in the run folder.
        filename: template of the checkpoint's name with ``{epoch}``, ``{step}`` and logged metrics, and formats as in
            ``str.format``. For example, the default ``"{epoch}-{step}"`` gives ``epoch=0-step=100``. A metric that was
            not logged is written as ``none``, and a notice names the metric.
        monitor: logged metric, ``"step"`` or ``"epoch"``, by which checkpoints are ranked; by default, newer
            checkpoints are better. A checkpoint with the score NaN is not ranked.
        verbose: if True, print a line to standard error for each saved checkpoint, and for each checkpoint that is not
            saved because of its score.
        save_last: if True, also keep the newest checkpoint, and create a link ``last`` to it. ``"link"`` means True.
        save_top_k: number of best checkpoints to keep; -1 keeps all checkpoints, and 0 keeps none. Without ``monitor``,
            use -1, 0 or 1.
        format: ``"folder"``, or ``"lightning"`` for a ``.ckpt`` file that ``torch.load`` and Lightning's
            ``load_from_checkpoint`` read. As in Lightning, such a file does not contain random states.
        save_on_exception: if True, also save the weights if an error ends the fit; see
            :class:`roomier.callbacks.OnExceptionCheckpoint`.
        save_weights_only: if True, omit the state that is required only to resume a run.
        mode: ``"min"`` if lower values of ``monitor`` are better, ``"max"`` if higher values are better.
        auto_insert_metric_name: if True, write ``step=100`` instead of ``100`` for ``{step}``.
        every_n_train_steps: number of optimizer steps between saves. Set at most one of this argument,
            ``train_time_interval`` and ``every_n_epochs``. The default is ``every_n_epochs=1``.
        train_time_interval: time between saves: a ``timedelta``, a dict of its arguments, or ``"DD:HH:MM:SS"``. With
            ``timedelta(0)``, save in each step.
        every_n_epochs: number of epochs between saves. If it is 0 and no other interval is set, checkpoints are saved
            only for ``save_last``.
        save_on_train_epoch_end: save at the end of an epoch (True) or of a validation (False). The default is the end
            of the epoch, unless an epoch has several validations or validation does not run in every epoch.
        async_save: if True, continue training while a checkpoint is written. Training waits only until the state is
            copied to host memory, which must have enough space for the copy. The attributes of this callback contain
            only committed checkpoints.
        enable_version_counter: if True, append ``-v1``, ``-v2``, ... if a checkpoint that must be kept has the same
            name; if False, replace that checkpoint.

    Raises:
        RoomierError: an argument is invalid.

    Example:
        >>> trainer = roomier.Trainer(callbacks=[ModelCheckpoint(monitor="val_loss", save_top_k=3)])

    [Note: names that are taken]
    If a run was killed, the resumed run repeats the steps after its checkpoint. The killed run may already have saved
    checkpoints at these steps. The new ones are bitwise identical and replace them by a rename. A name is taken if a
    ModelCheckpoint of this run keeps the checkpoint with this name, or if another run wrote a checkpoint with this
    name. The checkpoint names of other runs are part of the callback's state.

    [Note: ledger before the save]
    A checkpoint contains the state of this callback, and the resumed run must list that checkpoint. The ledger is
    therefore updated before the save, and restored if the save fails.
    """

    reads_parameters, monitors = False, True
    FILE_EXTENSION = SUFFIX  # a name of Lightning

    @explain_unknown_keywords("callbacks.ModelCheckpoint", FORMER)
    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | Literal["link"] | None = None,
        save_top_k: int = 1,
        save_weights_only: bool = False,
        mode: str = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | dict[str, float] | str | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
        async_save: bool = False,
        save_on_exception: bool = False,
        format: Literal["folder", "lightning"] = "folder",
    ) -> None:
        own = None if dirpath is None else local_of(at_home(dirpath, "ModelCheckpoint(dirpath)", RoomierError))
        self.dirpath = None if own is None else os.path.abspath(own)
        self.filename = DEFAULT_TEMPLATE if filename is None else check_template(filename)
        self.monitor = monitor
        self.verbose = verbose
        self.save_last = save_last
        self.save_top_k = save_top_k
        self.save_weights_only = save_weights_only
        self.mode = check_mode("ModelCheckpoint", mode)
        self.auto_insert_metric_name = auto_insert_metric_name
        self.every_n_train_steps = every_n_train_steps
        self.train_time_interval = train_time_interval
        self.every_n_epochs = every_n_epochs
        self.save_on_train_epoch_end = save_on_train_epoch_end
        self.enable_version_counter = enable_version_counter
        self.async_save = async_save
        self.save_on_exception = save_on_exception
        self.format = format
        field, given_s = "ModelCheckpoint(train_time_interval)", train_time_interval
        self._interval_s = None if given_s is None else parse_duration_s(field, given_s, may_be_zero=True)
        self._keep = Retention(save_top_k, mode == "min", monitor is not None, bool(save_last))
        check_arguments(self)
        self._ledger = Ledger()
        self._uncommitted: Ledger | None = None
        self._foreign_names: tuple[str, ...] | None = None
        self._own_names: set[str] = set()  # on rank 0, the checkpoint names that this run can replace
        self._loaded_state: dict[str, Any] | None = None
        self._is_fitting = False
        self._monitored = None if monitor is None else Monitored(type(self).__name__, monitor)
        named = [each for each in metrics_named_in(self.filename) if each != monitor]
        self._named = [Monitored(type(self).__name__, each, "filename") for each in named]
        self._due_step = self._validated_step = self._ended_at_step = -1
        self._interval = Interval(self._interval_s) if self._interval_s is not None else None
        self._printed: set[str] = set()

    # State --------------------------------------------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        arguments = {
            "monitor": self.monitor,
            "mode": self.mode,
            "every_n_train_steps": self.every_n_train_steps or 0,
            "every_n_epochs": self._num_epochs_between,
            "train_time_interval": self._interval_s,
        }
        return f"{type(self).__qualname__}{arguments!r}"

    @property
    def best_model_path(self) -> str:
        """Path of the best kept checkpoint; ``""`` before the first save."""
        return shown(self._ledger.best(self._keep)[0])

    @property
    def best_model_score(self) -> Tensor | None:
        """Score of the best kept checkpoint (0-dim, float64); None if no best checkpoint exists."""
        return _tensor(self._ledger.best(self._keep)[1])

    @property
    def best_k_models(self) -> dict[str, Tensor]:
        """Scores of the top-k checkpoints, keyed by path, oldest first; empty if no metric is monitored."""
        return {
            shown(path): torch.tensor(score, dtype=torch.float64)
            for path, score in self._ledger.kept
            if score is not None
        }

    @property
    def kth_best_model_path(self) -> str:
        """Path of the worst of the top-k checkpoints; ``""`` if fewer than k checkpoints are kept."""
        return shown(self._ledger.kth(self._keep)[0]) if self.monitor else ""

    @property
    def kth_value(self) -> Tensor | None:
        """Score of the worst of the top-k checkpoints (0-dim, float64); None if fewer than k are kept."""
        return _tensor(self._ledger.kth(self._keep)[1])

    @property
    def last_model_path(self) -> str:
        """Path of the link to the newest checkpoint if ``save_last`` is set; ``""`` before the first save. If the file
        system or the remote storage does not support links, this is the path of the newest checkpoint."""
        newest = shown(self._ledger.last)
        link = self._link_in(os.path.dirname(newest))
        return link if newest and os.path.islink(link) else newest

    @property
    def current_score(self) -> Tensor | None:
        """Score of the newest checkpoint that was among the top-k when it was saved (0-dim, float64)."""
        return _tensor(self._ledger.current_score)

    # When to save -------------------------------------------------------------------------------------------------

    def setup(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        self._is_fitting = stage == "fit"
        if self._is_fitting and self.save_on_exception:
            check_saves_weights("ModelCheckpoint(save_on_exception)", trainer)

    def on_fit_start(self, trainer: TrainerView, pl_module: Module) -> None:
        if trainer.fast_dev_run:
            return
        self._uncommitted = None
        run_folder = Path(trainer.log_dir).absolute()
        if self.dirpath is None:
            self.dirpath = str(run_folder / "checkpoints")
        folder, name = os.path.split(run_of(trainer, "ModelCheckpoint").settled.start.given_path)
        is_here = folder == os.path.realpath(self.dirpath)
        self._keep = replace(self._keep, given_path=os.path.join(self.dirpath, name) if is_here else "")
        # Only rank 0 reads the folder, because its content may change before other ranks read it.
        trainer.ranks.on_zero(partial(self._read_folder, Path(self.dirpath).is_relative_to(run_folder)))
        state = (self._ledger, self._foreign_names, self._due_step)
        self._ledger, self._foreign_names, self._due_step = trainer.ranks.from_zero(state)
        self._loaded_state = None
        # If the run was killed after a save, the remaining work of this save is completed.
        trainer.ranks.on_zero(partial(self._follow_up, trainer, self._ledger.last, self._paths_of_others(trainer)))

    def _read_folder(self, is_in_run_folder: bool) -> None:
        assert self.dirpath is not None
        if self._loaded_state is not None:
            self._restore(self._loaded_state)
        if self._foreign_names is None:
            self._foreign_names = () if is_in_run_folder else names_in(Path(self.dirpath), also_remote=True)
        self._own_names = set(names_in(Path(self.dirpath), also_remote=True)).difference(self._foreign_names)

    def on_train_start(self, trainer: TrainerView, pl_module: Module) -> None:
        if self._interval is not None:
            self._interval.begin()

    def on_validation_end(self, trainer: TrainerView, pl_module: Module) -> None:
        if self._is_fitting and not trainer.sanity_checking:
            for each in (*self._named, *([] if self._monitored is None else [self._monitored])):
                each.was_validated = True
            self._validated_step = trainer.global_step
            if not acts_at_epoch_end(self.save_on_train_epoch_end, trainer):
                self._epoch_is_over(trainer)

    def on_train_epoch_end(self, trainer: TrainerView, pl_module: Module) -> None:
        self._ended_at_step = trainer.global_step
        if acts_at_epoch_end(self.save_on_train_epoch_end, trainer):
            self._epoch_is_over(trainer)

    def on_save_point(self, trainer: TrainerView, pl_module: Module) -> None:
        step = trainer.global_step
        if step == self._newest_ledger.step:
            return
        is_due = self._is_due(step, trainer)
        if not (is_due or trainer.is_last_save_point) or trainer.fast_dev_run:
            return
        if is_due or self._is_stopped(trainer):
            trainer.results.settle()  # the score and the name are computed from the values of all ranks
            self._save(trainer, trainer.ranks.from_zero(self._score(trainer)), self._keep)
        if trainer.is_last_save_point and not trainer.interrupted and self._newest_ledger.step != step:
            self._save_at_the_end(trainer)

    def on_exception(self, trainer: TrainerView, pl_module: Module, exception: BaseException) -> None:
        run = trainer.run if self._is_fitting and self.save_on_exception and self.dirpath else None
        if run is not None and self._newest_ledger.step != run.progress.global_step and not trainer.sanity_checking:
            name = format_name(self.filename, self._metrics(trainer), self.auto_insert_metric_name)
            save_weights_after(exception, trainer, Path(str(self.dirpath)), f"on_exception-{name}", self._suffix)

    def _is_stopped(self, trainer: TrainerView) -> bool:
        """Return True if training stops within an epoch, and this step was validated before the end of the epoch."""
        is_validated = trainer.is_last_save_point and self._validated_step == trainer.global_step
        is_within_epoch = self._ended_at_step != trainer.global_step
        return is_validated and is_within_epoch and self._is_due_epoch(trainer.current_epoch)

    def _save_at_the_end(self, trainer: TrainerView) -> None:
        """Save after the last step if no save was due at that step, unless an existing checkpoint is sufficient. The
        saved checkpoint is not ranked, because its metrics are from an earlier step.
        """
        is_off = not (self._num_epochs_between or self.every_n_train_steps) and self._interval_s is None
        is_sufficient = self._newest_ledger.paths or self.save_top_k == 0 or is_off
        keep = self._keep if is_sufficient else replace(self._keep, last=True)
        is_partial_epoch = self._ended_at_step != trainer.global_step and self._is_due_epoch(trainer.current_epoch)
        if keep.last or (is_partial_epoch and not keep.monitored):
            self._save(trainer, None, keep)

    def _is_due(self, step: int, trainer: TrainerView) -> bool:
        # The interval counts the calls of is_over, so this call must run in each step.
        is_over = self._interval is not None and self._interval.is_over(trainer.ranks)
        if step == self._due_step:
            return True
        if self.every_n_train_steps:
            return step > 0 and step % self.every_n_train_steps == 0
        return is_over

    def _epoch_is_over(self, trainer: TrainerView) -> None:
        if self._is_due_epoch(trainer.current_epoch):
            self._due_step = trainer.global_step

    def _is_due_epoch(self, epoch: int) -> bool:
        return self._num_epochs_between > 0 and (epoch + 1) % self._num_epochs_between == 0

    @property
    def _num_epochs_between(self) -> int:
        if self.every_n_epochs is None and self.every_n_train_steps is None and self._interval_s is None:
            return 1
        return self.every_n_epochs or 0

    # Save ---------------------------------------------------------------------------------------------------------

    @property
    def _suffix(self) -> str:
        return self.FILE_EXTENSION if self.format == "lightning" else ""

    @property
    def _newest_ledger(self) -> Ledger:
        """The ledger, including a checkpoint that is still being written."""
        return self._ledger if self._uncommitted is None else self._uncommitted

    def _save(self, trainer: TrainerView, score: float | None, keep: Retention) -> None:
        """Save if the checkpoint would be among the top-k, or if the newest checkpoint is kept."""
        before = self._newest_ledger
        if not before.enters(score, keep) and not keep.last:
            if self.verbose:
                notice(
                    f"not saved at step {trainer.global_step}: {self.monitor} = {score} is not in the top {keep.top_k}"
                )
            return
        path = self._path(trainer, before.before_saving(score, keep).paths)
        # See [Note: ledger before the save].
        ledger = self._uncommitted = before.after_saving(path, score, trainer.global_step, keep)
        try:
            trainer.save_checkpoint(
                path,
                weights_only=self.save_weights_only,
                asynchronous=self.async_save,
                format=self.format,
                when_committed=partial(self._committed, trainer, ledger),
            )
        except BaseException:
            self._uncommitted = None
            raise

    def _committed(self, trainer: TrainerView, ledger: Ledger) -> None:
        """Use ``ledger``, whose newest checkpoint was committed, and remove superseded checkpoints."""
        self._ledger = ledger
        if self._uncommitted is ledger:
            self._uncommitted = None
        path, score = ledger.newest_path, dict(ledger.kept).get(ledger.newest_path)
        if self.verbose:
            notice(f"saved {shown(path)}" + ("" if score is None else f" ({self.monitor} = {score})"))
        trainer.ranks.on_zero(partial(self._follow_up, trainer, path, self._paths_of_others(trainer)))

    def _follow_up(self, trainer: TrainerView, path: str, paths_of_others: set[str]) -> None:
        """Complete the work after the save of ``path``. The link ``last`` is updated first, because the checkpoint to
        which this link points may be removed.
        """
        if self._keep.last and os.path.exists(path) and Path(path).parent == Path(str(self.dirpath)):
            self._point_last_to(path)
        self._remove_superseded(paths_of_others, run_of(trainer, "ModelCheckpoint").uploads)

    def _metrics(self, trainer: TrainerView) -> dict[str, Tensor | float]:
        return {**trainer.callback_metrics, "epoch": trainer.current_epoch, "step": trainer.global_step}

    def _score(self, trainer: TrainerView) -> float | None:
        """Return the value of ``monitor``; None if no metric is monitored, or before the first validation."""
        if self.monitor in ("epoch", "step") and self.monitor not in trainer.callback_metrics:
            return float(self._metrics(trainer)[self.monitor])
        score = None if self._monitored is None else self._monitored.read(trainer)
        if score is not None and math.isnan(score):
            self._print_once(f"{self.monitor} is NaN, so this checkpoint is not ranked")
        return score

    def _path(self, trainer: TrainerView, staying: set[str]) -> str:
        """Return the path of the next checkpoint. See [Note: names that are taken]."""
        assert self.dirpath is not None, "on_fit_start() must run first"
        for each in self._named:
            each.report_missing(trainer)
        name = format_name(self.filename, self._metrics(trainer), self.auto_insert_metric_name)
        suffix = self._suffix
        if not self.enable_version_counter:
            return os.path.join(self.dirpath, trainer.ranks.from_zero(name) + suffix)
        here = {path for path in staying | self._paths_of_others(trainer) if os.path.dirname(path) == self.dirpath}
        kept = {*map(os.path.basename, here), *([LAST + suffix] if self._keep.last else [])}
        folder, others = Path(self.dirpath), self._foreign_names or ()
        choose = partial(choose_name, folder, name, kept, self._own_names, others, suffix)
        name, self._foreign_names = trainer.ranks.on_zero(choose)
        return os.path.join(self.dirpath, name)

    def _paths_of_others(self, trainer: TrainerView) -> set[str]:
        others = [each for each in trainer.callbacks if isinstance(each, ModelCheckpoint) and each is not self]
        return {path for other in others for path in other._ledger.paths | other._newest_ledger.paths}

    def _remove_superseded(self, paths_of_others: set[str], uploads: Uploads | None) -> None:
        """Remove superseded checkpoints that no other callback keeps, if at least one kept checkpoint exists."""
        ledger = self._ledger
        if not any(os.path.exists(path) or remote_of(path) for path in ledger.paths):
            return
        for path in set(ledger.superseded) - paths_of_others:
            if os.path.dirname(path) != self.dirpath or os.path.islink(path):
                continue
            try:
                remove_saved(path, uploads, is_file=self.format == "lightning")
            except (CheckpointError, OSError) as error:
                notice(f"a superseded checkpoint was not removed: {error}")

    def _link_in(self, folder: str) -> str:
        return os.path.join(folder, LAST + self._suffix)

    def _point_last_to(self, path: str) -> None:
        link = self._link_in(os.path.dirname(path))
        try:
            with replacing_path(Path(link)) as aside:
                aside.symlink_to(os.path.basename(path))
        except OSError as error:
            self._print_once(f"cannot create the link {link!r} to the newest checkpoint {path!r}: {error.strerror}")

    def _print_once(self, message: str) -> None:
        if message not in self._printed:
            self._printed.add(message)
            notice(f"{type(self).__name__}: {message}")

    # Resume -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the ledger with paths relative to ``dirpath``, so that a run folder can be moved before the run is
        resumed."""
        ledger = self._newest_ledger
        return {
            "monitor": self.monitor,
            "dirpath": None if self.dirpath is None else shown(self.dirpath),
            "kept": [[self._name(path), score] for path, score in ledger.kept],
            "last": self._name(ledger.last),
            "superseded": [self._name(path) for path in ledger.superseded],
            "current_score": ledger.current_score,
            "step": ledger.step,
            "due_step": self._due_step,  # needed if a signal ends the run between a validation and its save point
            "foreign_names": None if self._foreign_names is None else list(self._foreign_names),
            "suffix": self._suffix,
        }

    def check_stored_state(self, state: Any, place: str) -> None:
        """See :class:`roomier.api.callback.ChecksState`."""
        ledger_form(monitored=self.monitor is not None)(state, place)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the ledger. If ``dirpath`` is not set, the ledger is restored in ``on_fit_start``.

        Missing checkpoints are removed from the ledger. The checkpoints of an earlier run are ranked, but never
        removed.
        """
        if self.dirpath is None:
            self._loaded_state = state_dict
        else:
            self._restore(state_dict)

    def _restore(self, state_dict: dict[str, Any]) -> None:
        saved_dirpath = None if state_dict["dirpath"] is None else local_text(state_dict["dirpath"])
        folders = [folder for folder in (self.dirpath, saved_dirpath) if folder is not None]
        found = {
            name: find_complete(name, folders)
            for name in [state_dict["last"], *(name for name, _ in state_dict["kept"])]
        }
        self._ledger = Ledger(
            kept=tuple((path, score) for name, score in state_dict["kept"] if (path := found[name])),
            last=found[state_dict["last"]],
            superseded=tuple(path for name in state_dict["superseded"] if (path := find_complete(name, folders))),
            current_score=state_dict["current_score"],
            step=state_dict["step"],
        )
        self._due_step = state_dict["due_step"]
        gone = sorted(name for name, path in found.items() if name and not path)
        if gone:
            notice(f"{type(self).__name__}: removed missing checkpoints from the ledger: {', '.join(gone)}")
        is_same_folder = self.dirpath == saved_dirpath or any(
            os.path.dirname(path) == self.dirpath for path in self._ledger.paths
        )
        if is_same_folder and state_dict["foreign_names"] is not None:
            self._foreign_names = tuple(state_dict["foreign_names"])

    def _name(self, path: str) -> str:
        return os.path.basename(path) if os.path.dirname(path) == self.dirpath else shown(path)


def _tensor(score: float | None) -> Tensor | None:
    # float64 represents a Python float exactly.
    return None if score is None else torch.tensor(score, dtype=torch.float64)
