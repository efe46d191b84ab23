"""Evaluation of candidates. Only forecasts that are necessary to find the fastest plan that fits are computed.

[Note: plans that are not evaluated]
Most of the planning time is spent in traces, because each combination of techniques that reduce activation memory
requires one trace. To avoid most of them, the search assumes that neither a memory technique nor a smaller micro-batch
makes a step faster. The *plain* plan of a strategy, which has no memory techniques and full micro-batches, is then at
least as fast as any other plan of the strategy. It is evaluated first, and the strategy is skipped if its plain plan is
not faster than a plan that fits. For each set of techniques, micro-batches smaller than one that fits are skipped, and
if the smallest does not fit, neither do the others. If no plan fits, all plans are evaluated to find the nearest plan.

A chunked loss is an exception: it can be faster than the plain loss because it moves fewer bytes, but it still counts
as a memory technique.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from roomier.api.module import network_of
from roomier.core.errors import RoomierError
from roomier.core.log import notice
from roomier.plan import Plan
from roomier.plan.choices import Kind, choice_of
from roomier.plan.levers import LEVERS, used_levers
from roomier.plan.parts import OffloadPlan
from roomier.planner.choice import Considered
from roomier.planner.choosing.candidates import STAGES
from roomier.planner.deadline import Deadline
from roomier.planner.dry_runs.confirm import confirm, is_seen_by_dry_run
from roomier.planner.dry_runs.staged import forecast_of_stages
from roomier.planner.fake.user_code import DryRunError, reason_of
from roomier.planner.forecast import Forecast
from roomier.planner.formula.estimate import Estimator
from roomier.planner.hardware.machine import Machine
from roomier.planner.workload import Workload

TIE = 0.02
"""Relative difference of step times below which plans count as equally fast, because a measurement cannot rank such
plans."""

ESTIMATE_ERROR = 0.05
"""Assumed relative error of closed-form forecasts. A plan that exceeds the budget by less than this fraction is checked
by a dry run."""

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
    """Source of forecasts by dry runs, which are slower but more accurate than closed-form forecasts.

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
    """Source of closed-form forecasts. If the closed form fails for a model, print a notice and use dry runs.

    Args:
        workload: workload with any batch size.
        machine: machine to plan for.
    """

    def __init__(self, workload: Workload, machine: Machine) -> None:
        self._workload, self._machine = workload, machine
        self._estimator = Estimator(workload, machine)
        self._dry_runs = DryRuns(workload, machine)
        self._name = type(network_of(workload.module)).__name__
        self._has_reported = False
        self._hopeless: set[str] = set()  # problems that occur in dry runs, too

    def estimate(self, plan: Plan, micro_batch: int) -> Forecast:
        """Return the forecast of ``plan`` with ``micro_batch`` samples on each rank."""
        try:
            if plan.parallel.pipeline_parallel_size > 1:
                sized = self._workload.with_batch_size(micro_batch)
                is_estimate = plan.parallel.stages_per_rank == 1
                return forecast_of_stages(sized, plan, self._machine, self._estimator, is_estimate=is_estimate)
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


class Pricing:
    """Search for the fastest plan that fits. Candidates are evaluated one after the other, and some are skipped; see
    [Note: plans that are not evaluated]. The fastest plan is verified by a dry run. If it does not fit, the search
    continues with the next plan.

    Args:
        workload: workload with any batch size.
        machine: machine to plan for.
        prices: source of forecasts; None uses closed-form forecasts.
        check: function that raises a RoomierError to reject a plan; None accepts all plans.
        budget_bytes: memory that a device may use.
        deadline: time limit of the search. Candidates that are not evaluated before the deadline are skipped, but at
            least one candidate is evaluated.

    Attributes:
        priced: forecasts, in the order in which they were computed.
        picked: forecast of the chosen plan, an element of ``priced``; None if no plan fits.
        confirmed: results of dry runs, keyed by the id of the forecast in ``priced``; None for a dry run that failed.
        refused: plans that rules or the build reject.
        unpriced: plans that were not evaluated, with the reason for each plan.
        errors: errors of plans that were rejected by code other than the validation of Plan, in order of occurrence.
        failures: exceptions in dry runs, other than rejections of a plan.
        ran_out: whether a candidate was skipped because of the deadline.
    """

    def __init__(
        self,
        workload: Workload,
        machine: Machine,
        prices: Prices | None,
        check: Check | None,
        *,
        budget_bytes: int,
        deadline: Deadline,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.priced: list[Forecast] = []
        self.picked: Forecast | None = None
        self.confirmed: dict[int, Forecast | None] = {}
        self.refused: list[Considered] = []
        self.unpriced: list[Considered] = []
        self.errors: list[RoomierError] = []
        self.failures: list[Exception] = []
        self.ran_out = False
        self._prices = prices or ClosedForms(workload, machine)
        self._dry_runs = DryRuns(workload, machine)
        self._check = check or (lambda plan: None)
        self._deadline = deadline
        self._known: dict[int, Forecast | None] = {}
        self._too_large: set[int] = set()
        self._rows: dict[Hashable, dict[Hashable, list[Considered]]] = {}

    def add(self, found: Sequence[Considered]) -> None:
        """Add candidates. Plans without memory techniques come first in each strategy, and full micro-batches come
        first in each set of techniques."""
        for each in found:
            if each.reason:
                self.refused.append(each)
            else:
                rows = self._rows.setdefault(_stage(each.plan), {})
                rows.setdefault(_levers(each.plan), []).append(each)

    def plain_s(self, found: Sequence[Considered]) -> float:
        """Return the shortest step time of the plans in ``found`` that use no memory techniques; infinity if no
        forecast is possible. The candidates are not added."""
        plain = {_stage(each.plan): each for each in reversed(found)}  # the first plan of each stage
        seconds = [math.inf]
        for each in plain.values():
            with suppress(Exception):  # the model does not support the plan
                seconds.append(time_s(self._prices.estimate(each.plan, each.micro_batch)))
        return min(seconds)

    def run(self) -> Forecast | None:
        """Return the chosen forecast; None if no plan fits."""
        for find in (self.find_fastest, self.price_all):
            find()
            while fitting := [each for each in self.priced if self._fits(each)]:
                self.picked = simplest_of_the_fastest(fitting)
                confirmed = self._confirm(self.picked)
                if confirmed is not None and confirmed.fits(self.budget_bytes):
                    return replace(confirmed, time=self.picked.time)  # compare times from the same method
                self._too_large.add(id(self.picked))
                find()
        self.picked = None
        return None

    @property
    def candidates(self) -> list[Considered]:
        """Candidates that have not been rejected."""
        return [each for rows in self._rows.values() for row in rows.values() for each in row]

    def find_fastest(self) -> None:
        """Evaluate the candidates that could be the fastest plan that fits."""
        # If a plan is rejected, the same strategy may be valid with other techniques.
        plain_s = {stage: self._time_s(next(iter(rows.values()))[0]) for stage, rows in self._rows.items()}
        for stage, rows in sorted(self._rows.items(), key=lambda item: plain_s[item[0]]):
            for first, *others in rows.values():
                best_s = min((time_s(each) for each in self.priced if self._fits(each)), default=math.inf)
                if best_s <= plain_s[stage] * (1 + TIE):
                    break
                if not self._fits(self._price(first)) and others and self._fits(self._price(others[-1])):
                    next((each for each in others[:-1] if self._fits(self._price(each))), None)
        reason = "not faster than the chosen plan; it only saves memory that is not needed"
        if self.ran_out:
            reason = f"not evaluated before the time limit. {self._deadline.longer}"
        self.unpriced = [
            replace(each, reason=reason, is_left_out=True) for each in self.candidates if id(each) not in self._known
        ]

    def price_all(self) -> None:
        """Evaluate all other candidates."""
        self.unpriced = []
        for each in self.candidates:
            self._price(each)

    def _fits(self, forecast: Forecast | None) -> bool:
        """Return whether the plan of ``forecast`` may fit: its peak is within the budget plus a tolerance, and no dry
        run showed that it is too large."""
        return (
            forecast is not None
            and id(forecast) not in self._too_large
            and forecast.fits(int(self.budget_bytes * (1 + ESTIMATE_ERROR)))
        )

    def _time_s(self, candidate: Considered) -> float:
        forecast = self._price(candidate)
        return 0.0 if forecast is None else time_s(forecast)

    def _price(self, candidate: Considered) -> Forecast | None:
        key = id(candidate)
        if key not in self._known:
            self.ran_out = self.ran_out or (bool(self.priced) and self._deadline.is_over)
            if self.ran_out:
                return None
            self._known[key] = forecast = self._forecast(self._prices, candidate.plan, candidate.micro_batch)
            if forecast is not None:
                self.priced.append(forecast)
        return self._known[key]

    def _confirm(self, picked: Forecast) -> Forecast | None:
        is_known = id(picked) in self.confirmed or picked.method == "dry run"
        if not is_known and is_seen_by_dry_run(picked.plan, picked.machine):
            self.confirmed[id(picked)] = self._forecast(self._dry_runs, picked.plan, picked.micro_batch)
        return self.confirmed.get(id(picked), picked)

    def _forecast(self, prices: Prices, plan: Plan, micro_batch: int) -> Forecast | None:
        """Return the forecast; None if the plan is rejected. Rejections are recorded once per strategy and reason."""
        try:
            self._check(plan)
            return prices.estimate(plan, micro_batch)
        except RoomierError as error:
            self.errors.append(error)
            reason = f"{error.field}: {error.problem}"
        except Exception as error:  # user code in a dry run can raise any exception
            self.failures.append(error)
            reason = f"the step fails in a dry run ({type(error).__name__}: {error})"
        if (plan.parallel.strategy, reason) not in {(one.plan.parallel.strategy, one.reason) for one in self.refused}:
            self.refused.append(Considered(plan, micro_batch, reason=reason))
        return None


def time_s(forecast: Forecast) -> float:
    """Return the duration of a step in seconds; infinity if the forecast has no time."""
    return math.inf if forecast.time is None else forecast.time.total_s


def _stage(plan: Plan) -> Hashable:
    """Return the settings of ``plan`` that memory techniques do not change."""
    return plan.parallel, plan.precision, plan.optimizer.name


def _levers(plan: Plan) -> Hashable:
    return plan.activation, plan.offload, *(lever.value(plan) for lever in LEVERS)


def simplest_of_the_fastest(forecasts: Sequence[Forecast]) -> Forecast:
    """Return the forecast with the simplest plan among those that are as fast as the fastest. ``forecasts`` must not be
    empty."""
    fastest_s = min(map(time_s, forecasts))
    tied = [each for each in forecasts if time_s(each) <= fastest_s * (1 + TIE)]
    return min(tied, key=lambda each: (*simplicity(each.plan), time_s(each), each.peak_bytes))


def simplicity(plan: Plan) -> tuple[int, ...]:
    """Return a sort key that increases with the difference between ``plan`` and a plain training step.

    The key consists of the least exact label (:class:`Kind`) of the precision, the optimizer and the memory techniques,
    the number of memory techniques, the degree of sharding, and the number of micro-batches. Labels of the strategy and
    the micro-batch size are ignored, because every plan on several ranks has the label near.
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
    num_levers += (plan.parallel.context_parallel_size > 1) + (plan.parallel.pipeline_parallel_size > 1)
    worst = max(list(Kind).index(kind) for kind in kinds if kind is not None)
    return worst, num_levers, STAGES.index(plan.parallel.strategy), plan.batch.accumulate_grad_batches
