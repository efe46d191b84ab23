"""GradientAccumulationScheduler: callback that changes the number of micro-batches per step at given epochs."""

from __future__ import annotations

from roomier.api.callback import Callback
from roomier.api.module import Module
from roomier.api.trainer_view import TrainerView
from roomier.core.errors import RoomierError, check_integer
from roomier.plan.levers import lever_that_frees_gradients


class GradientAccumulationScheduler(Callback):
    """Callback that accumulates gradients over a number of micro-batches that depends on the epoch.

    The gradient of a step is equal to the gradient of the full batch of the step. The number of steps of the run
    (``trainer.estimated_stepping_batches``) and the learning rate schedules of a Plan are computed from the scheduled
    numbers.

    Args:
        scheduling: dict from epochs (counted from 0) to numbers of micro-batches per step. Each number applies until
            the next epoch in the dict. Before the first epoch in the dict, a step has 1 micro-batch.

    Raises:
        RoomierError: ``scheduling`` is empty or invalid. The error is also raised when a fit starts if
            ``accumulate_grad_batches`` is also set, or if the run does not support steps with several micro-batches.

    Example:
        8 micro-batches in the epochs 0 to 3, and 2 from epoch 4 on:

        >>> trainer = roomier.Trainer(callbacks=[GradientAccumulationScheduler({0: 8, 4: 2})])
    """

    reads_parameters = False

    def __init__(self, scheduling: dict[int, int]) -> None:
        field, action = "GradientAccumulationScheduler(scheduling)", "Pass {epoch: micro-batches}, such as {0: 8, 4: 2}"
        if not isinstance(scheduling, dict) or not scheduling:
            raise RoomierError(field, scheduling, "must map epochs to numbers of micro-batches", action)
        for epoch, size in scheduling.items():
            check_integer(field, epoch, 0, action)
            check_integer(field, size, 1, action)
        self.scheduling = {0: 1, **scheduling}
        self.epochs = sorted(self.scheduling)

    def going_to_accumulate_grad_batches(self) -> bool:
        """Return True if any step has more than one micro-batch."""
        return any(size > 1 for size in self.scheduling.values())

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """Return the number of micro-batches per step in ``epoch``."""
        return self.scheduling[max(each for each in self.epochs if each <= epoch)]

    def setup(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        if stage != "fit":
            return
        if trainer.requested_plan.batch.accumulate_grad_batches != 1:
            raise RoomierError(
                "accumulate_grad_batches",
                trainer.requested_plan.batch.accumulate_grad_batches,
                "cannot be combined with a GradientAccumulationScheduler",
                "Remove one of the two",
            )
        if not self.going_to_accumulate_grad_batches():
            return
        if not pl_module.automatic_optimization:
            problem = "is not supported with manual optimization (automatic_optimization=False)"
            raise self._refusal(type(pl_module).__name__, problem)
        lever = lever_that_frees_gradients(trainer.plan)
        if lever is not None:
            problem = f"is not supported with {lever.keyword}, which updates the weights in each backward pass"
            raise self._refusal(lever.value(trainer.plan), problem)

    @staticmethod
    def _refusal(received: object, problem: str) -> RoomierError:
        return RoomierError("GradientAccumulationScheduler", received, problem, "Remove the scheduler or this setting")
