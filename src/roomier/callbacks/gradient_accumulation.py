"""GradientAccumulationScheduler: steps of more or fewer micro-batches, by epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roomier.api.callback import Callback
from roomier.core.errors import RoomierError

if TYPE_CHECKING:
    from roomier.api.module import Module
    from roomier.api.trainer_view import TrainerView


class GradientAccumulationScheduler(Callback):
    """Accumulates gradients over a number of micro-batches that changes with the epoch.

    ``GradientAccumulationScheduler({0: 8, 4: 2})``: 8 in the epochs 0 to 3, 2 from epoch 4 on; 1 before the first epoch
    that is named. The gradient of a step is that of its whole batch; the steps of the run
    (``trainer.estimated_stepping_batches``), and with them the schedules a Plan names, count as they will come.

    Args:
        scheduling: micro-batches of a step by epoch, counted from 0.

    Raises:
        RoomierError: it is empty, or holds something else than such numbers; when a fit begins, that
            ``accumulate_grad_batches`` is set as well, or that there are no steps of several micro-batches.
    """

    def __init__(self, scheduling: dict[int, int]) -> None:
        def is_count(value: object, least: int) -> bool:
            return isinstance(value, int) and not isinstance(value, bool) and value >= least

        if (
            not isinstance(scheduling, dict)
            or not scheduling
            or not all(is_count(epoch, 0) and is_count(size, 1) for epoch, size in scheduling.items())
        ):
            action = "Write {epoch: micro-batches of a step}, such as {0: 8, 4: 2}"
            field = "GradientAccumulationScheduler(scheduling)"
            raise RoomierError(field, scheduling, "does not say a number of micro-batches by epoch", action)
        self.scheduling = {0: 1, **scheduling}
        self.epochs = sorted(self.scheduling)

    def going_to_accumulate_grad_batches(self) -> bool:
        """Whether any step has more than one micro-batch."""
        return any(size > 1 for size in self.scheduling.values())

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """Micro-batches of a step in ``epoch``."""
        return self.scheduling[max(each for each in self.epochs if each <= epoch)]

    def setup(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        if stage != "fit":
            return
        if trainer.asked_plan.batch.accumulate_grad_batches != 1:
            raise RoomierError(
                "accumulate_grad_batches",
                trainer.asked_plan.batch.accumulate_grad_batches,
                "is set beside a GradientAccumulationScheduler",
                "Say it in one of the two",
            )
        if not self.going_to_accumulate_grad_batches():
            return
        if not pl_module.automatic_optimization:
            raise self._refusal(type(pl_module).__name__, "optimizes by hand (automatic_optimization=False)")
        if trainer.plan.optimizer.step_in_backward != "none":
            way = trainer.plan.optimizer.step_in_backward
            raise self._refusal(way, "updates in the backward of one micro-batch (step_in_backward)")

    @staticmethod
    def _refusal(received: object, problem: str) -> RoomierError:
        return RoomierError("GradientAccumulationScheduler", received, problem, "Do without one of the two")
