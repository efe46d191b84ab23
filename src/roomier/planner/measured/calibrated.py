"""Calibration of forecasts with one measured run.

[Note: calibration]
Model states follow from shapes, so their forecast is exact. Tensors that depend on the batch can differ from their
forecast for two reasons. Shapes can depend on values (a forecast assumes that a mask retains all elements), and kernels
on a GPU allocate memory within an operation. The calibration is one factor for a model: the ratio of measured
activations and temporaries to their forecast. With the calibration factor, the forecast peak of the measured run equals
the measured peak. The same factor applies to forecasts with different micro-batches, strategies and memory techniques.
The factor is valid for the model and the data of the measured run, and is not stored.

Device memory that is used in addition to tensors does not depend on the model.
:func:`roomier.planner.formula.fixed_bytes.calibrate` derives this memory from the same step, and stores the result for
all plans on devices of this kind, including plans of ``strategy="auto"``.
"""

from __future__ import annotations

from dataclasses import replace

from roomier.core.errors import RoomierError
from roomier.core.units import format_bytes
from roomier.planner.formula.fixed_bytes import Calibration, calibrate
from roomier.planner.hardware.machine import Machine
from roomier.planner.measured.record import ForecastRecord
from roomier.planner.memory.kinds import OF_THE_BATCH, total_bytes
from roomier.planner.workload import Workload

_MOST = 20.0  # largest factor; the smallest is its inverse
_FIELD = "calibrated_by"


def learned_of(workload: Workload, record: ForecastRecord, machine: Machine, run: str) -> Workload:
    """Return ``workload`` with the activation factor from a run of the same model; see [Note: calibration].

    Args:
        workload: workload to plan for.
        record: record of the measured run.
        machine: machine to plan for.
        run: name of the run, for error messages.

    Raises:
        RoomierError: the run used a different model or a different kind of device, or no activation factor explains the
            forecast error.
    """
    own, kind = record.num_parameters, record.forecast.machine.device.kind
    if own is not None and own != workload.num_parameters:
        problem = f"is a run of a model with {own:,} parameters, but this model has {workload.num_parameters:,}"
        raise RoomierError(_FIELD, run, problem, "Pass a run of the same model")
    if kind != machine.device.kind:
        problem = f"ran on {kind}, but the plan is for {machine.device.kind}, whose kernels save different tensors"
        raise RoomierError(_FIELD, run, problem, f"Pass a run on {machine.device.kind}, or omit the option")
    return replace(workload, activation_factor=activation_factor(record, run))


def activation_factor(record: ForecastRecord, run: str = "") -> float:
    """Return the factor by which the forecast activations and temporaries must be multiplied to obtain the measured
    peak; 1 for an exact forecast.

    Args:
        record: record of a run.
        run: name of the run, for error messages.

    Raises:
        RoomierError: no factor results in the measured peak.
    """
    measured_bytes = record.measured_bytes
    if record.worst.allocator_bytes is not None:  # includes cuBLAS's workspace
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
        forecast = format_bytes(record.forecast_bytes)
        measured = format_bytes(record.measured_bytes)
        problem = f"measured {measured}, but no activation factor explains this value for a forecast of {forecast}"
        raise RoomierError(_FIELD, run, problem, "Check the `roomier report` of this run, or pass another run")
    return factor


def learn_device(record: ForecastRecord) -> Calibration | None:
    """Store and return the device memory that the run used in addition to tensors. Return None if this memory was not
    measured, for example on a CPU."""
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
