"""What the candidates cost, as far as it must be known to find the fastest that fits.

[Note: what need not be priced]
Traces take the time of planning, one for each way in which a forward may keep less. Such a lever never makes a step
faster, nor does a batch in smaller pieces. So the *plain* plan of a strategy, which pulls no lever and cuts no batch,
is as fast as any plan of that strategy, and is priced first. A strategy whose plain plan is no faster than a plan that
fits has nothing to offer; of one set of levers, pieces smaller than those that fit have nothing to offer either; and
where the smallest pieces do not fit, those between the largest and them do not. If nothing fits, everything is priced,
since then the question is what is nearest.

One lever may in truth be faster than none: the loss in chunks, which moves fewer bytes. It is taken for one of memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from roomier.api.wrapped import network_of
from roomier.core.errors import RoomierError
from roomier.core.log import notice
from roomier.hardware.machine import Machine
from roomier.plan import Plan
from roomier.plan.levers import LEVERS
from roomier.planner.choice import Considered
from roomier.planner.choosing.candidates import Candidate
from roomier.planner.deadline import Deadline
from roomier.planner.dry_runs.confirm import confirm
from roomier.planner.fake.user_code import DryRunError, reason_of
from roomier.planner.forecast import Forecast
from roomier.planner.formula.estimate import Estimator
from roomier.planner.workload import Workload

TIE = 0.02
"""Plans whose steps differ by less are equally fast: the clock of a real run does not tell them apart."""

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
    """Prices by the closed form; by a dry run where the closed form finds no way through a model, which is told."""

    def __init__(self, workload: Workload, machine: Machine) -> None:
        self._estimator = Estimator(workload, machine)
        self._dry_runs = DryRuns(workload, machine)
        self._name = type(network_of(workload.module)).__name__
        self._has_told = False
        self._hopeless: set[str] = set()  # what fails in a dry run as well

    def estimate(self, plan: Plan, micro_batch: int) -> Forecast:
        try:
            return self._estimator.estimate(plan, micro_batch)
        except RoomierError as error:
            if not isinstance(error, DryRunError) or error.problem in self._hopeless:
                raise
            found: Exception = error
        except Exception as error:  # it reads more into a model than a dry run does
            found = error
        return self._without_closed_form(plan, micro_batch, found)

    def _without_closed_form(self, plan: Plan, micro_batch: int, error: Exception) -> Forecast:
        try:
            forecast = self._dry_runs.estimate(plan, micro_batch)
        except DryRunError:  # the model is wrong, or no step of it can be forecast
            if isinstance(error, DryRunError):
                self._hopeless.add(error.problem)
            raise
        if not self._has_told:
            self._has_told = True
            why = reason_of(error)
            notice(f"plans of {self._name} are compared by dry runs, which takes longer; by formula its step {why}")
        return forecast


@dataclass
class Priced:
    """Plans with what they cost.

    Attributes:
        priced: forecasts, in the order of the candidates.
        refused: what rules, or the build, refuse.
        unpriced: what was not looked at, and why.
        errors: what refused those of ``refused`` that no rule of a Plan did, in their order.
        failures: what a dry run raised that is no refusal.
    """

    priced: list[Forecast] = field(default_factory=list)
    refused: list[Considered] = field(default_factory=list)
    unpriced: list[Considered] = field(default_factory=list)
    errors: list[RoomierError] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)


def prices_of(workload: Workload, machine: Machine) -> Prices:
    return ClosedForms(workload, machine)


class Pricing:
    """Prices candidates one after the other; see [Note: what need not be priced].

    Args:
        found: all of them, in the order of their levers, those that cut no batch first.
        budget_bytes: what a device may hold.
        deadline: what is not priced by then is left out; one plan always is.

    Attributes:
        priced: what was found out so far.
        ran_out: the deadline left something out.
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
        for each in found:
            if each.refusal:
                self.priced.refused.append(Considered(each.plan, each.micro_batch, None, False, each.refusal))
            else:
                rows = self._rows.setdefault(_stage(each.plan), {})
                rows.setdefault(_levers(each.plan), []).append(each)

    @property
    def candidates(self) -> list[Candidate]:
        """Those that no rule refuses."""
        return [each for rows in self._rows.values() for row in rows.values() for each in row]

    def find_fastest(self) -> None:
        """Price what may be the fastest that fits."""
        self.priced.unpriced.clear()
        plain_s = {stage: self._time_s(next(iter(rows.values()))[0]) for stage, rows in self._rows.items()}
        for stage, rows in sorted(self._rows.items(), key=lambda item: plain_s[item[0]]):
            for row in rows.values():
                if self._best_s() <= plain_s[stage] * (1 + TIE):
                    break
                self._price_row(row)
        self._tell_unpriced("no faster than the chosen one: it saves memory that is there")

    def fits(self, forecast: Forecast) -> bool:
        """As far as it is known."""
        return id(forecast) not in self._too_large and forecast.fits(int(self._budget_bytes))

    def reject(self, forecast: Forecast) -> None:
        """Note that one of those that were priced does not fit after all."""
        self._too_large.add(id(forecast))

    def price_all(self) -> None:
        """Price the rest."""
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
        return 0.0 if forecast is None else time_s(forecast)  # where it is refused, its levers may not be

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
        except Exception as error:  # the user's step, in a world without values: anything may come of it
            self.priced.failures.append(error)
            reason = f"the step fails in a dry run ({type(error).__name__}: {error})"
        else:
            self.priced.priced.append(forecast)
            return forecast
        same = (each.plan.parallel.strategy, reason)
        if same not in {(one.plan.parallel.strategy, one.reason) for one in self.priced.refused}:
            self.priced.refused.append(Considered(each.plan, each.micro_batch, None, False, reason))
        return None

    def _tell_unpriced(self, reason: str) -> None:
        if self.ran_out:
            reason = f"not looked at in time. {self._deadline.longer}"
        self.priced.unpriced += [
            Considered(each.plan, each.micro_batch, None, False, reason, is_left_out=True)
            for each in self.candidates
            if id(each) not in self._known
        ]


def time_s(forecast: Forecast) -> float:
    return math.inf if forecast.time is None else forecast.time.total_s


def _stage(plan: Plan) -> Hashable:
    """What a lever for memory leaves as it is."""
    return plan.parallel, plan.precision, plan.optimizer.name


def _levers(plan: Plan) -> Hashable:
    return plan.activation, plan.offload, *(lever.value(plan) for lever in LEVERS)
