"""The seconds of a step, from what is computed and what travels."""

from __future__ import annotations

from collections.abc import Mapping

from roomier.hardware.machine import Machine
from roomier.plan import Plan
from roomier.planner.forecast import StepTime
from roomier.planner.work import Part, Work
from roomier.planner.workload import Workload


def step_time(workload: Workload, plan: Plan, machine: Machine, work: Mapping[Part, Work]) -> StepTime:
    """What one optimizer step takes.

    Args:
        workload: with the micro-batch of ``plan``.
        work: of one optimizer step on one rank, by phase and part of the model, update left out.
    """
    rate = machine.device.flops_per_s["fp32"]
    return StepTime(compute_s=sum(sum(each.flops.values()) for each in work.values()) / rate)
