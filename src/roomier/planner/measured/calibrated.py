"""What one measured run teaches the forecasts of others.

[Note: what is learned]
Model states follow from shapes, so they are right or the code is wrong. What may differ is what depends on the batch:
shapes that follow from values (a forecast takes a mask to keep all), and on a GPU what kernels allocate within one
operation. So there is one number for a model: how many times what was forecast its activations and temporaries were.
It is the number with which the forecast of that run has the peak that was measured; other micro-batches, strategies and
levers are forecast with the same one. It holds for the model and the data of that run, and is kept nowhere.

What a GPU holds beside tensors does not depend on the model: :func:`roomier.planner.formula.fixed_bytes.calibrate`
learns it from the same step, and keeps it for all plans on devices of that kind, those of ``strategy="auto"`` among
them.
"""

from __future__ import annotations

from dataclasses import replace

from roomier.core.errors import RoomierError
from roomier.core.units import format_bytes
from roomier.hardware.machine import Machine
from roomier.memory.kinds import total_bytes
from roomier.planner.dry_runs.dry_run import OF_THE_BATCH
from roomier.planner.formula.fixed_bytes import Calibration, calibrate
from roomier.planner.measured.record import Record
from roomier.planner.workload import Workload

_MOST = 20.0  # times; and so many times less
_FIELD = "calibrated_by"


def learned_of(workload: Workload, record: Record, machine: Machine, run: str) -> Workload:
    """``workload`` with the activations that a run of it had; see [Note: what is learned].

    Args:
        record: of that run.
        machine: that is planned for.
        run: what the user calls it, for errors.

    Raises:
        RoomierError: the run was of another model or on another kind of device, or activations do not explain how far
            its forecast was off.
    """
    own, kind = record.num_parameters, record.forecast.machine.device.kind
    if own is not None and own != workload.num_parameters:
        problem = f"is a run of a model with {own:,} parameters, and this one has {workload.num_parameters:,}"
        raise RoomierError(_FIELD, run, problem, "Name a run of the same model")
    if kind != machine.device.kind:
        problem = f"ran on {kind}, and the plan is for {machine.device.kind}, whose kernels keep other tensors"
        raise RoomierError(_FIELD, run, problem, f"Name a run on {machine.device.kind}, or leave it out")
    return replace(workload, activation_factor=activation_factor(record, run))


def activation_factor(record: Record, run: str = "") -> float:
    """How many times what was forecast activations and temporaries were; 1 where the forecast came true.

    Raises:
        RoomierError: no such number gives the peak that was measured.
    """
    measured_bytes = record.measured_bytes
    if record.worst.allocator_bytes is not None:  # cuBLAS's workspace is the allocator's as well
        measured_bytes -= record.forecast.fixed_bytes.get("workspace", 0)
    found: list[float] = []
    for each in record.forecast.timeline:
        for moment in (each.begin, each.peak, each.end):
            of_batch = total_bytes(moment, OF_THE_BATCH)
            others = total_bytes(moment) - of_batch
            if of_batch:
                found.append((measured_bytes - others) / of_batch)
    factor = min(found, default=0.0)
    if not 1 / _MOST <= factor <= _MOST:
        said = format_bytes(record.forecast_bytes)
        took = format_bytes(record.measured_bytes)
        problem = f"measured {took} where the forecast was {said}, which activations do not explain"
        raise RoomierError(_FIELD, run, problem, "Look at `roomier report` of it, or name another run")
    return factor


def learn_device(record: Record) -> Calibration | None:
    """Keep what the run tells of its device beside tensors; None where it tells nothing, as on a CPU."""
    worst, forecast = record.worst, record.forecast
    if forecast.machine.device.kind != "cuda" or worst.allocator_bytes is None or worst.reserved_bytes is None:
        return None
    return calibrate(
        forecast.plan,
        forecast.machine,
        allocated_bytes=worst.allocator_bytes,
        reserved_bytes=worst.reserved_bytes,
        used_bytes=None if worst.beside_bytes is None else worst.reserved_bytes + worst.beside_bytes,
    )
