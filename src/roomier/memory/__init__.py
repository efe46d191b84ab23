"""What a rank holds in memory: by formula before it runs, and measured while it does."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roomier.api.trainer_view import TrainerView
    from roomier.memory.anatomy_table import Anatomy


def anatomy(trainer: TrainerView) -> Anatomy:
    """The bytes of the run of ``trainer`` by kind: now, and at the peak of a step where the callback
    :class:`roomier.callbacks.MemoryAnatomy` tracked one; beside it what the Plan's formula says for each parameter.

    From hooks between two steps (``on_train_batch_end``, ``on_save_point``), or after ``fit``. On several ranks every
    rank calls it, and each gets the figures of all.

    Raises:
        RoomierError: nothing was run yet.
    """
    from roomier.memory.measure import anatomy_of  # late: loads the sharding of torch

    return anatomy_of(trainer)
