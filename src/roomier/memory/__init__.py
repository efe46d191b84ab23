"""Memory of a rank by kind: predicted by formula before a run, and measured during a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roomier.api.trainer_view import TrainerView
    from roomier.memory.anatomy_table import Anatomy


def anatomy(trainer: TrainerView) -> Anatomy:
    """Return the memory of the run of ``trainer`` by kind, on all ranks.

    The result contains the bytes that exist now and the prediction of the Plan's formula. If the callback
    :class:`roomier.callbacks.MemoryAnatomy` tracked a step, it also contains the peak of that step.

    Call this function between two steps (``on_train_batch_end``, ``on_save_point``) or after ``fit``. With several
    ranks, every rank must call it, and each rank receives the results of all ranks.

    Raises:
        RoomierError: the Trainer has not run anything yet.

    Example:
        >>> trainer.fit(model, loader)
        >>> print(roomier.memory.anatomy(trainer))
    """
    from roomier.memory.measure import anatomy_of  # late: loads torch's sharding

    return anatomy_of(trainer)
