"""Evaluation of candidates. Only the forecasts that are needed to find the fastest plan that fits are computed.

[Note: plans that are not evaluated]
Most of the planning time is spent in traces. Each combination of techniques that reduce activation memory requires one
trace. Neither a memory technique nor a smaller micro-batch makes a step faster. The *plain* plan of a strategy has no
memory techniques and has full micro-batches. Therefore, the plain plan is at least as fast as any other plan of the
strategy, and is evaluated first. A strategy is skipped if its plain plan is not faster than a plan that fits. For one
set of techniques, micro-batches smaller than a micro-batch that fits are skipped. If the smallest micro-batch does not
fit, the sizes between the smallest and the largest micro-batch do not fit either. If no plan fits, all plans are
evaluated to find the nearest plan.

A chunked loss can be faster than a plain loss, because a chunked loss moves fewer bytes. A chunked loss still counts as
a memory technique.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from roomier.api.module import network_of
from roomier.core.errors import RoomierError
from roomier.core.log import notice
from roomier.plan import Plan
from roomier.plan.levers import LEVERS
from roomier.planner.choice import Considered
from roomier.planner.choosing.candidates import Candidate
from roomier.planner.deadline import Deadline
from roomier.planner.dry_runs.confirm import confirm
from roomier.planner.fake.user_code import DryRunError, reason_of
from roomier.planner.forecast import Forecast
from roomier.planner.formula.estimate import Estimator
from roomier.planner.hardware.machine import Machine
from roomier.planner.workload import Workload

TIE = 0.02
"""Relative difference of step times below which plans count as equally fast, because a measurement cannot rank such
plans."""

Check = Callable[[Plan], None]
"""Function that raises a RoomierError if the run does not support the given plan."""


class Prices(Protocol):
    """Source of forecasts."""

    def estimate(self, plan: Plan, micro_batch: int) -> Forecast:
        """Return the forecast of ``plan`` with ``micro_batch`` samples on each rank.

        Raises:
            RoomierError: the plan cannot be built.
        """


class DryRuns:
    """Forecasts by dry runs, which are slow but as accurate as possible.

    Args:
        workload: workload with any batch size.
        machine: machine to plan for.
    """

    def __init__(self, workload: Workload, machine: Machine) -> None:
        self._workload = workload
        self._machine = machine

    def estimate(self, plan: Plan, micro_batch: int) -> Forecast:
        """Return the forecast of ``plan`` with ``micro_batch`` samples on each rank, by a dry run."""
        return confirm(self._workload.with_batch_size(micro_batch), plan, self._machine)


class ClosedForms:
    """Closed-form forecasts. If the closed form fails for a model, dry runs are used, and a notice reports this.

    Args:
        workload: workload with any batch size.
        machine: machine to plan for.
    """

    def __init__(self, workload: Workload, machine: Machine) -> None:
        self._estimator = Estimator(workload, machine)
        self._dry_runs = DryRuns(workload, machine)
        self._name = type(network_of(workload.module)).__name__
        self._has_reported = False
        self._hopeless: set[str] = set()  # problems that also occur in a dry run

    def estimate(self, plan: Plan, micro_batch: int) -> Forecast:
        """Return the forecast of ``plan`` with ``micro_batch`` samples on each rank."""
        try:
            return self._estimator.estimate(plan, micro_batch)
        except RoomierError as error:
            if not isinstance(error, DryRunError) or error.problem in self._hopeless:
                raise
            found: Exception = error
        except Exception as error:  # the closed form makes more assumptions about a model than a dry run
            found = error
        return self._without_closed_form(plan, micro_batch, found)

    def _without_closed_form(self, plan: Plan, micro_batch: int, error: Exception) -> Forecast:
        try:
            forecast = self._dry_runs.estimate(plan, micro_batch)
        except DryRunError:  # the model is invalid, or its step cannot be forecast
            if isinstance(error, DryRunError):
                self._hopeless.add(error.problem)
            raise
        if not self._has_reported:
            self._has_reported = True
            why = reason_of(error)
            notice(
                f"plans for {self._name} are compared by dry runs, which takes longer, because the memory formula "
                f"failed: the step {why}"
            )
        return forecast


@dataclass
class Priced:
    """Plans with their forecasts.

    Attributes:
        priced: forecasts, in the order in which they were computed.
        refused: plans that rules or the build reject.
        unpriced: plans that were not evaluated, with the reason for each plan.
        errors: errors of plans that were rejected for reasons other than a rule of Plan, in order of occurrence.
        failures: exceptions of dry runs that are not rejections of a plan.
    """

    priced: list[Forecast] = field(default_factory=list)
    refused: list[Considered] = field(default_factory=list)
    unpriced: list[Considered] = field(default_factory=list)
    errors: list[RoomierError] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)


def prices_of(workload: Workload, machine: Machine) -> Prices:
    """Return the source of closed-form forecasts for ``workload`` on ``machine``."""
    return ClosedForms(workload, machine)


class Pricing:
    """Sequential evaluation of candidates; see [Note: plans that are not evaluated].

    Args:
        found: all candidates. For each strategy, plans without techniques come first. For each set of techniques, full
            micro-batches come first.
        prices: source of forecasts.
        check: additional rule of the run; None if there is no such rule.
        budget_bytes: memory that a device may use.
        deadline: time limit of the search. Candidates that are not evaluated before the deadline are skipped. The
            deadline has no effect until one candidate has a forecast.

    Attributes:
        priced: results so far.
        ran_out: whether a candidate was skipped because of the deadline.
    """

    def __init__(
        self,
        found: Sequence[Candidate],
        prices: Prices,
        check: Check | None,
        *,
        budget_bytes: float,
        deadline: Deadline,
    ) -> None:
        self.priced = Priced()
        self._prices = prices
        self._check = check
        self._budget_bytes = budget_bytes
        self._deadline = deadline
        self.ran_out = False
        self._known: dict[int, Forecast | None] = {}
        self._too_large: set[int] = set()
        self._rows: dict[Hashable, dict[Hashable, list[Candidate]]] = {}
        self.add(found)

    def add(self, found: Sequence[Candidate]) -> None:
        """Add candidates, in the same order as in the constructor."""
        for each in found:
            if each.refusal:
                self.priced.refused.append(Considered(each.plan, each.micro_batch, None, False, each.refusal))
            else:
                rows = self._rows.setdefault(_stage(each.plan), {})
                rows.setdefault(_levers(each.plan), []).append(each)

    @property
    def candidates(self) -> list[Candidate]:
        """Candidates that no rule rejects."""
        return [each for rows in self._rows.values() for row in rows.values() for each in row]

    def find_fastest(self) -> None:
        """Evaluate the candidates that could be the fastest plan that fits."""
        self.priced.unpriced.clear()
        plain_s = {stage: self._time_s(next(iter(rows.values()))[0]) for stage, rows in self._rows.items()}
        for stage, rows in sorted(self._rows.items(), key=lambda item: plain_s[item[0]]):
            for row in rows.values():
                if self._best_s() <= plain_s[stage] * (1 + TIE):
                    break
                self._price_row(row)
        self._add_unpriced("not faster than the chosen plan; it only saves memory that is not needed")

    def fits(self, forecast: Forecast) -> bool:
        """Return whether the plan of ``forecast`` fits according to the results so far."""
        return id(forecast) not in self._too_large and forecast.fits(int(self._budget_bytes))

    def reject(self, forecast: Forecast) -> None:
        """Record that a dry run did not confirm that the plan of ``forecast`` fits."""
        self._too_large.add(id(forecast))

    def price_all(self) -> None:
        """Evaluate all other candidates."""
        self.priced.unpriced.clear()
        for each in self.candidates:
            self._price(each)

    def _price_row(self, row: Sequence[Candidate]) -> None:
        first, *others = row
        if self._fits(first) or not others:
            return
        if self._fits(others[-1]):
            next((each for each in others[:-1] if self._fits(each)), None)

    def _best_s(self) -> float:
        return min((time_s(each) for each in self.priced.priced if self.fits(each)), default=math.inf)

    def _fits(self, candidate: Candidate) -> bool:
        forecast = self._price(candidate)
        return forecast is not None and self.fits(forecast)

    def _time_s(self, candidate: Candidate) -> float:
        forecast = self._price(candidate)
        return 0.0 if forecast is None else time_s(forecast)  # a rejected plan may be valid with other techniques

    def _price(self, candidate: Candidate) -> Forecast | None:
        key = id(candidate)
        if key not in self._known:
            self.ran_out = self.ran_out or (bool(self.priced.priced) and self._deadline.is_over)
            if self.ran_out:
                return None
            self._known[key] = self._price_one(candidate)
        return self._known[key]

    def _price_one(self, each: Candidate) -> Forecast | None:
        try:
            if self._check is not None:
                self._check(each.plan)
            forecast = self._prices.estimate(each.plan, each.micro_batch)
        except RoomierError as error:
            self.priced.errors.append(error)
            reason = f"{error.field}: {error.problem}"
        except Exception as error:  # user code in a dry run can raise any exception
            self.priced.failures.append(error)
            reason = f"the step fails in a dry run ({type(error).__name__}: {error})"
        else:
            self.priced.priced.append(forecast)
            return forecast
        same = (each.plan.parallel.strategy, reason)
        if same not in {(one.plan.parallel.strategy, one.reason) for one in self.priced.refused}:
            self.priced.refused.append(Considered(each.plan, each.micro_batch, None, False, reason))
        return None

    def _add_unpriced(self, reason: str) -> None:
        if self.ran_out:
            reason = f"not evaluated before the time limit. {self._deadline.longer}"
        self.priced.unpriced += [
            Considered(each.plan, each.micro_batch, None, False, reason, is_left_out=True)
            for each in self.candidates
            if id(each) not in self._known
        ]


def time_s(forecast: Forecast) -> float:
    """Return the duration of a step in seconds; infinity if the forecast has no time."""
    return math.inf if forecast.time is None else forecast.time.total_s


def _stage(plan: Plan) -> Hashable:
    """Return the settings of ``plan`` that memory techniques do not change."""
    return plan.parallel, plan.precision, plan.optimizer.name


def _levers(plan: Plan) -> Hashable:
    return plan.activation, plan.offload, *(lever.value(plan) for lever in LEVERS)
