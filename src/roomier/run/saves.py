"""The newest checkpoint and the pending checkpoints of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roomier.checkpoint import BackgroundSaver


@dataclass(frozen=True)
class WantedSave:
    """A requested checkpoint.

    Attributes:
        path, weights_only, asynchronous, when_committed: as in :func:`roomier.train.saving.save.save_checkpoint`.
    """

    path: Path
    weights_only: bool = False
    asynchronous: bool = False
    when_committed: Callable[[], None] | None = None


@dataclass
class Saves:
    """Checkpoints of a run that are written or pending.

    Attributes:
        step, path: step and path of the newest complete checkpoint that this run wrote or resumed from.
        deferred: checkpoints that hooks requested. These checkpoints are written at the next save point.
        background: object that writes checkpoints in a thread during training; None before the first such checkpoint.
        when_settled: function that is called after the checkpoint of ``background`` is committed.
        num_ended: number of background checkpoints that have ended on all ranks, according to the last vote.
        state_at_end: the checkpoint at the last save point of training, without the state of the engine.
        not_stored: entries of a LightningModule's checkpoint that a notice reported as not saved.
    """

    step: int | None = None
    path: Path | None = None
    deferred: list[WantedSave] = field(default_factory=list)
    background: BackgroundSaver | None = None
    when_settled: Callable[[], None] | None = None
    num_ended: int = 0
    state_at_end: dict[str, Any] | None = None
    not_stored: set[str] = field(default_factory=set)
