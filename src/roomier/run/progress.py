"""Progress of a run: the counters that a checkpoint stores, the state of the current step, and the checkpoints that are
written or pending."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from roomier.checkpoint import BackgroundSaver


@dataclass
class Progress:
    """Counters of a run, which checkpoints store.

    Attributes:
        global_step: number of completed optimizer steps.
        epoch: number of completed epochs.
        batch_idx: number of completed micro-batches of the current epoch.
        num_batches: number of completed micro-batches of all epochs.
        is_validation_due: True if a signal stopped this step's validation, which a resumed run repeats first.
        is_epoch_end_due: True if a resumed run must run the code that follows the last batch of an epoch.
    """

    global_step: int = 0
    epoch: int = 0
    batch_idx: int = 0
    num_batches: int = 0
    is_validation_due: bool = False
    is_epoch_end_due: bool = False

    @property
    def is_step_complete(self) -> bool:
        """True if a resumed run has no work left in this step."""
        return not (self.is_validation_due or self.is_epoch_end_due)

    def state(self) -> dict[str, Any]:
        """Return the counters as plain data."""
        return asdict(self)

    def load(self, state: dict[str, Any]) -> None:
        """Restore the counters that :meth:`state` returned."""
        vars(self).update(state)


@dataclass(slots=True)
class WindowBatches:
    """The micro-batches of one optimizer step, in the form in which the loader returned them.

    Attributes:
        epoch: index of the epoch.
        first_batch: index of the first micro-batch in its epoch.
        batches: the micro-batches.
    """

    epoch: int
    first_batch: int
    batches: Sequence[Any]


@dataclass
class Now:
    """The state of the current step. Checkpoints do not store this state.

    Attributes:
        batch_idx: index of the current training micro-batch in its epoch.
        batch_number: index of the current batch of an evaluation among the batches of all ranks. Steps and hooks
            receive a different index as ``batch_idx``, which counts only the batches of their rank.
        num_batches_before: ``progress.num_batches`` when this fit began.
        last_loss: loss of the last optimizer step (0-dim, on the device); with several ranks, this rank's share.
        window: micro-batches of the current or last step; None before the first step.
        leaves_out_step: True if a hook skips the update. The step is then not counted.
        is_in_step: True if the run is between two save points, so its state cannot be resumed exactly. False at a save
            point, and None before and after training.
        is_finishing: True at the last save point.
        is_interrupted: True if a signal ended training at a save point. A resumed run completes the training.
        is_stop_agreed: True if a stop was requested and, with several ranks, all ranks have received the request.
        random_state: random state from the checkpoint, which is restored when the loop begins.
        renamed: columns of the loop renamed to ``trainer/NAME``, because the module logs values under their names.
        started_s: start time on the monotonic clock.
    """

    batch_idx: int = -1
    batch_number: int = -1
    num_batches_before: int = 0
    last_loss: Tensor | None = None
    window: WindowBatches | None = None
    leaves_out_step: bool = False
    is_in_step: bool | None = None
    is_finishing: bool = False
    is_interrupted: bool = False
    is_stop_agreed: bool = False
    random_state: dict[str, Any] | None = None
    renamed: set[str] = field(default_factory=set)
    started_s: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class WantedSave:
    """A requested checkpoint.

    Attributes:
        path, weights_only, asynchronous, when_committed: see ``save_checkpoint``.
        start: function that starts writing a state to ``path`` in another way; None for a checkpoint of the run.
    """

    path: Path
    weights_only: bool = False
    asynchronous: bool = False
    when_committed: Callable[[], None] | None = None
    start: Callable[[Path, dict[str, Any]], None] | None = None


@dataclass
class Saves:
    """Checkpoints of a run that are written or pending.

    Attributes:
        step, path: step and path of the newest complete checkpoint that this run wrote or resumed from.
        duration_s: time in which this run wrote its newest checkpoint; None before the first checkpoint.
        deferred: checkpoints that hooks requested. These checkpoints are written at the next save point.
        background: object that writes checkpoints in a thread during training; None before the first such checkpoint.
        when_settled: function that is called after the checkpoint of ``background`` is committed.
        num_ended: number of background checkpoints that have ended on all ranks, according to the last vote.
        state_at_end: the checkpoint at the last save point of training, without the state of the engine.
        not_stored: entries of a LightningModule's checkpoint that a notice reported as not saved.
    """

    step: int | None = None
    path: Path | None = None
    duration_s: float | None = None
    deferred: list[WantedSave] = field(default_factory=list)
    background: BackgroundSaver | None = None
    when_settled: Callable[[], None] | None = None
    num_ended: int = 0
    state_at_end: dict[str, Any] | None = None
    not_stored: set[str] = field(default_factory=set)
