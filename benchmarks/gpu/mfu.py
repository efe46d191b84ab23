"""Part ``mfu``: speed and memory of large models with the plan that ``strategy="auto"`` chooses, on one device.

The keys of a row are:

- ``model``, ``num_parameters``, ``tokens_per_step``; ``plan`` and ``call``: the plan in words, and the Trainer
  arguments; ``planning_s``: duration of the search; ``budget_bytes``: memory that the plan may
  use; ``machine_source``: origin of the machine's rates;
- ``step_s``: median seconds per optimizer step over the turns (``step_s_all``); ``tokens_per_s``;
- ``model_flops_per_s``: 6 FLOPs per token for each parameter in matrix products, as in
  :func:`roomier.callbacks.throughput.flops_per_token`, without recomputation; ``peak_flops_per_s``: the rate of 16-bit
  matrix products in the data sheet; ``mfu``: their ratio. The values ``peak_flops_per_s`` and ``mfu`` are None for a
  device without a data sheet;
- ``forecast_step_s``; and allocated and reserved bytes, forecast and measured, under the keys of the part ``planner``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.parts import Rows, Setting, Values
from benchmarks.gpu.planner import bytes_of
from benchmarks.training import Steps, Trained
from roomier.callbacks.throughput import flops_per_token
from roomier.core.device.streams import synchronize
from roomier.core.errors import RoomierError
from roomier.core.units import format_bytes, format_seconds
from roomier.models.gpt import GPT, GPTConfig
from roomier.plan import Plan, plan_from_flags
from roomier.planner.choice import Choice, words_of
from roomier.planner.choosing.choose import budget_of, choose
from roomier.planner.choosing.keywords import as_call, trainer_keywords
from roomier.planner.deadline import Deadline
from roomier.planner.hardware.devices import peak_flops_per_s
from roomier.planner.hardware.this_machine import this_machine
from roomier.planner.memory.tracker import MemoryTracker
from roomier.planner.workload import Workload
from roomier.techniques.precision.policy import default_dtype, precision_of

_WARMUP_STEPS = 3
_ALLOWED = ["chunked_loss", "adamw8bit"]


@dataclass(frozen=True)
class Model:
    """A model and its training settings.

    Attributes:
        config: sizes of the GPT.
        batch_size: number of sequences per optimizer step.
        precision: the argument ``precision`` of the Trainer.
        memory_share: fraction of the usable memory that the plan may use.
        planning_s: time limit of the search for a plan.
        turns, steps: number of timed turns, and number of steps per turn.
    """

    config: GPTConfig
    batch_size: int
    precision: str
    memory_share: float = 1.0
    planning_s: float = 40.0
    turns: int = 3
    steps: int = 3


def _gpt(num_layers: int, num_heads: int, width: int) -> GPTConfig:
    return GPTConfig(50304, 2048, num_layers, num_heads, width, dropout=0.0)


_FULL = {
    "1B": Model(_gpt(16, 16, 2048), batch_size=8, precision="bf16-mixed"),
    "7B": Model(_gpt(32, 32, 4096), batch_size=8, precision="bf16-true"),
    "7B, 90 % of the memory": Model(_gpt(32, 32, 4096), batch_size=8, precision="bf16-true", memory_share=0.9),
}
_TINY = {"2-layer": Model(GPTConfig(128, 32, 2, 2, 32, dropout=0.0), 2, "bf16-true", turns=1, steps=1)}


def rows(setting: Setting) -> Rows:
    """Return a row for each model."""
    models = _TINY if setting.size == "tiny" else _FULL
    return {name: partial(_row, name, model, setting) for name, model in models.items()}


def summary(values: Mapping[str, Any]) -> str:
    """Return speed, memory and plan as text."""
    mfu = "" if values["mfu"] is None else f", MFU {values['mfu']:.1%}"
    return (
        f"{values['tokens_per_s']:.0f} tokens/s{mfu}; step {format_seconds(values['step_s'])}, forecast "
        f"{format_seconds(values['forecast_step_s'])}; allocated {format_bytes(values['allocated_bytes'])}, forecast "
        f"{format_bytes(values['forecast_allocated_bytes'])}; {values['plan']}"
    )


def plan_for(model: Model, accelerator: str) -> Choice:
    """Return the fastest plan for ``model`` that fits on the device.

    Raises:
        RoomierError: no plan fits.
    """
    request = plan_from_flags(
        strategy={"name": "auto", "allow": _ALLOWED},
        accelerator=accelerator,
        devices=1,
        precision=model.precision,
        optimizer="adamw",
    )
    with torch.device("meta"):
        tokens = torch.empty(model.batch_size, model.config.context, dtype=torch.long)
        workload = Workload.of(Trained(GPT(model.config)), (tokens, tokens.clone()))
    machine = this_machine(1, accelerator=accelerator)
    choice = choose(
        workload,
        request,
        machine,
        budget_bytes=int(budget_of(request, machine) * model.memory_share),
        deadline=Deadline(model.planning_s, time.perf_counter()),
    )
    if choice.chosen is None:
        problem = f"no plan fits {format_bytes(choice.budget_bytes)}"
        raise RoomierError("bench gpu", "mfu", problem, "Use a device with more memory")
    return choice


def _row(name: str, model: Model, setting: Setting) -> Values:
    choice = plan_for(model, setting.accelerator)
    forecast = choice.chosen
    assert forecast is not None
    assert forecast.time is not None
    step, tracker, module = _prepare(model, forecast.plan, forecast.micro_batch, setting.device)
    step_s_all = [_turn_s(step, model.steps, setting.device) for _ in range(model.turns)]
    step_s = statistics.median(step_s_all)
    tokens_per_step = model.batch_size * model.config.context
    tokens_per_s = tokens_per_step / step_s
    flops_per_s = tokens_per_s * flops_per_token(module)
    peak = peak_flops_per_s(setting.device, "16")
    return {
        "model": name,
        "num_parameters": sum(each.numel() for each in module.parameters()),
        "tokens_per_step": tokens_per_step,
        "plan": words_of(forecast.plan, forecast.micro_batch),
        "call": as_call(trainer_keywords(forecast.plan)),
        "planning_s": choice.planning_s,
        "budget_bytes": choice.budget_bytes,
        "planning_is_complete": choice.is_complete,
        "machine_source": choice.machine.source,
        "step_s": step_s,
        "step_s_all": step_s_all,
        "forecast_step_s": forecast.time.total_s,
        "tokens_per_s": tokens_per_s,
        "model_flops_per_s": flops_per_s,
        "peak_flops_per_s": peak,
        "mfu": None if peak is None else flops_per_s / peak,
        **bytes_of(tracker, forecast),
    }


def _prepare(
    model: Model, plan: Plan, micro_batch: int, device: torch.device
) -> tuple[Callable[[], object], MemoryTracker, Trained]:
    """Return the step of ``plan`` after its warm-up, the memory tracker of one step, and the model on ``device``."""
    weight_dtype = precision_of(plan.precision.mode, device).weight_dtype or torch.float32
    with torch.device(device), default_dtype(weight_dtype):  # in float32, the weights of the 7B model would need 27 GB
        module = Trained(GPT(model.config))
    tokens = torch.randint(model.config.vocab_size, (micro_batch, model.config.context))
    batches = [(tokens, tokens.roll(-1, 1))] * plan.batch.accumulate_grad_batches

    steps = Steps(plan, module, batches, num_warmup=_WARMUP_STEPS)
    with steps.tracked() as tracker:
        steps.step()
        tracker.restart()
        steps.step()
    return steps.step, tracker, module


def _turn_s(step: Callable[[], object], num_steps: int, device: torch.device) -> float:
    """Return the mean seconds per step. The host does not wait for the device between the steps of a turn."""
    step()
    synchronize(device)
    start_s = time.perf_counter()
    for _ in range(num_steps):
        step()
    synchronize(device)
    return (time.perf_counter() - start_s) / num_steps
