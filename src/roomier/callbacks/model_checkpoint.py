"""ModelCheckpoint: when a run is saved, under which name, and which of its checkpoints stay."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from roomier import checkpoint
from roomier.api.callback import Callback
from roomier.callbacks.checkpoint_folder import find_complete, names_in
from roomier.callbacks.checkpoint_ledger import Keep, Ledger, form_of_books
from roomier.callbacks.checkpoint_name import (
    DEFAULT_TEMPLATE,
    check_template,
    first_free_name,
    format_name,
    metrics_named_in,
)
from roomier.callbacks.interval import Interval
from roomier.callbacks.monitored import Monitored, check_mode, is_complete_at_epoch_end
from roomier.core.errors import CheckpointError, RoomierError
from roomier.core.keywords import explain_unknown_keywords
from roomier.core.log import notice
from roomier.core.paths import check_path
from roomier.core.units import parse_duration_s

if TYPE_CHECKING:
    from roomier.api.module import Module
    from roomier.api.trainer_view import TrainerView

LAST = "last"
_FORMER = {
    "period": "Write every_n_epochs",
    "every_n_val_epochs": "Write every_n_epochs",
    "prefix": "Write it into filename",
    "save_best_only": "Write save_top_k=1 and monitor",
    "save_on_exception": "Write callbacks=[..., OnExceptionCheckpoint(dirpath)] beside it",
}


class ModelCheckpoint(Callback):
    """Saves the run at chosen moments and keeps the best, the newest, or all of its checkpoints.

    A checkpoint is a folder, ``dirpath/filename``. An older one is removed only after the one that supersedes it is
    committed, so that at every moment a complete one is there. Arguments mean what they mean in Lightning.

    Args:
        dirpath: where checkpoints go; by default ``checkpoints`` in the run folder.
        filename: a template of the folder's name with ``{epoch}``, ``{step}`` and logged metrics, with formats as in
            ``str.format``; by default ``"{epoch}-{step}"``, which gives ``epoch=0-step=100``. Before its first
            validation a metric reads ``none``; one that was not logged then is an error.
        monitor: the logged metric that ranks checkpoints; by default the newer is the better. NaN never ranks.
        verbose: tell of each save on standard error.
        save_last: keep the newest checkpoint too when it is not among the best, and a link ``last`` to it beside it.
            (``"link"`` is the same.)
        save_top_k: how many of the best are kept: -1 all of them, 0 none. Without ``monitor`` it is -1, 0 or 1.
        save_weights_only: leave out what only a resumed run needs.
        mode: ``"min"`` or ``"max"``: which values of ``monitor`` are better.
        auto_insert_metric_name: write ``step=100`` for ``{step}``, not ``100``.
        every_n_train_steps: save every so many optimizer steps. At most one of the three ``every``-like arguments; by
            default ``every_n_epochs=1``.
        train_time_interval: save when so much time has passed since the last such save: a ``timedelta``, a dict of
            its arguments, or ``"DD:HH:MM:SS"``.
        every_n_epochs: save every so many epochs.
        save_on_train_epoch_end: save epochs at their end (True) or when a validation ends (False); by default at the
            end unless an epoch has several validations, or not every one has one.
        async_save: train on while a checkpoint is written. Training waits only until the state is copied to host
            memory, of which that takes as much again (of each rank's part). What is not committed yet has no name here.
        enable_version_counter: where the name is that of another checkpoint that must stay, append ``-v1``, ``-v2``,
            ...; else replace it. See the note below.

    Raises:
        RoomierError: an argument is wrong.

    [Note: names that are taken]
    A resumed run reaches the steps again that a killed run had saved after the checkpoint it resumed from. What
    it finds under their names is its own killed future: bit for bit the same run, and a ``-v1`` beside it would be a
    copy of it that nobody counts or removes. So such a folder is replaced (by one rename). A name counts as taken only
    if its checkpoint must stay: one this callback or another ModelCheckpoint still keeps, or one that stood in
    ``dirpath`` before the run began and hence is another run's. The names of the latter are part of the state.

    [Note: the books before the save]
    A checkpoint contains the state of this callback, and the run resumed from it must know of that checkpoint. So
    the books are brought up to date before the save, and put back if it fails. They stay as they were until the next
    save: what a resumed run reads is what the uninterrupted run had.
    """

    monitors = True

    @explain_unknown_keywords("callbacks.ModelCheckpoint", _FORMER)
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
    ) -> None:
        check_path("ModelCheckpoint(dirpath)", "." if dirpath is None else dirpath)
        self.dirpath = None if dirpath is None else os.path.abspath(os.path.expanduser(dirpath))
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
        self._interval_s = (
            None
            if train_time_interval is None
            else parse_duration_s("ModelCheckpoint(train_time_interval)", train_time_interval)
        )
        self._keep = Keep(save_top_k, mode == "min", monitor is not None, bool(save_last))
        self._check_arguments()
        self._ledger = Ledger()
        self._uncommitted: Ledger | None = None
        self._foreign_names: tuple[str, ...] | None = None
        self._loaded_state: dict[str, Any] | None = None
        self._is_fitting = False
        self._monitored = None if monitor is None else Monitored(type(self).__name__, monitor)
        named = [each for each in metrics_named_in(self.filename) if each != monitor]
        self._named = [Monitored(type(self).__name__, each, "filename") for each in named]
        self._due_step = -1
        self._ended_epoch = (-1, 0)
        self._interval = Interval(self._interval_s) if self._interval_s is not None else None
        self._told: set[str] = set()

    # What is known ------------------------------------------------------------------------------------------------

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
        """The best checkpoint of those kept; ``""`` before the first."""
        return self._ledger.best(self._keep)[0]

    @property
    def best_model_score(self) -> Tensor | None:
        return _tensor(self._ledger.best(self._keep)[1])

    @property
    def best_k_models(self) -> dict[str, Tensor]:
        """Path -> score of the top-k, oldest first; empty where nothing is monitored."""
        return {
            path: torch.tensor(score, dtype=torch.float64) for path, score in self._ledger.kept if score is not None
        }

    @property
    def kth_best_model_path(self) -> str:
        """The one that goes when a better one comes; ``""`` while fewer than k are kept."""
        return self._ledger.kth(self._keep)[0] if self.monitor else ""

    @property
    def kth_value(self) -> Tensor | None:
        return _tensor(self._ledger.kth(self._keep)[1])

    @property
    def last_model_path(self) -> str:
        """The newest checkpoint, with ``save_last``; ``""`` before the first."""
        return self._ledger.last

    @property
    def current_score(self) -> Tensor | None:
        """The score of the newest that was among the best when it was saved."""
        return _tensor(self._ledger.current_score)

    # When ---------------------------------------------------------------------------------------------------------

    def setup(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        self._is_fitting = stage == "fit"

    def on_fit_start(self, trainer: TrainerView, pl_module: Module) -> None:
        if trainer.fast_dev_run:
            return
        self._uncommitted = None
        run_folder = Path(trainer.log_dir).absolute()
        if self.dirpath is None:
            self.dirpath = str(run_folder / "checkpoints")
        # What is on the disk is looked at by rank 0: another may look when it is changing already.
        trainer.ranks.on_zero(partial(self._look_at_folder, Path(self.dirpath).is_relative_to(run_folder)))
        books = (self._ledger, self._foreign_names, self._due_step)
        self._ledger, self._foreign_names, self._due_step = trainer.ranks.from_zero(books)
        self._loaded_state = None
        trainer.ranks.on_zero(partial(self._finish_last_save, self._paths_of_others(trainer)))

    def _look_at_folder(self, is_in_run_folder: bool) -> None:
        assert self.dirpath is not None
        if self._loaded_state is not None:
            self._take_over(self._loaded_state)
        if self._foreign_names is None:
            self._foreign_names = () if is_in_run_folder else names_in(Path(self.dirpath))

    def on_train_start(self, trainer: TrainerView, pl_module: Module) -> None:
        if self._interval is not None:
            self._interval.begin()

    def on_validation_end(self, trainer: TrainerView, pl_module: Module) -> None:
        if self._is_fitting and not trainer.sanity_checking:
            for each in (*self._named, *([] if self._monitored is None else [self._monitored])):
                each.was_validated = True
            if not self._saves_after_training_epoch(trainer):
                self._epoch_is_over(trainer)

    def on_train_epoch_end(self, trainer: TrainerView, pl_module: Module) -> None:
        self._ended_epoch = (trainer.global_step, trainer.current_epoch)
        if self._saves_after_training_epoch(trainer):
            self._epoch_is_over(trainer)

    def on_save_point(self, trainer: TrainerView, pl_module: Module) -> None:
        step = trainer.global_step
        if step == self._books.step:
            return
        is_due = self._is_due(trainer)
        if not (is_due or trainer.is_last_save_point) or trainer.fast_dev_run:
            return
        if is_due:
            trainer.results.settle()  # the score and the name are of what all ranks logged
            self._save(trainer, trainer.ranks.from_zero(self._score(trainer)), self._keep)
        if trainer.is_last_save_point and not trainer.interrupted and self._books.step != step:
            self._save_at_the_end(trainer)

    def _save_at_the_end(self, trainer: TrainerView) -> None:
        """Training ends at a step that was not due (within an epoch, say), or of no score that counts. It is not lost
        where the newest is kept, or nothing was saved so far. It is not ranked: its metrics are of an earlier step."""
        keep = self._keep if self._books.paths or self.save_top_k == 0 else replace(self._keep, last=True)
        is_cut_epoch = self._ended_epoch[0] != trainer.global_step and self._is_due_epoch(trainer.current_epoch)
        if keep.last or (is_cut_epoch and not keep.monitored):
            self._save(trainer, None, keep)

    def _is_due(self, trainer: TrainerView) -> bool:
        step = trainer.global_step
        # The interval counts steps: it is asked at each.
        is_over = self._interval is not None and self._interval.is_over(trainer.ranks)
        if step == self._due_step:
            return True
        if self.every_n_train_steps:
            return step > 0 and step % self.every_n_train_steps == 0
        return is_over

    def _saves_after_training_epoch(self, trainer: TrainerView) -> bool:
        if self.save_on_train_epoch_end is not None:
            return self.save_on_train_epoch_end
        return is_complete_at_epoch_end(trainer)

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

    # What ---------------------------------------------------------------------------------------------------------

    @property
    def _books(self) -> Ledger:
        """With a checkpoint that is still being written."""
        return self._ledger if self._uncommitted is None else self._uncommitted

    def _save(self, trainer: TrainerView, score: float | None, keep: Keep) -> None:
        """Save if a run of this score is among the best, or is to be kept as the newest."""
        before = self._books
        if not before.enters(score, keep) and not keep.last:
            if self.verbose:
                notice(
                    f"not saved at step {trainer.global_step}: {self.monitor} = {score} is not in the top {keep.top_k}"
                )
            return
        path = self._path(trainer, before.before_saving(score, keep).paths)
        # See [Note: the books before the save].
        books = self._uncommitted = before.after_saving(path, score, trainer.global_step, keep)
        try:
            trainer.save_checkpoint(
                path,
                weights_only=self.save_weights_only,
                asynchronous=self.async_save,
                when_committed=partial(self._committed, trainer, books),
            )
        except BaseException:
            self._uncommitted = None
            raise

    def _committed(self, trainer: TrainerView, books: Ledger) -> None:
        """The checkpoint is there: ``books`` hold from now on."""
        self._ledger = books
        if self._uncommitted is books:
            self._uncommitted = None
        path, score = books.newest_path, dict(books.kept).get(books.newest_path)
        if self.verbose:
            notice(f"saved {path}" + ("" if score is None else f" ({self.monitor} = {score})"))
        others = self._paths_of_others(trainer)
        trainer.ranks.on_zero(partial(self._follow_up, path, others))

    def _follow_up(self, path: str, paths_of_others: set[str]) -> None:
        if self._keep.last:
            self._point_last_to(path)
        self._remove_superseded(paths_of_others)

    def _finish_last_save(self, paths_of_others: set[str]) -> None:
        """What a kill between a save and what follows it left undone. The link first: its target may be removed."""
        last = self._ledger.last
        if self._keep.last and last and os.path.dirname(last) == self.dirpath:
            self._point_last_to(last)
        self._remove_superseded(paths_of_others)

    def _metrics(self, trainer: TrainerView) -> dict[str, Tensor | float]:
        # At the save point of an epoch's end the Trainer may already count the next epoch.
        ended_at_step, ended_epoch = self._ended_epoch
        epoch = ended_epoch if ended_at_step == trainer.global_step else trainer.current_epoch
        return {**trainer.callback_metrics, "epoch": epoch, "step": trainer.global_step}

    def _score(self, trainer: TrainerView) -> float | None:
        """The value of ``monitor``; None where there is no monitor, or its first validation is still to come."""
        score = None if self._monitored is None else self._monitored.read(trainer)
        if score is not None and math.isnan(score):
            self._tell_once(f"{self.monitor} is NaN: such a checkpoint is never counted among the best")
        return score

    def _path(self, trainer: TrainerView, staying: set[str]) -> str:
        """Where to save: see [Note: names that are taken]."""
        assert self.dirpath is not None, "on_fit_start() comes first"
        for each in self._named:
            each.read(trainer)  # refuses what is not logged
        name = format_name(self.filename, self._metrics(trainer), self.auto_insert_metric_name)
        name = trainer.ranks.from_zero(name)
        if self.enable_version_counter:
            here = {path for path in staying | self._paths_of_others(trainer) if os.path.dirname(path) == self.dirpath}
            taken = {os.path.basename(path) for path in here}
            name = first_free_name(name, taken.union(self._foreign_names or (), [LAST] if self._keep.last else []))
        return os.path.join(self.dirpath, name)

    def _paths_of_others(self, trainer: TrainerView) -> set[str]:
        others = [each for each in trainer.callbacks if isinstance(each, ModelCheckpoint) and each is not self]
        return {path for other in others for path in other._ledger.paths | other._books.paths}

    def _remove_superseded(self, paths_of_others: set[str]) -> None:
        """Remove what the latest save made obsolete, if it is ours alone and something that must stay is there."""
        ledger = self._ledger
        if not any(os.path.isdir(path) for path in ledger.paths):
            return
        for path in set(ledger.superseded) - paths_of_others:
            if os.path.dirname(path) != self.dirpath or not os.path.isdir(path):
                continue
            try:
                checkpoint.remove(path)
            except CheckpointError as error:
                notice(f"a superseded checkpoint stays: {error}")

    def _point_last_to(self, path: str) -> None:
        link = os.path.join(os.path.dirname(path), LAST)
        aside = f"{link}.aside"
        try:
            with suppress(FileNotFoundError):
                os.unlink(aside)
            os.symlink(os.path.basename(path), aside)
            os.replace(aside, link)
        except OSError as error:
            self._tell_once(f"no link {link!r} to the newest checkpoint, which is {path!r}: {error.strerror}")

    def _tell_once(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            notice(f"{type(self).__name__}: {message}")

    # Resume -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The books, with paths relative to ``dirpath``: a run folder may be moved before it is resumed."""
        ledger = self._books
        return {
            "monitor": self.monitor,
            "dirpath": self.dirpath,
            "kept": [[self._name(path), score] for path, score in ledger.kept],
            "last": self._name(ledger.last),
            "superseded": [self._name(path) for path in ledger.superseded],
            "current_score": ledger.current_score,
            "step": ledger.step,
            "due_step": self._due_step,  # a signal may end the run between a validation and its save point
            "foreign_names": None if self._foreign_names is None else list(self._foreign_names),
        }

    def check_stored_state(self, state: Any, place: str) -> None:
        """See :class:`roomier.api.callback.ChecksState`."""
        form_of_books(monitored=self.monitor is not None)(state, place)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put the books back; without a ``dirpath`` that waits for ``on_fit_start``, when the run folder is known.

        Checkpoints that are gone are struck off; those in the folder of an earlier run stay in the ranking and are
        never removed.
        """
        if self.dirpath is None:
            self._loaded_state = state_dict
        else:
            self._take_over(state_dict)

    def _take_over(self, state_dict: dict[str, Any]) -> None:
        saved_dirpath = state_dict["dirpath"]
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
            notice(f"{type(self).__name__}: no longer there and struck off: {', '.join(gone)}")
        is_same_folder = self.dirpath == saved_dirpath or any(
            os.path.dirname(path) == self.dirpath for path in self._ledger.paths
        )
        if is_same_folder and state_dict["foreign_names"] is not None:
            self._foreign_names = tuple(state_dict["foreign_names"])

    def _name(self, path: str) -> str:
        return os.path.basename(path) if os.path.dirname(path) == self.dirpath else path

    # Arguments ----------------------------------------------------------------------------------------------------

    def _check_arguments(self) -> None:
        if self.save_last not in (None, True, False, "link"):
            raise _wrong("save_last", self.save_last, "is unknown", "Use True, False, or 'link' (the same as True)")
        if self._keep.last and self.filename == LAST:
            raise _wrong("filename", LAST, "is the name of the link that save_last makes", "Choose another name")
        if not _is_count(self.save_top_k, at_least=-1):
            raise _wrong("save_top_k", self.save_top_k, "is not a number it can be", "Use -1 (all), 0 (none), or more")
        if self.monitor is None and self.save_top_k > 1:
            problem = "ranks checkpoints, but there is no monitor"
            raise _wrong("save_top_k", self.save_top_k, problem, "Set monitor, or use -1 or 1")
        for field in ("every_n_train_steps", "every_n_epochs"):
            value = getattr(self, field)
            if value is not None and not _is_count(value, at_least=0):
                raise _wrong(field, value, "is not a number it can be", "Use a positive integer, or 0 for never")
        given = {
            "every_n_train_steps": self.every_n_train_steps,
            "every_n_epochs": self.every_n_epochs,
            "train_time_interval": self.train_time_interval,
        }
        chosen = {name: value for name, value in given.items() if value}
        if len(chosen) > 1:
            raise _wrong(" and ".join(chosen), chosen, "exclude each other", "Use two ModelCheckpoints")


def _wrong(field: str, received: object, problem: str, action: str) -> RoomierError:
    return RoomierError(f"ModelCheckpoint({field})", received, problem, action)


def _is_count(value: object, *, at_least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def _tensor(score: float | None) -> Tensor | None:
    # float64 holds a Python float as it is.
    return None if score is None else torch.tensor(score, dtype=torch.float64)
