"""Memory of a rank by kind, predicted by a formula before a run and measured during a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roomier.api.trainer_view import TrainerView
    from roomier.planner.memory.anatomy_table import Anatomy


def anatomy(trainer: TrainerView) -> Anatomy:
    """Return the memory that each rank uses in the run of ``trainer``, by kind.

    The result contains the current sizes, the sizes that the memory formula predicts for the Plan and, if the callback
    :class:`roomier.callbacks.MemoryAnatomy` tracked a step, the peak of that step.

    Call this function between two steps (``on_train_batch_end``, ``on_save_point``) or after ``fit``. With several
    ranks, every rank must call this function, and each rank receives the results of all ranks.

    Raises:
        RoomierError: the Trainer has not started a run yet.

    Example:
        >>> trainer.fit(model, loader)
        >>> print(roomier.memory.anatomy(trainer))
    """
    from roomier.planner.memory.measure import anatomy_of  # late import: loading torch's sharding code is slow

    return anatomy_of(trainer)
