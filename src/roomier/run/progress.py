"""Where a run is: the counters that a checkpoint carries and a resumed run goes on from."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass
class Progress:
    """Counters of a run.

    Attributes:
        global_step: optimizer steps done.
        epoch: epochs finished.
        batch_idx: micro-batches of the running epoch that are done.
        num_batches: micro-batches done in all epochs.
        is_validation_due: the validation of this step was cut off by a signal and is to be run first.
        is_epoch_end_due: what comes after the last batch of an epoch was left to the run that goes on.
    """

    global_step: int = 0
    epoch: int = 0
    batch_idx: int = 0
    num_batches: int = 0
    is_validation_due: bool = False
    is_epoch_end_due: bool = False

    @property
    def is_step_complete(self) -> bool:
        """Whether all that is due at this step is done."""
        return not (self.is_validation_due or self.is_epoch_end_due)

    def state(self) -> dict[str, Any]:
        return asdict(self)

    def load(self, state: dict[str, Any]) -> None:
        for each in fields(self):
            setattr(self, each.name, state[each.name])
