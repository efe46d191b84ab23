"""Learning rate schedules selected by a string: warm-up, followed by a constant rate, or a linear or cosine decay to a
final rate.

torch's ``load_state_dict`` writes every key of the state into the scheduler's ``__dict__``. A key such as ``get_lr``
would replace a method.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, MultiplicativeLR

from roomier.core import forms
from roomier.core.errors import PlanError
from roomier.core.forms import Form, FormError, anything, count, fields, item_of, items, list_of, number, optional
from roomier.core.log import notice

SCHEDULES = ("constant", "linear", "cosine")


@dataclass
class Factor:
    """Function that maps a step to a factor of the learning rate. Steps are counted from 0.

    The factor rises over the first ``warmup_steps`` steps. Then, ``"linear"`` and ``"cosine"`` decrease the factor,
    which is ``min_lr_ratio`` at the end of the schedule. The cosine schedule is SGDR (Loshchilov and Hutter 2017,
    equation 5) without restarts.

    Attributes:
        name: one of ``SCHEDULES``.
        num_steps: number of optimizer steps in the run.
        warmup_steps: number of warm-up steps.
        min_lr_ratio: final rate divided by the peak rate.
        log_warmup: True to increase the rate with the logarithm of the step, from 0 at the first step; False to
            increase the rate linearly.
        decay_steps: step at which the schedule ends; None means ``num_steps``.
    """

    name: str
    num_steps: int
    warmup_steps: int = 0
    min_lr_ratio: float = 0.0
    log_warmup: bool = False
    decay_steps: int | None = None

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            if self.log_warmup:
                return math.log(step + 1) / math.log(max(2, self.warmup_steps))
            return (step + 1) / self.warmup_steps
        if self.name == "constant":
            return 1.0
        end = self.num_steps if self.decay_steps is None else self.decay_steps
        done = min(1.0, (step - self.warmup_steps) / max(1, end - self.warmup_steps))
        shape = 1.0 - done if self.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.min_lr_ratio + (1.0 - self.min_lr_ratio) * shape


def make_schedule(
    name: str,
    optimizer: Optimizer,
    num_steps: float,
    *,
    warmup_steps: int = 0,
    log_warmup: bool = False,
    min_lr_ratio: float = 0.0,
    decay_steps: int | None = None,
) -> LambdaLR:
    """Create a scheduler. Its ``step`` method must be called after each optimizer step.

    Args:
        name: one of ``SCHEDULES``.
        optimizer: optimizer to schedule.
        num_steps: number of optimizer steps in the run.
        warmup_steps: number of warm-up steps.
        log_warmup: True to increase the rate with the logarithm of the step; False to increase the rate linearly.
        min_lr_ratio: final rate divided by the peak rate.
        decay_steps: step at which the schedule ends; None means ``num_steps``.

    Raises:
        PlanError: the schedule requires the length of the run, but the length is unknown; or the warm-up is longer than
            the run.
    """
    if name != "constant" and decay_steps is None and not math.isfinite(num_steps):
        raise PlanError("lr_schedule", name, "requires the number of steps in the run", "Set max_steps on the Trainer")
    if warmup_steps > num_steps:
        raise PlanError(
            "lr_schedule.warmup_steps", warmup_steps, f"the run has only {num_steps} steps", "Use fewer warm-up steps"
        )
    length = int(num_steps) if math.isfinite(num_steps) else 0
    return LambdaLR(optimizer, Factor(name, length, warmup_steps, min_lr_ratio, log_warmup, decay_steps))


def continue_schedule(schedule: LambdaLR, saved: Mapping[str, Any], num_steps: float | None) -> None:
    """Resume ``schedule``, which :func:`make_schedule` created for a Plan, at the step in ``saved``.

    Only the step is read from the saved state. The shape and the length of the schedule come from the new run. The peak
    rates (``initial_lr``) come from the optimizer of the new run, whose state must be loaded already. If none of these
    values changed, the learning rate is bitwise equal to the learning rate of a run without interruption.

    Args:
        schedule: scheduler of the new run.
        saved: saved state of the scheduler.
        num_steps: number of optimizer steps in the full run, including completed steps; None if ``schedule`` was
            created for the number of steps in ``saved``.
    """
    (factor,) = {id(each): each for each in schedule.lr_lambdas}.values()
    assert isinstance(factor, Factor)
    before = Factor(**saved["lr_lambdas"][0])
    if num_steps is not None and math.isfinite(num_steps):
        factor.num_steps = int(num_steps)
    schedule.load_state_dict({**saved, "lr_lambdas": [None] * len(schedule.lr_lambdas)})
    groups = schedule.optimizer.param_groups
    schedule.base_lrs = [group["initial_lr"] for group in groups]
    if asdict(factor) == asdict(before) and schedule.base_lrs == saved["base_lrs"]:
        return
    for group, highest in zip(groups, schedule.base_lrs, strict=True):
        group["lr"] = highest * factor(schedule.last_epoch)
    schedule._last_lr = [group["lr"] for group in groups]
    if factor.name != "constant" and factor.decay_steps is None and factor.num_steps != before.num_steps:
        notice(
            f"the schedule now ends at step {factor.num_steps}, but at step {before.num_steps} in the checkpoint. "
            f"From step {schedule.last_epoch} on, the learning rate follows the new schedule"
        )


_FACTOR = fields(
    {"name": forms.one_of(*SCHEDULES), "num_steps": count, "warmup_steps": count, "min_lr_ratio": forms.finite},
    others={"log_warmup": forms.flag, "decay_steps": optional(count)},
)
_PARTS = "_schedulers"  # attribute of SequentialLR and ChainedScheduler
_MILESTONES = "_milestones"  # attribute of SequentialLR: the step at which each scheduler except the first starts
_FUNCTIONS = "lr_lambdas"  # contains objects with a state, or functions without a state


def check_scheduler(scheduler: Any, saved: Mapping[str, Any], groups: list[dict[str, Any]], place: str) -> None:
    """Check the stored state ``saved`` of ``scheduler``.

    Args:
        groups: the stored parameter groups of the scheduler's optimizer.
        place: path of ``saved``, for the error message.

    Raises:
        FormError: a value is malformed, or a key names an attribute of the class.
    """
    own = {key: value for key, value in (scheduler.state_dict() or {}).items() if not callable(value)}
    _check_names(scheduler, own, saved, place)
    if isinstance(scheduler, LRScheduler):
        rates = items(*[number] * len(scheduler.base_lrs)) if hasattr(scheduler, "base_lrs") else anything
        known: dict[str, Form] = {
            "last_epoch": forms.integer(-1),
            "_step_count": count,
            "base_lrs": rates,
            "_last_lr": rates,
        }
        fields({key: known[key] for key in known.keys() & own.keys()}, others=anything)(saved, place)
    for key in own.keys() & saved.keys() - {_PARTS, _FUNCTIONS, "_last_lr"}:
        forms.like(own[key])(saved[key], item_of(place, key))
    if _PARTS in own and _PARTS not in saved:
        raise FormError(place, saved, f"a mapping with the key {_PARTS!r}")
    if _MILESTONES in own.keys() & saved.keys():
        items(*[anything] * len(own[_MILESTONES]))(saved[_MILESTONES], item_of(place, _MILESTONES))
    for key in {_PARTS, _FUNCTIONS} & own.keys() & saved.keys():
        objects = getattr(scheduler, key)
        items(*[anything] * len(objects))(saved[key], item_of(place, key))
        for index, (each, state) in enumerate(zip(objects, saved[key], strict=True)):
            of_part = f"{item_of(place, key)}[{index}]"
            if key == _PARTS:
                fields({}, others=anything)(state, of_part)
                check_scheduler(each, state, groups, of_part)
            else:
                _check_function(each, state, of_part)
    _check_next_rate(scheduler, saved, groups, place)


def _check_names(owner: Any, own: Mapping[str, Any], saved: Mapping[str, Any], place: str) -> None:
    for key in saved.keys() - own.keys():
        if not isinstance(key, str) or hasattr(type(owner), key) or key in ("optimizer", "__dict__"):
            constraint = f"the name of a value, not of an attribute of {type(owner).__name__}"
            raise FormError(f"a key of {place}", key, constraint)


def _check_function(function: Any, saved: Any, place: str) -> None:
    if isinstance(function, Factor):
        return _FACTOR(saved, place)
    optional(fields({}, others=anything))(saved, place)
    if saved is not None:
        _check_names(function, getattr(function, "__dict__", {}), saved, place)
    return None


def _check_next_rate(scheduler: Any, saved: Mapping[str, Any], groups: list[dict[str, Any]], place: str) -> None:
    """Check that a copy of a torch scheduler can compute the next rate, or the current rate at the end of a
    schedule."""
    is_known = type(scheduler).__module__ == LRScheduler.__module__ and type(scheduler).get_lr is not LRScheduler.get_lr
    if not is_known or isinstance(scheduler, (LambdaLR, MultiplicativeLR)):  # their get_lr calls functions of the user
        return None
    copied = copy.copy(scheduler)
    copied.__dict__.update(copy.deepcopy(dict(saved)))
    copied.optimizer = SimpleNamespace(param_groups=copy.deepcopy(groups))
    copied._get_lr_called_within_step = True
    last_epoch = copied.last_epoch
    for copied.last_epoch in (last_epoch + 1, last_epoch):
        try:
            return list_of(number)(list(map(float, copied.get_lr())), place)
        except Exception as error:  # a malformed state can raise any error
            failed = error
    shown = {key: value for key, value in saved.items() if not key.startswith("_")}
    raise FormError(place, shown, f"a state of {type(scheduler).__name__} ({failed})") from failed
