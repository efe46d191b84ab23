"""Which plan to take: the fastest of those that fit, confirmed by a dry run of the code that will run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from roomier.core.errors import PlanError, RoomierError
from roomier.core.units import format_bytes
from roomier.hardware.machine import Machine
from roomier.plan import Plan
from roomier.plan.choices import Kind, kind_of
from roomier.planner.candidates import STAGES, Candidate, candidates
from roomier.planner.choice import Choice, Considered
from roomier.planner.confirm import confirm
from roomier.planner.estimate import Estimator
from roomier.planner.forecast import Forecast
from roomier.planner.workload import Workload

TIE = 0.02
"""Plans whose steps differ by less are equally fast: the clock of a real run does not tell them apart."""

ESTIMATE_ERROR = 0.05
"""A closed form may say so much too much: what it puts barely above the budget is looked at by a dry run."""

FREE_SHARE = {"cuda": 0.05, "mps": 0.15, "cpu": 0.15}
"""Of a device without a budget, what is left free. 5 % is the worst error that the forecast is held to. Memory that is
the host's too has other tenants: the system, the data set and its workers, file caches."""

_NUM_KEPT = 12  # of the plans that fit, and of those that do not, besides the best of each strategy

Check = Callable[[Plan], None]
"""Raises a RoomierError where the run cannot take this plan."""


class Prices(Protocol):
    """What says what a plan costs."""

    def estimate(self, plan: Plan, micro_batch: int) -> Forecast:
        """The forecast of ``plan`` with micro-batches of so many samples.

        Raises:
            RoomierError: it cannot be built.
        """


class DryRuns:
    """Prices by a dry run of each plan: slow, and as close as can be."""

    def __init__(self, workload: Workload, machine: Machine) -> None:
        self._workload = workload
        self._machine = machine

    def estimate(self, plan: Plan, micro_batch: int) -> Forecast:
        return confirm(self._workload.with_batch_size(micro_batch), plan, self._machine)


class ClosedForms:
    """Prices by the closed form; by a dry run where the closed form finds no way through a model."""

    def __init__(self, workload: Workload, machine: Machine) -> None:
        self._estimator = Estimator(workload, machine)
        self._dry_runs = DryRuns(workload, machine)

    def estimate(self, plan: Plan, micro_batch: int) -> Forecast:
        try:
            return self._estimator.estimate(plan, micro_batch)
        except RoomierError:
            raise
        except Exception:  # it reads more into a model than a dry run does, which tells what is wrong, if anything is
            return self._dry_runs.estimate(plan, micro_batch)


@dataclass
class Priced:
    """Plans with what they cost.

    Attributes:
        priced: forecasts, in the order of the candidates.
        refused: what rules, or the build, refuse.
        unseen: what was not looked at, because time ran out.
        failures: what a dry run raised that is no refusal.
    """

    priced: list[Forecast] = field(default_factory=list)
    refused: list[Considered] = field(default_factory=list)
    unseen: list[Considered] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)


def choose(
    workload: Workload,
    plan: Plan,
    machine: Machine,
    *,
    budget_bytes: int | None = None,
    keeps_micro_batch: str = "",
    check: Check | None = None,
    prices: Prices | None = None,
    limit_s: float = 120.0,
) -> Choice:
    """The fastest plan that fits, of all that ``plan`` leaves open.

    Where several are as fast (within :data:`TIE`), the simplest: exact before near before approximate, fewer levers, a
    strategy that cuts less. Nothing approximate is looked at unless ``plan.choice`` allows it by name.

    Args:
        workload: its ``batch_size`` is the micro-batch that was given; batches may be cut, the global one stays.
        budget_bytes: what a device may hold; None takes that of ``plan``, else what ``machine`` has.
        keeps_micro_batch: why micro-batches stay as they are; empty where they may be cut.
        check: a rule of the run, beside those of the Plan.
        prices: what each plan costs; None takes the closed form.
        limit_s: what is not priced until then is left out, and said to be.

    Returns:
        ``chosen`` is None where nothing fits: :mod:`roomier.planner.nearest` says what would.

    Raises:
        RoomierError: no step of the model can be forecast.
    """
    start = time.perf_counter()
    budget = budget_of(plan, machine) if budget_bytes is None else budget_bytes
    found = candidates(workload, plan, machine, keeps_micro_batch=keeps_micro_batch)
    pricing = prices or prices_of(workload, machine)
    priced = price(found, pricing, check, until_s=start + limit_s)
    if not priced.priced:
        raise _nothing_priced(plan, priced)
    search = _Search(budget, list(priced.priced), DryRuns(workload, machine), priced)
    chosen = search.run()
    considered = _considered(chosen, search, priced)
    return Choice(machine, budget, chosen, considered, time.perf_counter() - start, len(priced.priced))


def budget_of(plan: Plan, machine: Machine) -> int:
    """What a device may hold: what ``plan`` says, else what it has, less :data:`FREE_SHARE`."""
    given = plan.choice.memory_budget_bytes
    if given is not None:
        return given
    return int(machine.device.memory_bytes * (1 - FREE_SHARE[machine.device.kind]))


def prices_of(workload: Workload, machine: Machine) -> Prices:
    return ClosedForms(workload, machine)


def price(found: Sequence[Candidate], prices: Prices, check: Check | None = None, *, until_s: float) -> Priced:
    """What each of ``found`` costs.

    Args:
        until_s: of ``time.perf_counter``: what is not priced by then is ``unseen``.
    """
    priced = Priced()
    for each in found:
        if each.refusal:
            priced.refused.append(Considered(each.plan, each.micro_batch, None, False, each.refusal))
        elif priced.priced and time.perf_counter() > until_s:
            reason = "not looked at: planning took too long"
            priced.unseen.append(Considered(each.plan, each.micro_batch, None, False, reason))
        else:
            _price_one(each, prices, check, priced)
    return priced


def _price_one(each: Candidate, prices: Prices, check: Check | None, priced: Priced) -> None:
    try:
        if check is not None:
            check(each.plan)
        priced.priced.append(prices.estimate(each.plan, each.micro_batch))
        return
    except RoomierError as error:
        reason = f"{error.field}: {error.problem}"
    except Exception as error:  # the user's step, in a world without values: anything may come of it
        priced.failures.append(error)
        reason = f"the step fails in a dry run ({type(error).__name__}: {error})"
    same = (each.plan.parallel.strategy, reason)
    if same not in {(one.plan.parallel.strategy, one.reason) for one in priced.refused}:
        priced.refused.append(Considered(each.plan, each.micro_batch, None, False, reason))


def _nothing_priced(plan: Plan, priced: Priced) -> RoomierError:
    if priced.failures:
        error = priced.failures[0]
        if isinstance(error, RoomierError):
            return error
        problem = f"its step cannot be forecast: without values it fails ({type(error).__name__}: {error})"
        return RoomierError("strategy", plan.parallel.strategy, problem, "Name a strategy, and leave out memory_budget")
    reasons = "; ".join(dict.fromkeys(each.reason for each in priced.refused))
    action = "Change what these say, or name a strategy"
    return PlanError("strategy", plan.parallel.strategy, f"every plan is refused: {reasons}", action)


# ---- the search ------------------------------------------------------------------------------------------------------


class _Search:
    """Takes the fastest forecast that fits, and holds it against a dry run, until one does.

    Attributes:
        fitting, too_large: forecasts that are not chosen.
    """

    def __init__(self, budget_bytes: int, forecasts: Sequence[Forecast], dry_runs: DryRuns, priced: Priced) -> None:
        self.budget_bytes = budget_bytes
        self._dry_runs = dry_runs
        self._priced = priced
        bound = budget_bytes * (1 + ESTIMATE_ERROR)
        self.fitting: list[Forecast] = []
        self.too_large: list[Forecast] = []
        for each in forecasts:
            (self.fitting if each.fits(self._bound(each, bound)) else self.too_large).append(each)

    def _bound(self, forecast: Forecast, bound: float) -> int:
        return self.budget_bytes if forecast.method == "dry run" else int(bound)

    def run(self) -> Forecast | None:
        ratios: dict[str, float] = {}  # of a strategy: dry run by closed form, where that said too little
        while self.fitting:
            likely = [
                each for each in self.fitting if each.peak_bytes * ratios.get(_stage(each), 1.0) <= self.budget_bytes
            ]
            picked = simplest_of_the_fastest(likely or self.fitting)
            self.fitting = [each for each in self.fitting if each is not picked]
            confirmed = self._confirmed(picked)
            if confirmed is None:
                continue
            if confirmed.fits(self.budget_bytes):
                # What else the closed form lets through may be too large as well: only what is below the budget counts.
                self.too_large += [each for each in self.fitting if not each.fits(self.budget_bytes)]
                self.fitting = [each for each in self.fitting if each.fits(self.budget_bytes)]
                return replace(confirmed, time=picked.time)  # all times by one method: they are compared
            ratio = confirmed.peak_bytes / picked.peak_bytes
            ratios[_stage(picked)] = max(ratio, ratios.get(_stage(picked), 1.0))
            self.too_large.append(confirmed)
        return None

    def _confirmed(self, picked: Forecast) -> Forecast | None:
        if picked.method == "dry run":
            return picked
        try:
            return self._dry_runs.estimate(picked.plan, picked.micro_batch)
        except RoomierError as error:
            reason = f"{error.field}: {error.problem}"
        except Exception as error:
            self._priced.failures.append(error)
            reason = f"the step fails in a dry run ({type(error).__name__}: {error})"
        self._priced.refused.append(Considered(picked.plan, picked.micro_batch, None, False, reason))
        return None


def _stage(forecast: Forecast) -> str:
    return forecast.plan.parallel.strategy


def simplest_of_the_fastest(forecasts: Sequence[Forecast]) -> Forecast:
    """Of ``forecasts``, at least one, the simplest of those that are as fast as the fastest."""
    fastest_s = min(map(_time_s, forecasts))
    tied = [each for each in forecasts if _time_s(each) <= fastest_s * (1 + TIE)]
    return min(tied, key=lambda each: (*simplicity(each.plan), _time_s(each), each.peak_bytes))


def simplicity(plan: Plan) -> tuple[int, ...]:
    """How far ``plan`` is from a plain step: first by how true it is to it, then by how many levers it pulls, then by
    what its strategy cuts, then by how many pieces a batch is in."""
    kinds = [
        kind_of("precision.mode", plan.precision.mode),
        kind_of("optimizer.step_in_backward", plan.optimizer.step_in_backward),
    ]
    if plan.optimizer.name is not None:
        kinds.append(kind_of("optimizer.name", plan.optimizer.name))
    levers = (
        plan.activation.policy != "none",
        plan.offload.activations != "none",
        plan.loss.chunked,
        plan.optimizer.step_in_backward != "none",
    )
    order = list(Kind)
    worst = max(order.index(kind) for kind in kinds)
    return worst, sum(levers), STAGES.index(plan.parallel.strategy), plan.batch.accumulate_grad_batches


def _time_s(forecast: Forecast) -> float:
    return math.inf if forecast.time is None else forecast.time.total_s


# ---- what is told ----------------------------------------------------------------------------------------------------


def _considered(chosen: Forecast | None, search: _Search, priced: Priced) -> tuple[Considered, ...]:
    fitting = sorted(search.fitting, key=_time_s)
    too_large = sorted(search.too_large, key=lambda each: each.peak_bytes)
    told: list[Considered] = []
    if chosen is not None:
        told.append(Considered(chosen.plan, chosen.micro_batch, chosen, fits=True))
        told += (_told(each, fits=True, reason=_slower(each, chosen)) for each in _few(fitting))
    told += (_told(each, fits=False, reason=_too_large(each, search)) for each in _few(too_large))
    return (*told, *priced.refused, *_one_of(priced.unseen))


def _told(forecast: Forecast, *, fits: bool, reason: str) -> Considered:
    return Considered(forecast.plan, forecast.micro_batch, forecast, fits, reason)


def _few(forecasts: Sequence[Forecast]) -> Iterator[Forecast]:
    """The first ones, and the first of each strategy."""
    seen: set[str] = set()
    for index, each in enumerate(forecasts):
        if index < _NUM_KEPT or _stage(each) not in seen:
            yield each
        seen.add(_stage(each))


def _one_of(unseen: Sequence[Considered]) -> Iterator[Considered]:
    if unseen:
        num_others = len(unseen) - 1
        yield replace(unseen[0], reason=unseen[0].reason + (f", as {num_others} others" if num_others else ""))


def _slower(forecast: Forecast, chosen: Forecast) -> str:
    ratio = _time_s(forecast) / _time_s(chosen) if _time_s(chosen) else 1.0
    if ratio > 1 + TIE:
        return f"{ratio:.2f} times as slow"
    return "as fast, and less simple"


def _too_large(forecast: Forecast, search: _Search) -> str:
    over = forecast.peak_bytes - search.budget_bytes
    return f"needs {format_bytes(forecast.peak_bytes)}, {format_bytes(over)} too much"
