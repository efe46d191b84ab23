"""What a run says when its device runs out of memory: what was held, what was forecast, and the nearest plan that fits.

[Note: after an error of memory]
Other ranks go on, and wait for this one in the next exchange: nothing here talks to them. What failed is told in any
case: each part of the message is made by itself and left out where that fails, and the error of torch is both its cause
and one of its classes. What the failed step held is let go before anything is planned, and planning takes no memory of
the device: it works on shapes.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from roomier.api.kept_weights import kept_by
from roomier.core.errors import RoomierError, TrainingError
from roomier.core.units import format_bytes
from roomier.hardware.this_machine import this_machine
from roomier.memory.kinds import Kind
from roomier.plan.levers import used_levers
from roomier.planner.choosing.candidates import changed
from roomier.planner.choosing.keywords import as_call, trainer_keywords
from roomier.planner.deadline import AFTER_OUT_OF_MEMORY_S, Deadline
from roomier.planner.workload import Workload

if TYPE_CHECKING:
    from roomier.api.engine import Engine
    from roomier.api.module import Module
    from roomier.core.world import World
    from roomier.hardware.machine import Machine
    from roomier.plan import Plan
    from roomier.planner.choice import Choice
    from roomier.planner.forecast import Forecast

T = TypeVar("T")

_NAMES = {
    Kind.PARAMETER: "weights",
    Kind.GATHERED: "gathered weights",
    Kind.GRADIENT: "gradients",
    Kind.OPTIMIZER_STATE: "optimizer states",
}
_LESS = 0.9  # where a plan that was forecast to fit did not: the next one is to need so much of its forecast at most


class OutOfMemory(TrainingError, torch.OutOfMemoryError):  # noqa: N818 - torch's own is the Error
    """A fit ran out of the device's memory; also what torch raises, which it comes from.

    Attributes:
        plan: the nearest that fits, by forecast; None where none was found.
    """

    plan: Plan | None = None


@dataclasses.dataclass(frozen=True)
class FailedRun:
    """The facts of a fit that ran out of memory.

    Args:
        choice: the plans that the planner compared; None if the plan was given.
        shapes: the model before it was built, without values; None if it was not kept.
        engine: None if the model was still being built. ``batch`` and ``step`` are then None too.
        batch: the current micro-batch; None between two steps.
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
    """Return ``error`` with an explanation. Raise it from ``error``, whose frames have lost their local variables."""
    if isinstance(error, OutOfMemory):
        return error
    plan, engine, attempt = failed.plan, failed.engine, _Attempts()
    held = attempt(lambda: _held(engine)) if engine is not None else None
    workload = attempt(lambda: _workload(failed)) if engine is not None else None
    traceback.clear_frames(error.__traceback__)  # they hold the graph of the failed step
    forecast = None if failed.choice is None else failed.choice.chosen
    machine = attempt(lambda: _machine(failed))
    if forecast is None and workload is not None and machine is not None:
        at_hand, this = workload, machine
        forecast = attempt(lambda: _forecast(at_hand, plan, this))
    advice, nearest = "", None
    if workload is not None and machine is not None:
        found = attempt(lambda: _advice(workload, plan, machine, forecast))
        advice, nearest = found or ("", None)
    where = _where(failed)
    told = [
        f"ran out of memory {where} ({_one_line(error)})",
        *([f"Held then: {held}"] if held else []),
        *([_said(forecast, was_planned=failed.choice is not None)] if forecast is not None else []),
    ]
    action = advice or (
        "Take smaller micro-batches and accumulate_grad_batches, activation_checkpointing='full', or a strategy that "
        "cuts more"
    )
    explained = OutOfMemory("strategy", plan.parallel.strategy, ". ".join(told), action)
    explained.plan = nearest
    for failure in attempt.failures:
        explained.add_note(f"roomier could not tell all of it: {failure}")
    return explained


class _Attempts:
    """Tries what may fail while an error is being told, which comes first.

    Attributes:
        failures: what failed, in a line each.
    """

    def __init__(self) -> None:
        self.failures: list[str] = []

    def __call__(self, make: Callable[[], T]) -> T | None:
        """What ``make`` gives; None where it fails."""
        try:
            return make()
        except Exception as error:
            self.failures.append(f"{type(error).__name__}: {_one_line(error)}")
            return None


def _where(failed: FailedRun) -> str:
    on_rank = "" if failed.world.size == 1 else f" on rank {failed.world.rank}"
    if failed.step is None:
        return f"while the model was built{on_rank}"
    return f"in step {failed.step + 1}{on_rank}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _held(engine: Engine) -> str:
    """The anatomy of this rank, without a look at other ranks: by kind, and what the allocator knows."""
    from roomier.memory.tracker import MemoryTracker  # late: loads the sharding of torch

    with MemoryTracker(engine.module, engine.optimizers, engine.device) as look:
        pass
    num_bytes = look.now().num_bytes
    parts = [f"{name} {format_bytes(num_bytes.get(kind, 0))}" for kind, name in _NAMES.items() if num_bytes.get(kind)]
    if engine.device.type != "cuda":
        return ", ".join(parts)
    given_out = torch.cuda.memory_allocated(engine.device)
    rest = max(given_out - sum(num_bytes.get(kind, 0) for kind in _NAMES), 0)
    free, total = torch.cuda.mem_get_info(engine.device)
    parts.append(f"activations and all else {format_bytes(rest)}")
    return (
        f"{', '.join(parts)}; the allocator had given out {format_bytes(given_out)} and reserved "
        f"{format_bytes(torch.cuda.memory_reserved(engine.device))} of {format_bytes(total)}, {format_bytes(free)} free"
    )


def _said(forecast: Forecast, *, was_planned: bool) -> str:
    from roomier.planner.measured.record import moment_text

    when = "The forecast was" if was_planned else "A forecast, made now, says"
    peak = forecast.peak
    return f"{when} {format_bytes(forecast.peak_bytes)} at {moment_text(peak.phase, peak.place)}"


def _workload(failed: FailedRun) -> Workload | None:
    """None where no step ran, or the model was not kept as shapes."""
    shapes, batch = failed.shapes or _plain(failed), failed.batch
    if shapes is None or batch is None:
        return None
    return dataclasses.replace(Workload.of(shapes, batch), copies=kept_by(failed.callbacks))


def _plain(failed: FailedRun) -> Module | None:
    """The module itself, where nothing in the plan changed it."""
    plan, module = failed.plan, failed.module
    is_plain = plan.parallel.strategy in ("single", "ddp") and plan.adapter.lora_rank is None
    changes_model = any(lever.changes_output_layer for lever in used_levers(plan))
    has_levers = plan.activation.policy != "none" or changes_model or plan.compile.enabled
    return module if is_plain and not has_levers and plan.offload.activations == "none" else None


def _machine(failed: FailedRun) -> Machine:
    if failed.choice is not None:
        return failed.choice.machine
    parallel = failed.plan.parallel
    machine = this_machine(parallel.devices, parallel.num_nodes, parallel.accelerator)
    if machine.device.kind != "cuda":
        return machine
    total_bytes = torch.cuda.mem_get_info()[1]  # what is there when nothing else runs
    return dataclasses.replace(machine, device=dataclasses.replace(machine.device, memory_bytes=total_bytes))


def _forecast(workload: Workload, plan: Plan, machine: Machine) -> Forecast:
    from roomier.planner.dry_runs.confirm import confirm

    return confirm(workload, plan, machine)


def _advice(workload: Workload, plan: Plan, machine: Machine, forecast: Forecast | None) -> tuple[str, Plan | None]:
    """What to paste, and the plan it makes."""
    from roomier.planner.choosing.choose import budget_of, choose

    budget_bytes = budget_of(plan, machine)
    if forecast is not None:
        budget_bytes = min(budget_bytes, int(_LESS * forecast.peak_bytes))
    asked = changed(plan, {"parallel.strategy": "auto"})
    deadline = Deadline.after(AFTER_OUT_OF_MEMORY_S)
    choice = choose(workload, asked, machine, budget_bytes=budget_bytes, deadline=deadline.first_half())
    if choice.chosen is None:
        return _nothing(workload, asked, choice, deadline), None
    return _pasted(choice.chosen, workload.batch_size), choice.chosen.plan


def _nothing(workload: Workload, plan: Plan, choice: Choice, deadline: Deadline) -> str:
    from roomier.planner.choosing.nearest import nothing_fits

    error: RoomierError = nothing_fits(workload, plan, choice, deadline=deadline)
    return f"No plan fits here: {error.action}"


def _pasted(forecast: Forecast, given_batch_size: int) -> str:
    from roomier.planner.choice import words_of

    smaller = "" if forecast.micro_batch == given_batch_size else f", with batches of {forecast.micro_batch} samples"
    return (
        f"The nearest plan that fits, by forecast at {format_bytes(forecast.peak_bytes)}, is "
        f"{words_of(forecast.plan, forecast.micro_batch)}: {as_call(trainer_keywords(forecast.plan))}{smaller}"
    )
