"""Alternatives if no plan fits: options to allow, a smaller batch, more ranks, or a larger device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from roomier.core.errors import PlanError, RoomierError
from roomier.core.units import format_bytes
from roomier.plan import Plan
from roomier.plan.levers import LEVERS
from roomier.plan.parts import ChoicePlan
from roomier.planner.choice import Choice, words_of
from roomier.planner.choosing.candidates import Changes, can_add, changed
from roomier.planner.choosing.choose import budget_of, choose
from roomier.planner.choosing.keywords import as_call, trainer_keywords
from roomier.planner.choosing.pricing import ESTIMATE_ERROR, Check, ClosedForms, Prices
from roomier.planner.deadline import ADVICE_S, Deadline
from roomier.planner.dry_runs.confirm import confirm
from roomier.planner.fake.user_code import DryRunError, reason_of
from roomier.planner.forecast import Forecast
from roomier.planner.hardware.devices import SHEETS
from roomier.planner.hardware.machine import Machine
from roomier.planner.workload import Workload

_PRECISIONS = ("bf16-mixed", "bf16-true")
_SMALL_STATES = ("adamw8bit", "adamw4bit")
_MAX_TIMES = 256  # largest factor by which the number of devices is multiplied


def no_plan_fits(
    workload: Workload,
    plan: Plan,
    choice: Choice,
    *,
    keeps_micro_batch: str = "",
    check: Check | None = None,
    prices: Prices | None = None,
    deadline: Deadline | None = None,
) -> PlanError:
    """Return an error that contains the smallest plan, its memory, and alternatives that fit.

    Args:
        workload: workload that was planned in ``choice``.
        plan: requested plan.
        choice: result of :func:`choose` in which no plan fits.
        keeps_micro_batch: reason why micro-batches cannot be split; empty if they can be split.
        check: additional rule of the run, as in :func:`choose`.
        prices: source of forecasts; None uses closed-form forecasts.
        deadline: time limit of the search. Alternatives that are not evaluated before the deadline are omitted, and the
            error reports this. None allows :data:`ADVICE_S` seconds.
    """
    deadline = deadline or Deadline.after(ADVICE_S)
    smallest = _smallest(choice)
    needs, budget = format_bytes(smallest.peak_bytes), format_bytes(choice.budget_bytes)
    how = words_of(smallest.plan, smallest.micro_batch)
    is_auto = plan.parallel.strategy == "auto"
    smallest_text = "the smallest plan" if choice.is_complete else "the smallest plan evaluated before the time limit"
    what = f"{smallest_text}, {how}," if is_auto else how
    problem = f"{what} needs {needs} on each rank, but the budget is {budget}"
    peaks = _Peaks(workload, choice.machine, prices or ClosedForms(workload, choice.machine), deadline)
    ways = list(_ways(workload, plan, choice, smallest, keeps_micro_batch, check, peaks))
    action = "; or ".join([*ways[:1], *(way[0].lower() + way[1:] for way in ways[1:])])
    action = action or "Use a smaller model or a larger device"
    if peaks.ran_out or not choice.is_complete:
        action += f". The search for alternatives reached its time limit. {deadline.longer}"
    given = plan.choice.memory_budget_bytes
    field, value = ("strategy", plan.parallel.strategy) if given is None else ("memory_budget", format_bytes(given))
    error = PlanError(field, value, problem, action)
    for failure in dict.fromkeys(peaks.failures):
        error.add_note(f"roomier could not evaluate all alternatives: {failure}")
    return error


def _ways(
    workload: Workload,
    plan: Plan,
    choice: Choice,
    smallest: Forecast,
    keeps_micro_batch: str,
    check: Check | None,
    peaks: _Peaks,
) -> Iterator[str]:
    machine, budget = choice.machine, choice.budget_bytes
    if plan.parallel.strategy != "auto":
        auto = replace(plan, parallel=replace(plan.parallel, strategy="auto", shard_size=None))
        found = choose(
            workload,
            auto,
            machine,
            budget_bytes=budget,
            keeps_micro_batch=keeps_micro_batch,
            check=check,
            prices=peaks.prices,
            deadline=peaks.deadline.first_half(),
        )
        peaks.ran_out = not found.is_complete
        if found.chosen is not None:
            size = found.chosen.micro_batch
            batch = "" if size == workload.batch_size else f" with micro-batches of {size} samples"
            yield f"Use {as_call(trainer_keywords(found.chosen.plan))}{batch}"
            return
        smallest = _smallest(found)
    ways = (
        _allowing(peaks, plan, smallest, budget, workload),
        _smaller_batch(peaks, workload.batch_size, smallest, budget) if keeps_micro_batch else None,
        _more_ranks(peaks, smallest, budget),
        _larger_device(peaks, plan, smallest, budget),
    )
    yield from filter(None, ways)


def _smallest(choice: Choice) -> Forecast:
    """Return the forecast with the smallest peak. If the offloaded data of at least one plan fits in its tier, only
    such plans are compared."""
    found = (each.forecast for each in choice.considered if each.forecast)
    return min(found, key=lambda each: (bool(each.full_tier), each.peak_bytes))


class _Peaks:
    """Peaks of plans that were not requested. A peak is a closed-form forecast, or, if the plan fits, the result of a
    dry run.

    Attributes:
        machine: machine to plan for.
        prices: forecasts on ``machine``.
        deadline: time limit.
        ran_out: whether a plan was skipped because of the deadline.
        failures: one line for each failure other than a rejected plan.
    """

    def __init__(self, workload: Workload, machine: Machine, prices: Prices, deadline: Deadline) -> None:
        self.machine = machine
        self.prices = prices
        self.deadline = deadline
        self.ran_out = False
        self.failures: list[str] = []
        self._workload = workload
        self._prices = {machine.device.name: prices}

    def peak_bytes(self, plan: Plan, micro_batch: int, budget_bytes: int, machine: Machine | None = None) -> int | None:
        """Return the peak of a step; None if the peak cannot be forecast or the deadline has passed.

        Args:
            plan: plan with a concrete strategy.
            micro_batch: number of samples per micro-batch on each rank.
            budget_bytes: memory that a device may use.
            machine: machine to use instead of the requested machine.
        """
        if self.deadline.is_over:
            self.ran_out = True
            return None
        machine = machine or self.machine
        name = machine.device.name
        try:
            if name not in self._prices:
                self._prices[name] = ClosedForms(self._workload, machine)
            forecast = self._prices[name].estimate(plan, micro_batch)
            if forecast.fits(int(budget_bytes * (1 + ESTIMATE_ERROR))):
                forecast = confirm(self._workload.with_batch_size(micro_batch), plan, machine)
            return forecast.peak_bytes
        except Exception as error:  # the error for the user must be raised in any case
            if isinstance(error, DryRunError) or not isinstance(error, RoomierError):
                self.failures.append(reason_of(error))
            return None  # a rejected plan is not an alternative


def _allowing(peaks: _Peaks, plan: Plan, smallest: Forecast, budget: int, workload: Workload) -> str | None:
    """Return advice to allow the fewest additional options with which a plan fits; None if no such options are found.
    If the number of options is equal, memory techniques are tried first, then precisions, and then optimizers."""
    levers = [lever for lever in LEVERS if lever.must_be_allowed and lever.keyword not in plan.choice.words]
    modes = [
        mode for mode in _PRECISIONS if smallest.plan.precision.mode == "32-true" and mode not in plan.choice.words
    ]
    has_adam = smallest.plan.optimizer.name in ("adamw", "adam")
    names = [name for name in _SMALL_STATES if has_adam and name not in plan.choice.words]
    possible = [lever for lever in levers if can_add(lever, smallest.plan, workload)]
    axes: list[list[tuple[str, Changes]]] = [[(lever.keyword, {lever.field: lever.on})] for lever in possible]
    axes += [
        [(mode, {"precision.mode": mode}) for mode in modes],
        [(name, {"optimizer.name": name}) for name in names],
    ]
    chosen = (some for num_words in (1, 2, 3) for some in itertools.combinations(axes, num_words))
    for combination in itertools.chain.from_iterable(itertools.product(*some) for some in chosen):
        try:
            lean = changed(smallest.plan, {field: value for _, each in combination for field, value in each.items()})
        except RoomierError:
            continue
        peak = peaks.peak_bytes(lean, smallest.micro_batch, budget)
        if peak is not None and peak <= budget:
            words = [*plan.choice.words, *(word for word, _ in combination)]
            settings = {name: value for name, value in _settings_of_auto(plan).items() if name != "allow"}
            strategy = {"name": "auto", **settings, "allow": words}
            return f"Allow more options with strategy={strategy!r}, which needs {format_bytes(peak)}"
    return None


def _settings_of_auto(plan: Plan) -> dict[str, Any]:
    auto = replace(plan, parallel=replace(plan.parallel, strategy="auto", shard_size=None), choice=ChoicePlan())
    found = trainer_keywords(auto)["strategy"]  # the key exists, because "auto" is not the default
    return {} if isinstance(found, str) else {name: value for name, value in found.items() if name != "name"}


def _smaller_batch(peaks: _Peaks, given: int, smallest: Forecast, budget: int) -> str | None:
    batch_size = given // 2
    while batch_size >= 1:
        peak = peaks.peak_bytes(smallest.plan, batch_size, budget)
        if peak is None:
            return None
        if peak <= budget:
            return f"Use batches of {batch_size} samples instead of {given}, which need {format_bytes(peak)}"
        batch_size //= 2
    return None


def _more_ranks(peaks: _Peaks, smallest: Forecast, budget: int) -> str | None:
    """Return advice to use 2, 4, 8 or more times as many devices, so each device stores smaller shards; None if no such
    number of devices is sufficient."""
    parallel, times = smallest.plan.parallel, 2
    last = smallest.peak_bytes
    while times <= _MAX_TIMES:
        wider = parallel.devices * times
        changes: dict[str, object] = {"parallel.devices": wider}
        if parallel.strategy in ("single", "ddp", "hsdp"):
            changes |= {"parallel.strategy": "zero3", "parallel.shard_size": None}
        try:
            wide = changed(smallest.plan, changes)
        except RoomierError:
            return None
        machine = replace(peaks.machine, devices_per_node=wider)
        peak = peaks.peak_bytes(wide, smallest.micro_batch, budget, machine)
        if peak is None or (times > 2 and peak > 0.98 * last):  # more ranks do not save more memory
            return None
        if peak <= budget:
            total = wide.parallel.num_ranks
            return f"Use devices={wider}: with {total} ranks, {wide.parallel.strategy} needs {format_bytes(peak)}"
        last, times = peak, times * 2
    return None


def _larger_device(peaks: _Peaks, plan: Plan, smallest: Forecast, choice_bytes: int) -> str | None:
    """Return advice to use the smallest device in ``SHEETS`` on which the plan fits with the same number of ranks; None
    if there is no such device."""
    if plan.choice.memory_budget_bytes is not None:
        return None  # the budget is a setting and does not depend on the size of the device
    machine = peaks.machine
    for sheet in sorted(SHEETS, key=lambda each: each.device.memory_bytes):
        other = sheet.machine(machine.devices_per_node, machine.num_nodes)
        budget = budget_of(plan, other)
        if budget < max(smallest.tensor_bytes, choice_bytes):
            continue
        peak = peaks.peak_bytes(smallest.plan, smallest.micro_batch, budget, other)
        if peak is not None and peak <= budget:
            return f"Use larger devices: roomier plan --hardware {sheet.name}:{machine.devices_per_node}" + (
                f" --nodes {machine.num_nodes}" if machine.num_nodes > 1 else ""
            )
    return None
