"""Error for a run that ran out of device memory, with the memory by kind, the forecast, and the nearest plan that fits.

[Note: after an out-of-memory error]
The other ranks wait for this rank in their next collective, so the error must be created without communication. Each
part of the message is computed separately and omitted if its computation fails, so that the original failure is always
reported. torch's error is both the cause and a base class of the raised error. The tensors of the failed step are
released before planning, which requires only shapes.
"""

from __future__ import annotations

import dataclasses
import gc
import traceback
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, TypeVar

import torch

from roomier.api.callback import kept_by
from roomier.api.engine import Engine
from roomier.api.module import Module
from roomier.core.device import memory
from roomier.core.device.capability import capabilities_of
from roomier.core.errors import TrainingError
from roomier.core.units import format_bytes
from roomier.core.world import World
from roomier.plan import Plan
from roomier.plan.levers import used_levers
from roomier.planner.choice import Choice, words_of
from roomier.planner.choosing.candidates import changed
from roomier.planner.choosing.choose import budget_of, choose
from roomier.planner.choosing.keywords import as_call, trainer_keywords
from roomier.planner.choosing.nearest import no_plan_fits
from roomier.planner.deadline import AFTER_OUT_OF_MEMORY_S, Deadline
from roomier.planner.dry_runs.confirm import confirm
from roomier.planner.forecast import Forecast
from roomier.planner.hardware.machine import Machine
from roomier.planner.hardware.this_machine import this_machine
from roomier.planner.measured.record import moment_text
from roomier.planner.memory.kinds import MODEL_STATES, NAMES, total_bytes
from roomier.planner.memory.tracker import MemoryTracker
from roomier.planner.workload import Workload

T = TypeVar("T")

_CALL_WITH_HOOKS = "Module._call_impl.<locals>.inner"
# Maximum forecast of the next plan, relative to the forecast of the plan that ran out of memory.
_LESS = 0.9


class OutOfMemory(TrainingError, torch.OutOfMemoryError):  # noqa: N818 - torch's class has the suffix Error
    """Error for a fit that ran out of device memory. It is a subclass of ``torch.OutOfMemoryError``, so existing
    exception handlers catch it, and torch's error is its cause.

    Attributes:
        plan: the nearest plan that is forecast to fit; None if no such plan was found.
    """

    plan: Plan | None = None


@dataclasses.dataclass(frozen=True)
class FailedRun:
    """State of a fit that ran out of memory.

    Args:
        plan: plan of the run.
        world: rank of this process, and number of ranks.
        callbacks: callbacks of the run.
        module: module that was trained.
        choice: result of the planner; None if the plan was given by the user.
        shapes: copy of the model without values, created before the build; None if no copy was stored. engine: the
        engine; None if the error occurred during the build, in which case ``batch`` and ``step`` are also None. batch:
        the current micro-batch; None between two steps.
        step: number of completed optimizer steps.
    """

    plan: Plan
    world: World
    callbacks: Sequence[Any]
    module: Module
    choice: Choice | None = None
    shapes: Module | None = None
    engine: Engine | None = None
    batch: Any = None
    step: int | None = None


def explain_out_of_memory(error: torch.OutOfMemoryError, failed: FailedRun) -> OutOfMemory:
    """Return an OutOfMemory error that explains ``error``, and clear the frames of ``error``. The caller must raise the
    result from ``error``."""
    if isinstance(error, OutOfMemory):
        return error
    plan, engine, failures = failed.plan, failed.engine, list[str]()

    def attempt(make: Callable[[], T]) -> T | None:
        try:
            return make()
        except Exception as failure:  # must not hide the original error
            failures.append(f"{type(failure).__name__}: {_one_line(failure)}")
            return None

    held = attempt(lambda: _held(engine)) if engine is not None else None
    workload = attempt(lambda: _workload(failed)) if engine is not None else None
    _release_frames(error)
    forecast = None if failed.choice is None else failed.choice.chosen
    machine = attempt(lambda: _machine(failed))
    if forecast is None and workload is not None and machine is not None:
        at_hand, this = workload, machine
        forecast = attempt(lambda: confirm(at_hand, plan, this))
    advice, nearest = "", None
    if workload is not None and machine is not None:
        found = attempt(lambda: _advice(workload, plan, machine, forecast))
        advice, nearest = found or ("", None)
    where = _where(failed)
    problem = [
        f"ran out of memory {where} ({_one_line(error)})",
        *([f"Memory at that time: {held}"] if held else []),
        *([_forecast_text(forecast, was_planned=failed.choice is not None)] if forecast is not None else []),
    ]
    action = advice or (
        "Use smaller micro-batches with accumulate_grad_batches, activation_checkpointing='full', or a strategy that "
        "shards more"
    )
    explained = OutOfMemory("strategy", plan.parallel.strategy, ". ".join(problem), action)
    explained.plan = nearest
    for failure in failures:
        explained.add_note(f"roomier could not complete this message: {failure}")
    return explained


def _release_frames(error: BaseException) -> None:
    """Release the tensors that the frames of ``error`` reference, such as the graph of the failed step."""
    traceback.clear_frames(error.__traceback__)
    # A cleared frame still references its function. torch calls a module with hooks in a nested function, whose closure
    # contains the inputs of the module and is not used afterwards.
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for function in gc.get_referents(frame):
            if isinstance(function, FunctionType) and function.__qualname__ == _CALL_WITH_HOOKS:
                for cell in function.__closure__ or ():
                    cell.cell_contents = None


def _where(failed: FailedRun) -> str:
    on_rank = "" if failed.world.size == 1 else f" on rank {failed.world.rank}"
    if failed.step is None:
        return f"while the model was built{on_rank}"
    return f"in step {failed.step + 1}{on_rank}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _held(engine: Engine) -> str:
    """Return a description of the memory of this rank by kind, and of its allocator, without communication."""
    with MemoryTracker(engine.module, engine.optimizers, engine.device) as look:
        pass
    num_bytes = look.now().num_bytes
    parts = [f"{NAMES[kind]} {format_bytes(num_bytes[kind])}" for kind in MODEL_STATES if num_bytes.get(kind)]
    if not capabilities_of(engine.device).has_memory_statistics:
        return ", ".join(parts)
    allocated = memory.allocated_bytes(engine.device)
    rest = max(allocated - total_bytes(num_bytes, MODEL_STATES), 0)
    parts.append(f"activations and other tensors {format_bytes(rest)}")
    info = memory.free_and_total_bytes(engine.device)
    of_device = "" if info is None else f" of {format_bytes(info[1])}, {format_bytes(info[0])} free"
    return (
        f"{', '.join(parts)}; the allocator had allocated {format_bytes(allocated)} and reserved "
        f"{format_bytes(memory.reserved_bytes(engine.device))}{of_device}"
    )


def _forecast_text(forecast: Forecast, *, was_planned: bool) -> str:
    when = "The forecast was" if was_planned else "The forecast, computed after the error, is"
    peak = forecast.peak
    return f"{when} {format_bytes(forecast.peak_bytes)} at {moment_text(peak.phase, peak.place)}"


def _workload(failed: FailedRun) -> Workload | None:
    """Return the workload; None if no step ran or the shapes of the model were not stored."""
    shapes, batch = failed.shapes or _plain(failed), failed.batch
    if shapes is None or batch is None:
        return None
    return dataclasses.replace(Workload.of(shapes, batch), copies=kept_by(failed.callbacks))


def _plain(failed: FailedRun) -> Module | None:
    """Return the module if the plan did not modify it, otherwise None."""
    plan, module = failed.plan, failed.module
    is_plain = plan.parallel.strategy in ("single", "ddp") and plan.adapter.lora_rank is None
    changes_model = any(lever.changes_output_layer for lever in used_levers(plan))
    has_levers = plan.activation.policy != "none" or changes_model or plan.compile.enabled
    return module if is_plain and not has_levers and plan.offload.activations == "none" else None


def _machine(failed: FailedRun) -> Machine:
    if failed.choice is not None:
        return failed.choice.machine
    parallel = failed.plan.parallel
    return this_machine(parallel.devices, parallel.num_nodes, parallel.accelerator)


def _advice(workload: Workload, plan: Plan, machine: Machine, forecast: Forecast | None) -> tuple[str, Plan | None]:
    """Return advice with Trainer keywords that the user can copy, and the resulting plan. If no plan fits, return other
    advice and None."""
    budget_bytes = budget_of(plan, machine)
    if forecast is not None:
        budget_bytes = min(budget_bytes, int(_LESS * forecast.peak_bytes))
    asked = changed(plan, {"parallel.strategy": "auto"})
    deadline = Deadline.after(AFTER_OUT_OF_MEMORY_S)
    choice = choose(workload, asked, machine, budget_bytes=budget_bytes, deadline=deadline.first_half())
    chosen = choice.chosen
    if chosen is None:
        error = no_plan_fits(workload, asked, choice, deadline=deadline)
        return f"No plan fits on this machine: {error.action}", None
    smaller = f", with batches of {chosen.micro_batch} samples" if chosen.micro_batch != workload.batch_size else ""
    advice = (
        f"The nearest plan that fits, with a forecast of {format_bytes(chosen.peak_bytes)}, is "
        f"{words_of(chosen.plan, chosen.micro_batch)}: {as_call(trainer_keywords(chosen.plan))}{smaller}"
    )
    return advice, chosen.plan
