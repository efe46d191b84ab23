"""Run a few steps of a fit without changing the model, the data or the Trainer.

[Note: trials have no side effects]
The model and the DataModule are copied before their ``setup``, and the Trainer is replaced by a copy that writes no
files and whose only callback belongs to the search. Datasets are not copied. Instead, the attributes, positions and
random generators of loaders, samplers and datasets are restored after the trial, as are the random generators of the
process. Other effects of user code, such as changes to files, network access, and changes to lists in a dataset, are
not undone.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, Dataset

from roomier.api.callback import Callback
from roomier.api.datamodule import DataModule
from roomier.api.overrides import is_one
from roomier.core.device.rng import rng_state, separate_rng, set_rng_state
from roomier.core.errors import DataError, RoomierError
from roomier.core.log import quiet
from roomier.data.first_batch import check_is_repeatable, untouched
from roomier.data.loaders import is_combined, is_loader_collection
from roomier.loggers.by_name import SilentLogger
from roomier.plan import Plan
from roomier.run.options import LoopOptions
from roomier.run.progress import Progress
from roomier.run.run import Run, call
from roomier.run.settled import CutBatches
from roomier.run.states import TrainerState
from roomier.train.fit import fit
from roomier.trainer.attributes import TrainerAttributes
from roomier.trainer.session import request_of, session


@dataclass(frozen=True)
class Subject:
    """Arguments of ``Trainer.fit`` for a trial.

    Attributes:
        model: model to train.
        train_dataloaders: the training data.
        datamodule: the DataModule, or None.
        weights: path of the initial weights, or None.
    """

    model: nn.Module
    train_dataloaders: Any = None
    datamodule: DataModule | None = None
    weights: str | Path | None = None

    @staticmethod
    def of(model: nn.Module, train_dataloaders: Any, datamodule: Any, weights: str | Path | None = None) -> Subject:
        """Return the Subject that contains the arguments. A DataModule may be passed as ``train_dataloaders``."""
        if is_one(train_dataloaders, DataModule):
            return Subject(model, None, train_dataloaders, weights)
        return Subject(model, train_dataloaders, datamodule, weights)


class TrialOverError(Exception):
    """Exception that ends a trial after its result is known."""


def run_trial(
    trainer: TrainerAttributes,
    subject: Subject,
    *,
    plan: Plan,
    max_steps: int,
    callback: Callback,
    change_model: Callable[[nn.Module], None] | None = None,
    cut: CutBatches | None = None,
    prepare: Callable[[Run], None] | None = None,
) -> None:
    """Train a copy of ``subject`` for ``max_steps`` optimizer steps. See [Note: trials have no side effects].

    Args:
        trainer: the Trainer. The trial runs on a copy of this Trainer.
        subject: the model and the data.
        plan: plan of the trial.
        max_steps: number of optimizer steps.
        callback: the only callback of the trial.
        change_model: function that is called with the copy of the model.
        cut: function that changes the micro-batches before the model is built.
        prepare: function that is called with the run before the first step.

    Raises:
        RoomierError: the model cannot be copied, or the data cannot be iterated twice.
    """
    if any("_roomier_shards" in vars(each) for each in subject.model.modules()):
        problem = "was sharded by an earlier fit, so it cannot be copied for a trial"
        raise RoomierError("model", type(subject.model).__name__, problem, "Tune before the first fit")
    with ExitStack() as stack:
        stack.callback(set_rng_state, rng_state())
        for loader in _read_by(subject):
            check_is_repeatable(loader, "train_dataloaders", "set the value manually")
            stack.enter_context(untouched(loader))
        trial = _copied_for_trial(trainer, plan, _options_of_trial(trainer.options, max_steps), callback)
        model, datamodule = _copied(subject, trainer, trial)
        if change_model is not None:
            change_model(model)
        stack.enter_context(quiet())
        loaders = {"train": subject.train_dataloaders, "val": None}
        request = request_of(trial, "fit", model, loaders, datamodule, weights=subject.weights)
        try:
            with session(trial, dataclasses.replace(request, cut=cut), adds_callbacks=False) as run:
                if prepare is not None:
                    prepare(run)
                call(run.hooks.on_fit_start)
                if not run.ranks.peers.is_alone:  # an unseeded run
                    set_rng_state(run.ranks.peers.from_zero(rng_state()))
                separate_rng(run.ranks.data.world.rank)
                fit(run)
        except TrialOverError:
            pass


def _options_of_trial(options: LoopOptions, max_steps: int) -> LoopOptions:
    return dataclasses.replace(
        options,
        max_steps=max_steps,
        max_epochs=-1,
        min_epochs=None,
        min_steps=None,
        max_time=None,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        val_check_interval=None,
        check_val_every_n_epoch=1,
        log_every_n_steps=10**9,
        profiler=None,
    )


def _copied(
    subject: Subject, trainer: TrainerAttributes, trial: TrainerAttributes
) -> tuple[nn.Module, DataModule | None]:
    """Return copies of the model and the DataModule. The copies use the same data as the originals."""
    former = (vars(part).get("_trainer") for part in subject.model.modules())
    memo: dict[int, Any] = {id(each): trial for each in (trainer, *former) if each is not None}
    memo |= {id(each): each for each in _held_data(subject)}
    try:
        return copy.deepcopy((subject.model, subject.datamodule), memo)
    except Exception as error:  # a model may contain any object
        problem = f"cannot be copied for a trial: {type(error).__name__}: {error}"
        action = "Move objects that cannot be copied out of the module, or set the value manually"
        raise RoomierError("model", type(subject.model).__name__, problem, action) from error


def _read_by(subject: Subject) -> list[Any]:
    """Return all objects that yield samples, without duplicates.

    Raises:
        DataError: an object can be iterated only once.
    """
    found = [*_leaves(subject.train_dataloaders), *_held_data(subject)]
    for each in found:
        if isinstance(each, Iterator):
            problem = "can be iterated only once, but a trial iterates it in addition to the fit"
            action = "Pass a DataLoader, or an object whose __iter__ returns a new iterator"
            raise DataError("train_dataloaders", each, problem, action)
    return list({id(each): each for each in found}.values())


def _held_data(subject: Subject) -> Iterator[Any]:
    """Yield the datasets and loaders that are attributes of the model or the DataModule."""
    datamodules = [] if subject.datamodule is None else [subject.datamodule]
    for owner in (*subject.model.modules(), *datamodules):
        for value in vars(owner).values():
            if isinstance(value, (Dataset, DataLoader)):
                yield value
            elif is_combined(value) or is_loader_collection(value):
                yield from _leaves(value)


def _leaves(loaders: Any) -> Iterator[Any]:
    """Yield the loaders in ``loaders``. Lists of batches are skipped, because they have no state."""
    if is_combined(loaders):
        yield from _leaves(loaders.iterables)
    elif is_loader_collection(loaders):
        for each in loaders.values() if isinstance(loaders, Mapping) else loaders:
            yield from _leaves(each)
    elif loaders is not None and not isinstance(loaders, (list, tuple)):
        yield loaders


def _copied_for_trial(
    trainer: TrainerAttributes, plan: Plan, options: LoopOptions, callback: Callback
) -> TrainerAttributes:
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
