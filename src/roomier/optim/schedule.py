"""Learning-rate schedules by name: warm-up, then constant, linear or cosine down to a floor."""

import math
from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from roomier.core.errors import PlanError

SCHEDULES = ("constant", "linear", "cosine")


@dataclass
class Factor:
    """What the learning rate is multiplied by at step ``step`` (0 is the first).

    Linear warm-up over ``warmup_steps``, then the shape ``name`` over the rest of ``num_steps`` down to
    ``min_lr_ratio``; the cosine is that of SGDR (Loshchilov and Hutter 2017, equation 5) without restarts.
    """

    name: str
    num_steps: int
    warmup_steps: int = 0
    min_lr_ratio: float = 0.0

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.name == "constant":
            return 1.0
        done = min(1.0, (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps))
        shape = 1.0 - done if self.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.min_lr_ratio + (1.0 - self.min_lr_ratio) * shape


def make_schedule(
    name: str, optimizer: Optimizer, num_steps: float, *, warmup_steps: int = 0, min_lr_ratio: float = 0.0
) -> LambdaLR:
    """A scheduler to be stepped after each optimizer step.

    Args:
        num_steps: optimizer steps of the whole run.

    Raises:
        PlanError: the schedule ends with the run, but the run's length is not known.
    """
    if name != "constant" and not math.isfinite(num_steps):
        raise PlanError("lr_schedule", name, "needs the number of steps of the run", "Set max_steps on the Trainer")
    if warmup_steps > num_steps:
        raise PlanError(
            "lr_schedule.warmup_steps", warmup_steps, f"the run has only {num_steps} steps", "Use fewer warm-up steps"
        )
    length = int(num_steps) if math.isfinite(num_steps) else 0
    return LambdaLR(optimizer, Factor(name, length, warmup_steps, min_lr_ratio))
