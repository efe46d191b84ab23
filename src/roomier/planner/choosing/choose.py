"""Choice of the fastest plan that fits, confirmed by a dry run of the training code."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from roomier.api.blocks import open_blocks
from roomier.core.errors import NoForecastError, PlanError, RoomierError
from roomier.core.units import format_bytes
from roomier.plan import Plan
from roomier.planner.choice import Choice, Considered
from roomier.planner.choosing.candidates import (
    candidates,
    reason_against_smaller_batches,
    refused_plan,
    with_sizes,
)
from roomier.planner.choosing.pricing import TIE, Check, Prices, Pricing, time_s
from roomier.planner.deadline import SEARCH_S, Deadline
from roomier.planner.forecast import Forecast
from roomier.planner.formula.stages import reason_against_stages
from roomier.planner.hardware.machine import Machine
from roomier.planner.memory.kinds import Kind
from roomier.planner.workload import Workload
from roomier.techniques.activation.budget import BudgetTooSmallError

FREE_SHARE = {"cuda": 0.05, "mps": 0.15, "cpu": 0.15}
"""Fraction of the device memory that remains free if no budget is set, by kind of device.

Kinds without an entry use the fraction of ``"cuda"``, which is the largest accepted error of a forecast. The fraction
is larger if the device shares the memory of the host, which the system, the dataset and its workers, and file caches
also use.
"""

# Maximum number of listed plans that fit, and of listed plans that do not fit. The best plan of each strategy is always
# listed.
_NUM_KEPT = 12
_LEAST_GAIN = 0.1  # relative gain for which stages are considered, because forecasts of communication are uncertain
_MOST_STAGES = 8  # each stage requires a dry run, and waits for more stages


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

    Plans that split sequences across ranks are evaluated only if no other plan fits, or if the fastest plan recomputes
    or offloads activations; see :func:`_with_context_size`. Plans that offload parameters, offload optimizer states to
    disk, or communicate sequentially are evaluated only if no other plan fits.

    If several plans are equally fast (within :data:`TIE`), the simplest of them is chosen. Plans are ordered by their
    label (exact before near before approximate), then by the number of memory techniques, and then by how much their
    strategy shards. :mod:`roomier.planner.choosing.candidates` describes the evaluated options.

    Args:
        workload: workload whose ``batch_size`` is the requested micro-batch size. Batches may be split, but the global
            batch size is preserved.
        plan: requested plan.
        machine: machine to plan for.
        budget_bytes: memory that a device may use; None uses :func:`budget_of`.
        keeps_micro_batch: reason why micro-batches cannot be split; empty if they can be split.
        check: function that raises a RoomierError to reject a plan that the run does not support.
        prices: source of forecasts; None uses closed-form forecasts.
        deadline: time limit of the search. Plans that are not evaluated before the deadline are skipped and reported.
            None allows :data:`SEARCH_S` seconds.

    Returns:
        Choice whose attribute ``chosen`` is None if no plan fits; :mod:`roomier.planner.choosing.nearest` then searches
        for alternatives.

    Raises:
        RoomierError: no plan can be forecast.
    """
    start = time.perf_counter()
    budget = budget_of(plan, machine) if budget_bytes is None else budget_bytes
    pricing = Pricing(
        workload, machine, prices, check, budget_bytes=budget, deadline=deadline or Deadline.after(SEARCH_S)
    )
    for is_last_resort in (False, True):
        pricing.add(
            candidates(workload, plan, machine, keeps_micro_batch=keeps_micro_batch, is_last_resort=is_last_resort)
        )
        chosen = pricing.run()
        is_open = plan.parallel.strategy == "auto" and plan.parallel.num_peers == 1
        if is_open and not (is_last_resort or keeps_micro_batch):
            chosen = _with_context_size(chosen, pricing, workload, plan, machine)
            chosen = _with_stages(chosen, pricing, workload, plan, machine)
        if chosen is not None:
            break
    if not pricing.priced:
        raise _no_plan_priced(plan, pricing)
    considered = _considered(chosen, pricing)
    took_s, num_plans = time.perf_counter() - start, len(pricing.candidates)
    return Choice(machine, budget, chosen, considered, took_s, num_plans, is_complete=not pricing.ran_out)


def _with_context_size(
    chosen: Forecast | None, pricing: Pricing, workload: Workload, plan: Plan, machine: Machine
) -> Forecast | None:
    """Return ``chosen``, or a plan that splits sequences across ranks if that plan is faster or no other plan fits.

    Context parallelism reduces only activation memory, so it is combined only with strategies whose other memory fits,
    and it makes a step faster only if it replaces recomputation or offloading of activations. Larger sizes exchange
    more data, so the search stops at the first size that does not make the strategy of the chosen plan faster.
    """
    strategies = {each.plan.parallel for each in pricing.priced if _fits_alone(each, pricing.budget_bytes)}
    for sized in with_sizes(plan, "context_parallel_size", plan.parallel.devices):
        if chosen is not None and _activations(chosen.plan) == _activations(plan):
            break
        found = [
            each
            for each in candidates(workload, sized, machine)
            if not each.reason
            and replace(each.plan.parallel, context_parallel_size=1) in strategies
            and (chosen is None or _activations(each.plan) == _activations(plan))
        ]
        own = None if chosen is None else replace(chosen.plan.parallel, context_parallel_size=sized.parallel.num_peers)
        own_s = pricing.plain_s([each for each in found if own in (None, each.plan.parallel)])
        if math.isinf(own_s):  # for example, the size does not divide the number of heads
            continue
        if chosen is not None and own_s * (1 + TIE) >= time_s(chosen):
            break
        pricing.add(found)
        chosen = pricing.run()
    return chosen


def _with_stages(
    chosen: Forecast | None, pricing: Pricing, workload: Workload, plan: Plan, machine: Machine
) -> Forecast | None:
    """Return ``chosen``, or a plan that divides the model into stages if that plan is faster or no other plan fits.

    Stages save communication, but wait for each other. The search therefore considers only numbers of stages with which
    a step would be faster by at least :data:`_LEAST_GAIN` if the stages were balanced and messages took no time.
    """
    compute_s = min((each.time.compute_s for each in pricing.priced if each.time is not None), default=0.0)
    pieces = 1 if reason_against_smaller_batches(workload.module) else workload.batch_size
    most = min(_MOST_STAGES, len(open_blocks(workload.blocks)))
    sizes = [
        sized
        for sized in with_sizes(plan, "pipeline_parallel_size", plan.parallel.num_ranks)
        if (size := sized.parallel.pipeline_parallel_size) <= most
        and (
            chosen is None
            or compute_s * (1 + (size - 1) / (sized.batch.accumulate_grad_batches * pieces)) * (1 + _LEAST_GAIN)
            < time_s(chosen)
        )
    ]
    reason = reason_against_stages(workload, plan) if sizes else ""
    if reason:
        refused = refused_plan(sizes[0], {"parallel.strategy": "ddp"})
        pricing.add([Considered(refused, workload.batch_size, reason=f"without stages, because {reason}")])
    if reason or not sizes:
        return chosen
    for sized in sizes:
        found = [each for each in candidates(workload, sized, machine) if not each.reason]
        if sized.parallel.num_data_ranks == 1:  # nothing can be sharded
            found = [each for each in found if each.plan.parallel.strategy == "ddp"]
        # Fewer micro-batches than this are usually slower, because stages wait for a larger part of the step.
        numbers = [each.plan.batch.accumulate_grad_batches for each in found]
        least = min(4 * sized.parallel.pipeline_parallel_size, max(numbers, default=0))
        pricing.add([each for each, number in zip(found, numbers, strict=True) if number >= least])
    return pricing.run()


def _activations(plan: Plan) -> tuple[object, ...]:
    return plan.activation, plan.offload.activations


def _fits_alone(forecast: Forecast, budget_bytes: int) -> bool:
    """Return whether the memory other than activations and temporary tensors fits."""
    found = forecast.bytes_by_kind
    return forecast.tensor_bytes - found.get(Kind.ACTIVATION, 0) - found.get(Kind.TEMPORARY, 0) <= budget_bytes


def budget_of(plan: Plan, machine: Machine) -> int:
    """Return the budget of ``plan`` in bytes. The default is the device memory minus the fraction in
    :data:`FREE_SHARE`."""
    given = plan.choice.memory_budget_bytes
    if given is not None:
        return given
    return int(machine.device.memory_bytes * (1 - FREE_SHARE.get(machine.device.kind, FREE_SHARE["cuda"])))


def _no_plan_priced(plan: Plan, priced: Pricing) -> RoomierError:
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


# ---- the considered plans of a Choice --------------------------------------------------------------------------------


def _considered(chosen: Forecast | None, pricing: Pricing) -> tuple[Considered, ...]:
    budget_bytes = pricing.budget_bytes
    others = [pricing.confirmed.get(id(each), each) for each in pricing.priced if each is not pricing.picked]
    fitting = [each for each in others if each is not None and each.fits(budget_bytes)]
    too_large = [each for each in others if each is not None and not each.fits(budget_bytes)]
    too_large.sort(key=lambda each: (bool(each.full_tier), each.peak_bytes))
    found: list[Considered] = []
    if chosen is not None:
        found.append(Considered(chosen.plan, chosen.micro_batch, chosen, fits=True))
        for each in _few(sorted(fitting, key=time_s)):
            found.append(Considered(each.plan, each.micro_batch, each, True, _slower(each, chosen)))
    for each in _few(too_large):
        found.append(Considered(each.plan, each.micro_batch, each, False, _too_large(each, budget_bytes)))
    return (*found, *pricing.refused, *_unpriced(pricing.unpriced))


def _few(forecasts: Sequence[Forecast]) -> Iterator[Forecast]:
    """Yield the first forecasts of the list up to a maximum number, and the first forecast of each strategy."""
    seen: set[str] = set()
    for index, each in enumerate(forecasts):
        if index < _NUM_KEPT or each.plan.parallel.strategy not in seen:
            yield each
        seen.add(each.plan.parallel.strategy)


def _unpriced(found: Sequence[Considered]) -> Iterator[Considered]:
    """Yield the first plan of each strategy. Its reason includes the number of other plans in ``found`` with the same
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


def _too_large(forecast: Forecast, budget_bytes: int) -> str:
    if forecast.full_tier:
        return f"offloads more than fits in the {forecast.full_tier} of a node"
    over = forecast.peak_bytes - budget_bytes
    return f"needs {format_bytes(forecast.peak_bytes)}, {format_bytes(over)} over the budget"
