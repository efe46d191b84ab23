"""Forecasts by dry run, which are slower than the closed form but execute the code of the real run.

[Note: limits of a dry run]
A dry run has only one memory for device, host and disk. Plans that move activations out of the memory of the device are
therefore forecast with the closed form. Plans that offload model states are forecast with the closed form on all
devices, because a dry run has no tiers.
"""

from __future__ import annotations

from roomier.hardware.machine import Machine
from roomier.plan import Plan
from roomier.planner.dry_runs.shallow import dry_run_by_depth
from roomier.planner.forecast import Forecast
from roomier.planner.formula.estimate import Estimator
from roomier.planner.formula.fixed_bytes import compiler_bytes, fixed_bytes
from roomier.planner.formula.moved import leave_device
from roomier.planner.timing.step_time import step_time
from roomier.planner.workload import Workload


def is_seen_by_dry_run(plan: Plan, machine: Machine) -> bool:
    """Return whether a dry run can forecast ``plan``; see [Note: limits of a dry run]."""
    offload = plan.offload
    if offload.optimizer_states != "none" or offload.parameters != "none":
        return False
    return not leave_device(plan, machine)


def confirm(workload: Workload, plan: Plan, machine: Machine) -> Forecast:
    """Return the forecast of ``plan`` for ``workload`` on ``machine``.

    The ``method`` of the forecast is ``"dry run"``, or ``"closed form"`` as described in [Note: limits of a dry run].

    Args:
        workload: workload whose ``batch_size`` is the micro-batch.
        plan: plan with a concrete strategy.
        machine: machine for which the forecast is computed.

    Raises:
        RoomierError: ``build`` rejects the plan.
    """
    if not is_seen_by_dry_run(plan, machine):
        return Estimator(workload, machine).estimate(plan, workload.batch_size)
    run = dry_run_by_depth(workload, plan, is_pairwise=machine.device.kind == "cpu", like=machine.device.kind)
    stretches = workload.calibrated(run.stretches, plan)
    return Forecast(
        plan=plan,
        machine=machine,
        micro_batch=workload.batch_size,
        method="dry run",
        timeline=stretches,
        fixed_bytes=fixed_bytes(plan, machine, max(each.peak_bytes for each in stretches)),
        host_bytes=compiler_bytes(plan, workload.num_parameters),
        time=step_time(workload, plan, machine, run.work),
    )
