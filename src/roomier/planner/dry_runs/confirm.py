"""Forecasts by dry runs, which are slower than closed-form forecasts but execute the code of the training run.

[Note: limits of a dry run]
A dry run does not distinguish the memory of the device, the host and the disk. Plans that offload activations or
parameters are therefore forecast with the closed form. If a plan offloads only optimizer states, the dry run holds all
states on the device, and the formulas for tiers (:mod:`roomier.planner.formula.offloaded`) then correct its timeline.
The exception is a plan that also has an activation budget, for which the closed form is used, because the activations
that blocks save depend on the memory of the states.
"""

from __future__ import annotations

from roomier.plan import Plan
from roomier.planner.dry_runs.shallow import dry_run_by_depth
from roomier.planner.dry_runs.staged import forecast_of_stages
from roomier.planner.forecast import Forecast
from roomier.planner.formula.estimate import Estimator, leave_device
from roomier.planner.hardware.machine import Machine
from roomier.planner.workload import Workload


def is_seen_by_dry_run(plan: Plan, machine: Machine) -> bool:
    """Return whether a dry run can forecast ``plan``; see [Note: limits of a dry run]."""
    offload = plan.offload
    if offload.parameters != "none" or (offload.optimizer_states != "none" and plan.activation.policy == "budget"):
        return False
    return not leave_device(plan, machine)


def confirm(workload: Workload, plan: Plan, machine: Machine) -> Forecast:
    """Return the forecast of ``plan`` for ``workload`` on ``machine``.

    The ``method`` of the forecast is ``"dry run"``, or ``"closed form"`` as described in [Note: limits of a dry run].

    Args:
        workload: workload whose ``batch_size`` is the micro-batch size.
        plan: plan with a concrete strategy.
        machine: machine for which the forecast is computed.

    Raises:
        RoomierError: ``build`` rejects the plan.
    """
    estimator, device = Estimator(workload, machine), machine.device
    if plan.parallel.pipeline_parallel_size > 1:
        return forecast_of_stages(workload, plan, machine, estimator)
    if not is_seen_by_dry_run(plan, machine):
        return estimator.estimate(plan, workload.batch_size)
    run = dry_run_by_depth(workload, plan, is_pairwise=device.kind == "cpu", like=device.kind, device=device)
    return estimator.of_dry_run(plan, run, workload.batch_size)
