"""Suggestion of the most useful option that changes the results of training. The planner forecasts it but never chooses
it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from roomier.core.errors import RoomierError
from roomier.core.units import format_bytes, format_seconds
from roomier.plan.choices import Kind, choice_of
from roomier.plan.levers import LEVERS
from roomier.planner.choice import Choice
from roomier.planner.choosing.candidates import Changes, can_add, changed
from roomier.planner.choosing.nearest import PRECISIONS, SMALL_STATES
from roomier.planner.choosing.pricing import TIE, Prices
from roomier.planner.deadline import Deadline
from roomier.planner.forecast import Forecast
from roomier.planner.workload import Workload

_LORA_RANK = 16
_LEAST_GAIN = 0.1  # smaller savings of memory or time are not worth different results
_TIME_SHARE = 0.5  # time limit, as a fraction of the time limit of the search for the plan


@dataclass(frozen=True)
class UsefulLever:
    """Option that changes the results of training, with its forecast.

    Attributes:
        option: command-line option with its value.
        kind: label of the option: exact, near or approximate.
        effect: effect of the option on training.
        before: forecast of the plan without the option.
        peak_bytes: forecast peak of the plan with the option.
        step_s: forecast step time of the plan with the option; None if unknown.
        fits: whether the plan with the option fits.
        was_fitting: whether the plan without the option fits.
    """

    option: str
    kind: Kind
    effect: str
    before: Forecast
    peak_bytes: int
    step_s: float | None
    fits: bool
    was_fitting: bool

    @property
    def line(self) -> str:
        """Sentences that describe the savings and the effect of the option."""
        plan = "the chosen plan would" if self.was_fitting else "the nearest plan would fit and"
        if not self.fits:
            plan = "the nearest plan would still not fit, but"
        times = ""
        if self.step_s is not None and self.before.time is not None:
            before_s, step_s = format_seconds(self.before.time.total_s), format_seconds(self.step_s)
            times = f", and take {step_s} instead of {before_s} per step"
        sizes = f"{format_bytes(self.peak_bytes)} instead of {format_bytes(self.before.peak_bytes)}"
        return (
            f"With {self.option}, {plan} need about {sizes}{times}. roomier adds this option only if you do, because "
            f"it changes the results ({self.kind.value}): {self.effect}."
        )

    @property
    def gain(self) -> float:
        """Fraction of the peak memory that the option saves. If the plan fits without the option, the larger of the
        fractions that it saves of the peak memory and of the step time; 0 if the option is slower."""
        saved = 1 - self.peak_bytes / max(self.before.peak_bytes, 1)
        if not self.was_fitting or self.before.time is None or self.step_s is None:
            return saved
        saved_s = 1 - self.step_s / max(self.before.time.total_s, 1e-12)
        return 0.0 if saved_s < -TIE else max(saved, saved_s)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "option": self.option,
            "kind": self.kind.value,
            "peak_bytes": self.peak_bytes,
            "step_s": self.step_s,
            "fits": self.fits,
        }


def most_useful_lever(workload: Workload, choice: Choice, prices: Prices) -> UsefulLever | None:
    """Return the first option that makes the nearest plan fit or, if a plan already fits, the option that saves the
    most. Return None if no option saves at least a tenth of the memory or of the time.

    The options are added to the chosen plan or, if no plan fits, to the nearest plan. The time limit is half of the
    time limit of the search for the plan, unless the environment variable of :class:`Deadline` overrides it.

    Args:
        workload: workload that was planned in ``choice``.
        choice: result of the planner.
        prices: source of the forecasts in ``choice``, whose traces are reused.
    """
    before = next((each.forecast for each in choice.considered if each.forecast is not None), None)
    if before is None:
        return None
    deadline = Deadline.after(_TIME_SHARE * choice.planning_s)
    was_fitting = choice.chosen is not None
    found: list[UsefulLever] = []
    try:
        base = prices.estimate(before.plan, before.micro_batch)
    except RoomierError:
        return None
    for option, kind, effect, changes in _options(before, workload, is_needed=not was_fitting):
        if deadline.is_over:
            break
        try:
            forecast = prices.estimate(changed(before.plan, changes), before.micro_batch)
        except RoomierError:  # the option cannot be combined with the plan
            continue
        # `before` may be the result of a dry run, so the difference is computed between two closed-form forecasts.
        peak_bytes = max(0, before.peak_bytes + forecast.peak_bytes - base.peak_bytes)
        step_s = None
        if before.time is not None and forecast.time is not None and base.time is not None:
            step_s = before.time.total_s * forecast.time.total_s / max(base.time.total_s, 1e-12)
        fits = peak_bytes <= choice.budget_bytes and not forecast.full_tier
        found.append(UsefulLever(option, kind, effect, before, peak_bytes, step_s, fits, was_fitting))
        if fits and not was_fitting:
            return found[-1]
    best = max(found, key=lambda each: (each.fits, each.gain), default=None)
    return best if best is not None and best.gain >= _LEAST_GAIN else None


def _options(before: Forecast, workload: Workload, *, is_needed: bool) -> Iterator[tuple[str, Kind, str, Changes]]:
    """Yield the options that ``before`` does not use. Optimizers come first, because their forecasts require no new
    trace. LoRA comes last, because it trains different weights; it is considered only if no plan fits."""
    plan = before.plan
    names = (*SMALL_STATES, "adafactor") if plan.optimizer.name in ("adamw", "adam") else ()
    for name in names:
        # The label of an optimizer compares it with PyTorch's code for the same optimizer, not with AdamW.
        effect = (
            choice_of("optimizer.name", name).note if name in SMALL_STATES else f"{name} replaces {plan.optimizer.name}"
        )
        yield f"--trainer.optimizer {name}", Kind.APPROXIMATE, effect, {"optimizer.name": name}
    for mode in {"32-true": PRECISIONS, "bf16-mixed": PRECISIONS[1:]}.get(plan.precision.mode, ()):
        choice = choice_of("precision.mode", mode)
        yield f"--trainer.precision {mode}", choice.kind or Kind.APPROXIMATE, choice.note, {"precision.mode": mode}
    for lever in LEVERS:
        if lever.must_be_allowed and can_add(lever, plan, workload):
            choice = lever.choice(lever.on)
            option = f"--trainer.{lever.keyword} true"
            yield option, choice.kind or Kind.NEAR, choice.note, {lever.field: lever.on}
    if is_needed and plan.adapter.lora_rank is None:
        effect = "only low-rank adapters are trained"
        yield f"--trainer.lora {_LORA_RANK}", Kind.APPROXIMATE, effect, {"adapter.lora_rank": _LORA_RANK}
