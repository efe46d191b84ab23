"""Alternatives if no plan fits: options to allow, a smaller batch, more ranks, or a larger device."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

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

PRECISIONS = ("bf16-mixed", "bf16-true")
SMALL_STATES = ("adamw8bit", "adamw4bit")
_TIMES = (16, 32, 64, 128, 256)  # multiples of the number of devices


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
    """Return an error that describes the plan with the smallest peak and the alternatives that fit.

    Args:
        workload: workload that was planned in ``choice``.
        plan: requested plan.
        choice: result of :func:`choose` in which no plan fits.
        keeps_micro_batch: reason why micro-batches cannot be split; empty if they can be split.
        check: function that rejects a plan, as in :func:`choose`.
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
    search = _Search(workload, plan, choice, prices or ClosedForms(workload, choice.machine), deadline)
    ways = list(search.ways(keeps_micro_batch, check))
    action = "; or ".join([*ways[:1], *(way[0].lower() + way[1:] for way in ways[1:])])
    action = action or "Use a smaller model or a larger device"
    if search.ran_out or not choice.is_complete:
        action += f". The search for alternatives reached its time limit. {deadline.longer}"
    given = plan.choice.memory_budget_bytes
    field, value = ("strategy", plan.parallel.strategy) if given is None else ("memory_budget", format_bytes(given))
    error = PlanError(field, value, problem, action)
    for failure in dict.fromkeys(search.failures):
        error.add_note(f"roomier could not evaluate all alternatives: {failure}")
    return error


def as_auto(plan: Plan) -> Plan:
    """Return ``plan`` with the strategy ``"auto"``."""
    return replace(plan, parallel=replace(plan.parallel, strategy="auto", shard_size=None))


def _smallest(choice: Choice) -> Forecast:
    """Return the forecast with the smallest peak. Plans whose offloaded data exceeds its tier are considered only if
    there are no other plans."""
    found = (each.forecast for each in choice.considered if each.forecast)
    return min(found, key=lambda each: (bool(each.full_tier), each.peak_bytes))


@dataclass(frozen=True)
class _Alternative:
    """A plan that was not requested.

    Attributes:
        advice: advice for the user, with the placeholder ``{needs}`` for the peak.
        plan: plan with a concrete strategy.
        micro_batch: number of samples per micro-batch on each rank.
        budget_bytes: memory that a device may use.
        machine: machine that the plan is for.
    """

    advice: str
    plan: Plan
    micro_batch: int
    budget_bytes: int
    machine: Machine


class _Search:
    """Search for alternatives to a plan that does not fit.

    Attributes:
        ran_out: whether an alternative was skipped because of the deadline.
        failures: one line for each failure other than a rejected plan.
    """

    def __init__(self, workload: Workload, plan: Plan, choice: Choice, prices: Prices, deadline: Deadline) -> None:
        self.ran_out = False
        self.failures: list[str] = []
        self._workload, self._plan, self._deadline = workload, plan, deadline
        self._machine, self._budget_bytes = choice.machine, choice.budget_bytes
        self._smallest = _smallest(choice)
        self._prices = {choice.machine.device.name: prices}

    def ways(self, keeps_micro_batch: str, check: Check | None) -> Iterator[str]:
        """Yield advice. If the requested strategy does not fit but another strategy does, yield only the other
        strategy."""
        machine, budget_bytes = self._machine, self._budget_bytes
        if self._plan.parallel.strategy != "auto":
            found = choose(
                self._workload,
                as_auto(self._plan),
                machine,
                budget_bytes=budget_bytes,
                keeps_micro_batch=keeps_micro_batch,
                check=check,
                prices=self._prices[machine.device.name],
                deadline=self._deadline.first_half(),
            )
            self.ran_out = not found.is_complete
            if found.chosen is not None:
                size = found.chosen.micro_batch
                batch = "" if size == self._workload.batch_size else f" with micro-batches of {size} samples"
                yield f"Use {as_call(trainer_keywords(found.chosen.plan))}{batch}"
                return
            self._smallest = _smallest(found)
        smaller = self._smaller_batches() if keeps_micro_batch else ()
        ways = (self._allowing(), smaller, self._more_ranks(), self._larger_devices())
        yield from filter(None, map(self._first_that_fits, ways))

    def _first_that_fits(self, alternatives: Iterable[_Alternative]) -> str | None:
        for each in alternatives:
            peak_bytes = self._peak_bytes(each)
            if peak_bytes is not None and peak_bytes <= each.budget_bytes:
                return each.advice.replace("{needs}", format_bytes(peak_bytes))
        return None

    def _peak_bytes(self, each: _Alternative) -> int | None:
        """Return the peak of a step; None if it cannot be forecast or the deadline has passed. The peak is a
        closed-form forecast and, if the plan fits, is confirmed by a dry run."""
        if self._deadline.is_over:
            self.ran_out = True
            return None
        name = each.machine.device.name
        try:
            if name not in self._prices:
                self._prices[name] = ClosedForms(self._workload, each.machine)
            forecast = self._prices[name].estimate(each.plan, each.micro_batch)
            if forecast.fits(int(each.budget_bytes * (1 + ESTIMATE_ERROR))):
                forecast = confirm(self._workload.with_batch_size(each.micro_batch), each.plan, each.machine)
            return forecast.peak_bytes
        except Exception as error:  # the original error must be raised in any case
            if isinstance(error, DryRunError) or not isinstance(error, RoomierError):
                self.failures.append(reason_of(error))
            return None  # a rejected plan is not an alternative

    def _alternative(self, advice: str, changes: Changes, machine: Machine | None = None) -> Iterator[_Alternative]:
        """Yield the smallest plan with ``changes``, unless a rule rejects it."""
        with suppress(RoomierError):
            plan = changed(self._smallest.plan, changes)
            yield _Alternative(advice, plan, self._smallest.micro_batch, self._budget_bytes, machine or self._machine)

    def _allowing(self) -> Iterator[_Alternative]:
        """Yield plans with additional options, ordered by their number. Plans with the same number are ordered by the
        type of option: memory techniques, precisions, optimizers."""
        smallest, allowed = self._smallest.plan, self._plan.choice.words
        levers = [each for each in LEVERS if each.must_be_allowed and can_add(each, smallest, self._workload)]
        modes = PRECISIONS if smallest.precision.mode == "32-true" else ()
        names = SMALL_STATES if smallest.optimizer.name in ("adamw", "adam") else ()
        axes: list[list[tuple[str, Changes]]] = [[(lever.keyword, {lever.field: lever.on})] for lever in levers]
        axes += [[(mode, {"precision.mode": mode}) for mode in modes]]
        axes += [[(name, {"optimizer.name": name}) for name in names]]
        axes = [[option for option in axis if option[0] not in allowed] for axis in axes]
        chosen = (some for num_words in (1, 2, 3) for some in itertools.combinations(axes, num_words))
        for combination in itertools.chain.from_iterable(itertools.product(*some) for some in chosen):
            words = [*allowed, *(word for word, _ in combination)]
            strategy = trainer_keywords(replace(as_auto(self._plan), choice=ChoicePlan(allowed=",".join(words))))[
                "strategy"
            ]
            advice = f"Allow more options with strategy={strategy!r}, which needs {{needs}}"
            changes = {field: value for _, each in combination for field, value in each.items()}
            yield from self._alternative(advice, changes)

    def _smaller_batches(self) -> Iterator[_Alternative]:
        given = size = self._workload.batch_size
        while size := size // 2:
            advice = f"Use batches of {size} samples instead of {given}, which need {{needs}}"
            yield _Alternative(advice, self._smallest.plan, size, self._budget_bytes, self._machine)

    def _more_ranks(self) -> Iterator[_Alternative]:
        """Yield plans with more devices, so that each stores smaller shards: each number up to 8 times as many, and
        larger multiples."""
        parallel = self._smallest.plan.parallel
        own, is_sharded = parallel.devices, parallel.strategy in ("zero1", "zero2", "zero3")
        changes: Changes = {} if is_sharded else {"parallel.strategy": "zero3", "parallel.shard_size": None}
        for devices in (*range(own + 1, 8 * own + 1), *(own * times for times in _TIMES)):
            strategy = parallel.strategy if is_sharded else "zero3"
            num_ranks = devices * parallel.num_nodes
            advice = f"Use devices={devices}: with {num_ranks} ranks, {strategy} needs {{needs}}"
            machine = replace(self._machine, devices_per_node=devices)
            yield from self._alternative(advice, {**changes, "parallel.devices": devices}, machine)

    def _larger_devices(self) -> Iterator[_Alternative]:
        """Yield the plan on each larger device in ``SHEETS`` with the same number of ranks, the smallest device
        first."""
        if self._plan.choice.memory_budget_bytes is not None:
            return  # the budget is a setting and does not depend on the size of the device
        own, smallest = self._machine, self._smallest
        nodes = f" --nodes {own.num_nodes}" if own.num_nodes > 1 else ""
        for sheet in sorted(SHEETS, key=lambda each: each.device.memory_bytes):
            machine = sheet.machine(own.devices_per_node, own.num_nodes)
            budget_bytes = budget_of(self._plan, machine)
            if budget_bytes >= max(smallest.tensor_bytes, self._budget_bytes):
                advice = f"Use larger devices: roomier plan --hardware {sheet.name}:{own.devices_per_node}{nodes}"
                yield _Alternative(advice, smallest.plan, smallest.micro_batch, budget_bytes, machine)
