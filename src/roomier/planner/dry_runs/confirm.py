"""What a plan costs, by a dry run: slower than the closed form, and as close as the code that will run.

[Note: what a dry run cannot see]
To it, host and device are one memory. So what leaves a GPU for the memory of its host is forecast by the closed form.
"""

from __future__ import annotations

from roomier.hardware.machine import Machine
from roomier.plan import Plan
from roomier.planner.dry_runs.shallow import dry_run_by_depth
from roomier.planner.forecast import Forecast
from roomier.planner.formula.estimate import Estimator
from roomier.planner.formula.fixed_bytes import fixed_bytes
from roomier.planner.timing.step_time import step_time
from roomier.planner.workload import Workload


def is_seen_by_dry_run(plan: Plan, machine: Machine) -> bool:
    """See [Note: what a dry run cannot see]."""
    return plan.offload.activations == "none" or machine.device.kind == "cpu"


def confirm(workload: Workload, plan: Plan, machine: Machine) -> Forecast:
    """The forecast of ``plan`` for ``workload`` on ``machine``; its ``method`` says how it was made, see
    [Note: what a dry run cannot see].

    Args:
        workload: its ``batch_size`` is the micro-batch.

    Raises:
        RoomierError: what ``build`` refuses.
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
        time=step_time(workload, plan, machine, run.work),
    )
