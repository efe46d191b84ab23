"""Which plan to take: the fastest of those that fit, confirmed by a dry run of the code that will run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from roomier.core.errors import PlanError, RoomierError
from roomier.core.units import format_bytes
from roomier.hardware.machine import Machine
from roomier.plan import Plan
from roomier.plan.choices import Kind, kind_of
from roomier.plan.levers import used_levers
from roomier.planner.choice import Choice, Considered
from roomier.planner.choosing.candidates import STAGES, candidates
from roomier.planner.choosing.pricing import TIE, Check, DryRuns, Priced, Prices, Pricing, prices_of, time_s
from roomier.planner.deadline import SEARCH_S, Deadline
from roomier.planner.dry_runs.confirm import is_seen_by_dry_run
from roomier.planner.forecast import Forecast
from roomier.planner.workload import Workload

ESTIMATE_ERROR = 0.05
"""A closed form may say so much too much: what it puts barely above the budget is looked at by a dry run."""

FREE_SHARE = {"cuda": 0.05, "mps": 0.15, "cpu": 0.15}
"""Of a device without a budget, what is left free. 5 % is the worst error that the forecast is held to. Memory that is
the host's too has other tenants: the system, the data set and its workers, file caches."""

_NUM_KEPT = 12  # of the plans that fit, and of those that do not, besides the best of each strategy


def choose(
    workload: Workload,
    plan: Plan,
    machine: Machine,
    *,
    budget_bytes: int | None = None,
    keeps_micro_batch: str = "",
    check: Check | None = None,
    prices: Prices | None = None,
    deadline: Deadline | None = None,
) -> Choice:
    """The fastest plan that fits, of all that ``plan`` leaves open.

    Where several are as fast (within :data:`TIE`), the simplest: exact before near before approximate, fewer levers, a
    strategy that cuts less. See :mod:`roomier.planner.choosing.candidates` for the options that are tried.

    Args:
        workload: its ``batch_size`` is the micro-batch that was given; batches may be cut, the global one stays.
        budget_bytes: what a device may hold; None takes that of ``plan``, else what ``machine`` has.
        keeps_micro_batch: why micro-batches stay as they are; empty where they may be cut.
        check: a rule of the run, beside those of the Plan.
        prices: what each plan costs; None takes the closed form.
        deadline: what is not priced until then is left out, and said to be; None is after :data:`SEARCH_S`.

    Returns:
        ``chosen`` is None where nothing fits: :mod:`roomier.planner.choosing.nearest` says what would.

    Raises:
        RoomierError: no step of the model can be forecast.
    """
    start = time.perf_counter()
    budget = budget_of(plan, machine) if budget_bytes is None else budget_bytes
    found = candidates(workload, plan, machine, keeps_micro_batch=keeps_micro_batch)
    pricing = Pricing(
        found,
        prices or prices_of(workload, machine),
        check,
        budget_bytes=budget * (1 + ESTIMATE_ERROR),
        deadline=deadline or Deadline.after(SEARCH_S),
    )
    search = _Search(budget, pricing, DryRuns(workload, machine))
    chosen = search.run()
    if not pricing.priced.priced:
        raise _nothing_priced(plan, pricing.priced)
    considered = _considered(chosen, search, pricing.priced)
    took_s, num_plans = time.perf_counter() - start, len(pricing.candidates)
    return Choice(machine, budget, chosen, considered, took_s, num_plans, is_complete=not pricing.ran_out)


def budget_of(plan: Plan, machine: Machine) -> int:
    """What a device may hold: what ``plan`` says, else what it has, less :data:`FREE_SHARE`."""
    given = plan.choice.memory_budget_bytes
    if given is not None:
        return given
    return int(machine.device.memory_bytes * (1 - FREE_SHARE[machine.device.kind]))


def _nothing_priced(plan: Plan, priced: Priced) -> RoomierError:
    if priced.failures:
        error = priced.failures[0]
        if isinstance(error, RoomierError):
            return error
        problem = f"its step cannot be forecast: without values it fails ({type(error).__name__}: {error})"
        return RoomierError("strategy", plan.parallel.strategy, problem, "Name a strategy, and leave out memory_budget")
    if len({(each.field, each.problem) for each in priced.errors}) == 1:  # all fail alike: the rules do not matter
        return priced.errors[0]
    reasons = "; ".join(dict.fromkeys(each.reason for each in priced.refused))
    action = "Change what these say, or name a strategy"
    return PlanError("strategy", plan.parallel.strategy, f"every plan is refused: {reasons}", action)


# ---- the search ------------------------------------------------------------------------------------------------------


class _Search:
    """Takes the fastest forecast that fits, and holds it against a dry run, until one does.

    Attributes:
        fitting, too_large: forecasts that are not chosen.
    """

    def __init__(self, budget_bytes: int, pricing: Pricing, dry_runs: DryRuns) -> None:
        self.budget_bytes = budget_bytes
        self.fitting: list[Forecast] = []
        self.too_large: list[Forecast] = []
        self._pricing = pricing
        self._dry_runs = dry_runs
        self._confirmed: dict[int, Forecast | None] = {}

    def run(self) -> Forecast | None:
        """The chosen one; None where nothing fits."""
        for find in (self._pricing.find_fastest, self._pricing.price_all):
            find()
            while fitting := [each for each in self._pricing.priced.priced if self._pricing.fits(each)]:
                picked = simplest_of_the_fastest(fitting)
                confirmed = self._confirm(picked)
                if confirmed is not None and confirmed.fits(self.budget_bytes):
                    self._divide(picked)
                    return replace(confirmed, time=picked.time)  # all times by one method: they are compared
                self._pricing.reject(picked)
                find()
        self._divide(None)
        return None

    def _divide(self, picked: Forecast | None) -> None:
        for each in self._pricing.priced.priced:
            if each is picked:
                continue
            known = self._confirmed.get(id(each), each)
            if known is not None:
                (self.fitting if known.fits(self.budget_bytes) else self.too_large).append(known)

    def _confirm(self, picked: Forecast) -> Forecast | None:
        if picked.method != "dry run" and is_seen_by_dry_run(picked.plan, picked.machine):
            self._confirmed[id(picked)] = self._dry_run(picked)
        return self._confirmed.get(id(picked), picked)

    def _dry_run(self, picked: Forecast) -> Forecast | None:
        priced = self._pricing.priced
        try:
            return self._dry_runs.estimate(picked.plan, picked.micro_batch)
        except RoomierError as error:
            reason = f"{error.field}: {error.problem}"
        except Exception as error:
            priced.failures.append(error)
            reason = f"the step fails in a dry run ({type(error).__name__}: {error})"
        priced.refused.append(Considered(picked.plan, picked.micro_batch, None, False, reason))
        return None


def _stage(forecast: Forecast) -> str:
    return forecast.plan.parallel.strategy


def simplest_of_the_fastest(forecasts: Sequence[Forecast]) -> Forecast:
    """Of ``forecasts``, at least one, the simplest of those that are as fast as the fastest."""
    fastest_s = min(map(time_s, forecasts))
    tied = [each for each in forecasts if time_s(each) <= fastest_s * (1 + TIE)]
    return min(tied, key=lambda each: (*simplicity(each.plan), time_s(each), each.peak_bytes))


def simplicity(plan: Plan) -> tuple[int, ...]:
    """Return a sort key of the distance from a plain step: the least exact label within a rank, the number of levers,
    how much the strategy shards, the number of micro-batches.

    Labels of strategy and micro-batch do not count, because every plan on several ranks is near.
    """
    used = used_levers(plan)
    kinds = [kind_of("precision.mode", plan.precision.mode), *(each.choice(each.value(plan)).kind for each in used)]
    if plan.optimizer.name is not None:
        kinds.append(kind_of("optimizer.name", plan.optimizer.name))
    num_levers = len(used) + (plan.activation.policy != "none") + (plan.offload.activations != "none")
    order = list(Kind)
    worst = max(order.index(kind) for kind in kinds if kind is not None)
    return worst, num_levers, STAGES.index(plan.parallel.strategy), plan.batch.accumulate_grad_batches


# ---- what is told ----------------------------------------------------------------------------------------------------


def _considered(chosen: Forecast | None, search: _Search, priced: Priced) -> tuple[Considered, ...]:
    fitting = sorted(search.fitting, key=time_s)
    too_large = sorted(search.too_large, key=lambda each: each.peak_bytes)
    told: list[Considered] = []
    if chosen is not None:
        told.append(Considered(chosen.plan, chosen.micro_batch, chosen, fits=True))
        told += (_told(each, fits=True, reason=_slower(each, chosen)) for each in _few(fitting))
    told += (_told(each, fits=False, reason=_too_large(each, search)) for each in _few(too_large))
    return (*told, *priced.refused, *_unpriced(priced.unpriced))


def _told(forecast: Forecast, *, fits: bool, reason: str) -> Considered:
    return Considered(forecast.plan, forecast.micro_batch, forecast, fits, reason)


def _few(forecasts: Sequence[Forecast]) -> Iterator[Forecast]:
    """The first ones, and the first of each strategy."""
    seen: set[str] = set()
    for index, each in enumerate(forecasts):
        if index < _NUM_KEPT or _stage(each) not in seen:
            yield each
        seen.add(_stage(each))


def _unpriced(found: Sequence[Considered]) -> Iterator[Considered]:
    """One for each strategy, with how many there are."""
    by_strategy: dict[str, list[Considered]] = {}
    for each in found:
        by_strategy.setdefault(each.plan.parallel.strategy, []).append(each)
    for first, *others in by_strategy.values():
        yield replace(first, reason=first.reason + (f" (and {len(others)} more)" if others else ""))


def _slower(forecast: Forecast, chosen: Forecast) -> str:
    ratio = time_s(forecast) / time_s(chosen) if time_s(chosen) else 1.0
    if ratio > 1 + TIE:
        return f"{ratio:.2f} times as slow"
    return "as fast, and less simple"


def _too_large(forecast: Forecast, search: _Search) -> str:
    over = forecast.peak_bytes - search.budget_bytes
    return f"needs {format_bytes(forecast.peak_bytes)}, {format_bytes(over)} too much"
