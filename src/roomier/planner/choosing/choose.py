"""Choice of a plan: the fastest plan that fits, confirmed by a dry run of the code that will run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from roomier.core.errors import NoForecastError, PlanError, RoomierError
from roomier.core.units import format_bytes
from roomier.plan import Plan
from roomier.plan.choices import Kind, choice_of
from roomier.plan.levers import used_levers
from roomier.plan.parts import OffloadPlan
from roomier.planner.choice import Choice, Considered
from roomier.planner.choosing.candidates import STAGES, candidates
from roomier.planner.choosing.pricing import TIE, Check, DryRuns, Priced, Prices, Pricing, prices_of, time_s
from roomier.planner.deadline import SEARCH_S, Deadline
from roomier.planner.dry_runs.confirm import is_seen_by_dry_run
from roomier.planner.forecast import Forecast
from roomier.planner.hardware.machine import Machine
from roomier.planner.workload import Workload
from roomier.techniques.activation.budget import BudgetTooSmallError

ESTIMATE_ERROR = 0.05
"""Assumed relative error of closed-form forecasts. A plan that exceeds the budget by less than this fraction is
verified by a dry run."""

FREE_SHARE = {"cuda": 0.05, "mps": 0.15, "cpu": 0.15}
"""Fraction of the device memory that remains free if no budget is set, by kind of device.

All other kinds use the fraction of ``"cuda"``. On a GPU, this fraction is the largest accepted error of a forecast.
Memory shared with the host is also used by the system, the dataset and its workers, and file caches.
"""

# Maximum number of listed plans that fit, and of listed plans that do not fit. The best plan of each strategy is always
# listed.
_NUM_KEPT = 12


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
    """Return the fastest plan that fits, among all plans for the settings that ``plan`` leaves open.

    Plans that offload parameters, offload optimizer states to disk, or communicate sequentially are evaluated only if
    no other plan fits.

    If several plans are equally fast (within :data:`TIE`), the simplest plan is chosen. Exact plans precede near plans,
    and near plans precede approximate plans. Among plans with the same label, the plan with fewer memory techniques is
    simpler. If the numbers of techniques are equal, the plan whose strategy shards less is simpler.
    :mod:`roomier.planner.choosing.candidates` describes the evaluated options.

    Args:
        workload: workload whose ``batch_size`` is the requested micro-batch size. Batches may be split, but the global
            batch size is constant.
        plan: requested plan.
        machine: machine to plan for.
        budget_bytes: memory that a device may use; None uses :func:`budget_of`.
        keeps_micro_batch: reason why micro-batches cannot be split; empty if they can be split.
        check: function for an additional rule of the run, which raises a RoomierError to reject a plan.
        prices: source of forecasts; None uses closed-form forecasts.
        deadline: time limit of the search. Plans that are not evaluated before the deadline are skipped and reported.
            None allows :data:`SEARCH_S` seconds.

    Returns:
        Choice whose attribute ``chosen`` is None if no plan fits. In this case, :mod:`roomier.planner.choosing.nearest`
        can return alternatives.

    Raises:
        RoomierError: no plan can be forecast.
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
    if chosen is None:
        pricing.add(candidates(workload, plan, machine, keeps_micro_batch=keeps_micro_batch, is_last_resort=True))
        chosen = search.run()
    if not pricing.priced.priced:
        raise _no_plan_priced(plan, pricing.priced)
    considered = _considered(chosen, search, pricing.priced)
    took_s, num_plans = time.perf_counter() - start, len(pricing.candidates)
    return Choice(machine, budget, chosen, considered, took_s, num_plans, is_complete=not pricing.ran_out)


def budget_of(plan: Plan, machine: Machine) -> int:
    """Return the budget in ``plan``, or the memory of the device minus the fraction in :data:`FREE_SHARE`, in bytes."""
    given = plan.choice.memory_budget_bytes
    if given is not None:
        return given
    return int(machine.device.memory_bytes * (1 - FREE_SHARE.get(machine.device.kind, FREE_SHARE["cuda"])))


def _no_plan_priced(plan: Plan, priced: Priced) -> RoomierError:
    if priced.failures:
        error = priced.failures[0]
        if isinstance(error, RoomierError):
            return NoForecastError(error.field, error.received, error.problem, error.action)
        problem = f"cannot be forecast, because the step fails in a dry run ({type(error).__name__}: {error})"
        action = "Set a strategy, and remove memory_budget"
        return NoForecastError("strategy", plan.parallel.strategy, problem, action)
    if len({(each.field, each.problem) for each in priced.errors}) == 1:  # all plans failed with the same error
        return priced.errors[0]
    unknown = next((each for each in priced.errors if isinstance(each, NoForecastError)), None)
    if unknown is not None:
        return unknown
    too_small = [each for each in priced.errors if isinstance(each, BudgetTooSmallError)]
    if too_small and len(too_small) == len(priced.errors):
        return min(too_small, key=lambda each: each.least_bytes)
    reasons = "; ".join(dict.fromkeys(each.reason for each in priced.refused))
    action = "Change these settings, or set a strategy"
    return PlanError("strategy", plan.parallel.strategy, f"every plan is rejected: {reasons}", action)


# ---- the search ------------------------------------------------------------------------------------------------------


class _Search:
    """Search that verifies the fastest plan by a dry run, and continues with the next plan if the verified plan does
    not fit.

    Attributes:
        budget_bytes: memory that a device may use.
        fitting: forecasts of plans that fit but are not chosen.
        too_large: forecasts of plans that do not fit.
    """

    def __init__(self, budget_bytes: int, pricing: Pricing, dry_runs: DryRuns) -> None:
        self.budget_bytes = budget_bytes
        self.fitting: list[Forecast] = []
        self.too_large: list[Forecast] = []
        self._pricing = pricing
        self._dry_runs = dry_runs
        self._confirmed: dict[int, Forecast | None] = {}

    def run(self) -> Forecast | None:
        """Return the chosen forecast; None if no plan fits."""
        for find in (self._pricing.find_fastest, self._pricing.price_all):
            find()
            while fitting := [each for each in self._pricing.priced.priced if self._pricing.fits(each)]:
                picked = simplest_of_the_fastest(fitting)
                confirmed = self._confirm(picked)
                if confirmed is not None and confirmed.fits(self.budget_bytes):
                    self._divide(picked)
                    return replace(confirmed, time=picked.time)  # compared times must be from the same method
                self._pricing.reject(picked)
                find()
        self._divide(None)
        return None

    def _divide(self, picked: Forecast | None) -> None:
        self.fitting, self.too_large = [], []
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
    """Return the simplest of the forecasts that are as fast as the fastest forecast. ``forecasts`` must not be
    empty."""
    fastest_s = min(map(time_s, forecasts))
    tied = [each for each in forecasts if time_s(each) <= fastest_s * (1 + TIE)]
    return min(tied, key=lambda each: (*simplicity(each.plan), time_s(each), each.peak_bytes))


def simplicity(plan: Plan) -> tuple[int, ...]:
    """Return a sort key that increases with the difference between ``plan`` and a plain training step.

    The key contains the least exact label (:class:`Kind`) among the precision, the optimizer and the memory techniques
    of ``plan``, the number of memory techniques, the degree of sharding, and the number of micro-batches. The labels of
    the strategy and the micro-batch size do not count, because every plan on several ranks has the label near.
    """
    used = used_levers(plan)
    kinds = [
        choice_of("precision.mode", plan.precision.mode).kind,
        *(each.choice(each.value(plan)).kind for each in used),
    ]
    if plan.optimizer.name is not None:
        kinds.append(choice_of("optimizer.name", plan.optimizer.name).kind)
    offload = plan.offload
    tiers = (offload.optimizer_states, offload.parameters, offload.activations)
    num_levers = len(used) + (plan.activation.policy != "none") + sum(tier != "none" for tier in tiers)
    num_levers += (plan.parallel.communication != "overlapped") + (offload.buffers != OffloadPlan.buffers)
    order = list(Kind)
    worst = max(order.index(kind) for kind in kinds if kind is not None)
    return worst, num_levers, STAGES.index(plan.parallel.strategy), plan.batch.accumulate_grad_batches


# ---- the considered plans of a Choice --------------------------------------------------------------------------------


def _considered(chosen: Forecast | None, search: _Search, priced: Priced) -> tuple[Considered, ...]:
    fitting = sorted(search.fitting, key=time_s)
    too_large = sorted(search.too_large, key=lambda each: (bool(each.full_tier), each.peak_bytes))
    found: list[Considered] = []
    if chosen is not None:
        found.append(Considered(chosen.plan, chosen.micro_batch, chosen, fits=True))
        found += (_not_chosen(each, fits=True, reason=_slower(each, chosen)) for each in _few(fitting))
    found += (_not_chosen(each, fits=False, reason=_too_large(each, search)) for each in _few(too_large))
    return (*found, *priced.refused, *_unpriced(priced.unpriced))


def _not_chosen(forecast: Forecast, *, fits: bool, reason: str) -> Considered:
    return Considered(forecast.plan, forecast.micro_batch, forecast, fits, reason)


def _few(forecasts: Sequence[Forecast]) -> Iterator[Forecast]:
    """Yield a limited number of forecasts from the start of the list, and the first forecast of each strategy."""
    seen: set[str] = set()
    for index, each in enumerate(forecasts):
        if index < _NUM_KEPT or _stage(each) not in seen:
            yield each
        seen.add(_stage(each))


def _unpriced(found: Sequence[Considered]) -> Iterator[Considered]:
    """Yield the first plan of each strategy. Its reason also states how many other plans in ``found`` use this
    strategy."""
    by_strategy: dict[str, list[Considered]] = {}
    for each in found:
        by_strategy.setdefault(each.plan.parallel.strategy, []).append(each)
    for first, *others in by_strategy.values():
        yield replace(first, reason=first.reason + (f" (and {len(others)} more)" if others else ""))


def _slower(forecast: Forecast, chosen: Forecast) -> str:
    ratio = time_s(forecast) / time_s(chosen) if time_s(chosen) else 1.0
    if ratio > 1 + TIE:
        return f"takes {ratio:.2f} times as long"
    return "equally fast, but less simple"


def _too_large(forecast: Forecast, search: _Search) -> str:
    if forecast.full_tier:
        return f"offloads more than fits in the {forecast.full_tier} of a node"
    over = forecast.peak_bytes - search.budget_bytes
    return f"needs {format_bytes(forecast.peak_bytes)}, {format_bytes(over)} over the budget"
