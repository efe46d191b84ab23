"""Frozen values of a call: the request of the user, and the facts that roomier determines before the model is built."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roomier.api.datamodule import DataModule
from roomier.api.module import Module
from roomier.api.trainer_view import TrainerView
from roomier.core.ranks import Ranks
from roomier.core.world import World
from roomier.engine.weights_file import WeightsToRead
from roomier.plan import Plan
from roomier.run.accumulation import Accumulation, GlobalBatch
from roomier.run.loaders import RunLoaders
from roomier.run.options import LoopOptions
from roomier.run.progress import Progress
from roomier.run.states import TrainerState
from roomier.storage.mirror import local_of

if TYPE_CHECKING:
    from roomier.planner.choice import Choice

CutBatches = Callable[[Plan, RunLoaders, "Request"], Plan]
"""Function that changes the size of micro-batches and returns the plan with the corresponding accumulation."""


@dataclass(frozen=True)
class Fitted:
    """Results of the last fit, which later calls of the same Trainer use.

    Args:
        module: the module that was fitted.
        progress: the progress at the end of the fit.
        folder: the run folder. Evaluations add rows to the logs in this folder. None if the fit did not write files.
        choice: the plans that the planner compared; None if the plan was given.
    """

    module: Module
    progress: Progress
    folder: Path | None
    choice: Choice | None


@dataclass(frozen=True)
class Request:
    """One call of ``fit``, ``validate``, ``test`` or ``predict``, with the arguments that the user passed.

    Args:
        stage: the name of the method.
        module: the module that the call trains or evaluates.
        loaders: the loaders that the user passed, with the keys ``"train"``, ``"val"``, ``"test"``, ``"predict"``.
        datamodule: the DataModule that the user passed, or None.
        ckpt_path: the requested checkpoint: a path, ``"last"``, ``"best"`` or None.
        weights: the path of the initial weights of the model, or None.
        plan: the requested plan. The planner may choose its strategy.
        options: settings of the loop.
        world: the position of this process among all processes.
        root: the folder that contains the run folders.
        keeps_files: True if a fit writes a run folder.
        keeps_checkpoints: True if an interrupted fit writes a checkpoint.
        trainer: the object that hooks receive. Code below the Trainer reads only the ``should_stop`` attribute.
        state: the loop that is running. The loops update it.
        fitted: the last fit of the same Trainer, or None.
        cut: function that changes the size of a fit's micro-batches for the tuner, or None.
        continues: the start of a fit that continues on fewer ranks, or None. See ``train/saving/restore.py``.
    """

    stage: str
    module: Module
    loaders: Mapping[str, Any]
    datamodule: DataModule | None
    ckpt_path: str | Path | None
    weights: object
    plan: Plan
    options: LoopOptions
    world: World
    root: Path
    keeps_files: bool
    keeps_checkpoints: bool
    trainer: TrainerView
    state: TrainerState
    fitted: Fitted | None = None
    cut: CutBatches | None = None
    continues: Start | None = None

    @property
    def is_fit(self) -> bool:
        """True if the call is ``fit``."""
        return self.stage == "fit"

    @property
    def is_planned(self) -> bool:
        """True if the planner chooses or confirms the plan when a fit begins."""
        return self.plan.parallel.strategy == "auto" or self.plan.choice.memory_budget_bytes is not None


@dataclass(frozen=True)
class FirstWeights:
    """The source of the initial weights of a model. At most one of the two fields is set.

    Args:
        file: weights that are read while the engine is built.
        checkpoint: checkpoint that is read after the run has been opened.
    """

    file: WeightsToRead | None = None
    checkpoint: Path | None = None


@dataclass(frozen=True)
class Start:
    """The point from which a call starts, and the folder to which it writes files.

    Args:
        checkpoint: the checkpoint that the run resumes from; None for a new run.
        folder: the run folder; None if the run writes no files.
        weights: the source of the initial weights of the model.
        batch: the global batch before the restart of the job; None if the job was not restarted.
        is_last: True if ``checkpoint`` is the result of a search for the newest checkpoint. If this checkpoint is
            damaged, the run resumes from the next older checkpoint.
    """

    checkpoint: Path | None = None
    folder: Path | None = None
    weights: FirstWeights = field(default_factory=FirstWeights)
    batch: GlobalBatch | None = None
    is_last: bool = False

    @property
    def given_path(self) -> str:
        """Real path of the checkpoint if the user passed its path; otherwise ``""``. The run never removes this
        checkpoint."""
        return "" if self.checkpoint is None or self.is_last else os.path.realpath(local_of(self.checkpoint))


@dataclass(frozen=True)
class Settled:
    """The facts of a run. These facts are known before the model is built and do not change until the run ends.

    Args:
        request: the call to which the facts belong.
        start: the checkpoint and the folder of the run.
        plan: the plan of the run. The strategy of this plan is never ``"auto"``.
        data: the loaders. Their micro-batches match ``plan``.
        ranks: the ranks that share the model and each batch.
        callbacks: all callbacks of the run, in the order of their calls.
        choice: the plans that the planner compared; None if the plan was given.
    """

    request: Request
    start: Start
    plan: Plan
    data: RunLoaders
    ranks: Ranks
    callbacks: Sequence[Any]
    choice: Choice | None = None

    @cached_property
    def accumulation(self) -> Accumulation:
        """Number of micro-batches per optimizer step, by epoch."""
        return Accumulation.of(self.plan, self.callbacks)

    @cached_property
    def epoch_limit(self) -> float:
        """Number of epochs after which training ends; infinite if the number of epochs is not limited."""
        return self.request.options.epoch_limit()

    @cached_property
    def step_limit(self) -> float:
        """Number of optimizer steps after which training ends; infinite if the number of steps is not limited."""
        return self.request.options.step_limit()

    def num_steps(self) -> float:
        """Return the number of optimizer steps in a full fit. Infinite if unknown."""
        return num_steps_of(self.accumulation, self.request.options, self.data)


def num_steps_of(accumulation: Accumulation, options: LoopOptions, data: RunLoaders) -> float:
    """Return the number of optimizer steps in a full fit. Infinite if unknown."""
    return min(options.step_limit(), accumulation.num_steps(0, options.epoch_limit(), data.count_training_batches()))
