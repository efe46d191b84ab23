"""Part ``planner``: forecast and measured memory of a step, for models and memory techniques.

The keys of a row are:

- ``model``, ``lever`` (:mod:`benchmarks.lever_rows`), ``micro_batch``, and ``method`` of the forecast;
- ``allocated_bytes``: peak of the bytes that the allocator assigned to tensors. If the device has no allocator
  statistics, the tensors of all operations are counted instead (``counts_operations``);
- ``reserved_bytes``: peak of the bytes that the allocator took from the device; None without allocator statistics;
- ``forecast_allocated_bytes``, ``forecast_reserved_bytes``: forecasts of these two values. Both forecasts include the
  workspaces of the device's libraries;
- ``allocated_error``, ``reserved_error``: forecast / measured - 1;
- ``by_kind``, ``forecast_by_kind``: size of the tensors of each kind at the peak, in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import lever_worker
from benchmarks.gpu.parts import Rows, Setting, Values
from benchmarks.lever_rows import BATCH_SIZE, keywords_of
from benchmarks.planner import measured_step
from benchmarks.planner_models import UNet
from benchmarks.training import Trained
from roomier.core.units import format_bytes
from roomier.models.gpt import GPT, GPTConfig
from roomier.plan import plan_from_flags
from roomier.planner.dry_runs.confirm import confirm
from roomier.planner.forecast import Forecast
from roomier.planner.hardware.this_machine import this_machine
from roomier.planner.memory.tracker import MemoryTracker
from roomier.planner.workload import Workload

_LEVERS = ("vanilla", "mixed", "checkpointing", "selective", "step in backward", "offload", "adam8bit", "all", "most")


@dataclass(frozen=True)
class _Model:
    """A model in the table.

    Attributes:
        make: function that returns the model. All rows share this model and train copies of it.
        batch: function that returns a micro-batch of the given number of samples.
        levers: memory techniques of its rows.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    levers: tuple[str, ...]


def rows(setting: Setting) -> Rows:
    """Return a row for each model and memory technique."""
    models = _TINY if setting.size == "tiny" else _FULL
    return {
        f"{name}, {lever}": partial(_row, name, model.make, model.batch, lever, setting)
        for name, model in models.items()
        for lever in model.levers
    }


def summary(values: Mapping[str, Any]) -> str:
    """Return measured bytes and errors as text."""
    text = f"allocated {format_bytes(values['allocated_bytes'])}, forecast {values['allocated_error']:+.1%}"
    if values["reserved_bytes"] is not None:
        text += f"; reserved {format_bytes(values['reserved_bytes'])}, forecast {values['reserved_error']:+.1%}"
    return text


def _gpt(size: str, seq_len: int, levers: tuple[str, ...]) -> _Model:
    config = GPTConfig.named(size, context=seq_len, dropout=0.0)

    def batch(num_samples: int) -> tuple[Tensor, Tensor]:
        tokens = torch.arange(num_samples * seq_len).view(num_samples, seq_len) * 7 % config.vocab_size
        return tokens, tokens.clone()

    return _Model(cache(lambda: Trained(GPT(config))), batch, levers)


def _bert(model: str, seq_len: int, levers: tuple[str, ...]) -> _Model:
    settings = {"model": model, "seq_len": seq_len}

    def batch(num_samples: int) -> dict[str, Tensor]:
        samples = lever_worker.make_samples(settings)[:num_samples]
        return {name: torch.stack([each[name] for each in samples]) for name in samples[0]}

    return _Model(cache(lambda: lever_worker.make_model(settings)), batch, levers)


def _unet(width: int, image_size: int, levers: tuple[str, ...]) -> _Model:
    def batch(num_samples: int) -> dict[str, Tensor]:
        shape = (num_samples, 3, image_size, image_size)
        return {"images": torch.linspace(-1, 1, math.prod(shape)).view(shape)}

    return _Model(cache(lambda: UNet(width, 4 * width)), batch, levers)


_FULL = {
    "gpt2": _gpt("gpt2", 1024, (*_LEVERS, "chunked loss")),
    "bert-large": _bert("bert-large", 512, _LEVERS),
    "unet": _unet(96, 128, ("vanilla", "mixed", "adam8bit")),
    "gpt2-medium": _gpt("gpt2-medium", 1024, ("vanilla", "most")),
}
_TINY = {"gpt-nano": _gpt("gpt-nano", 64, ("vanilla", "most")), "unet": _unet(16, 32, ("vanilla",))}


def _row(
    name: str, make: Callable[[], nn.Module], make_batch: Callable[[int], Any], lever: str, setting: Setting
) -> Values:
    plan = plan_from_flags(**keywords_of(lever, setting.device.type), accelerator=setting.accelerator, devices=1)
    micro_batch = BATCH_SIZE // plan.batch.accumulate_grad_batches
    module, batch = make(), make_batch(micro_batch)
    forecast = confirm(Workload.of(module, batch), plan, this_machine(1, accelerator=setting.accelerator))
    tracker = measured_step(module, batch, plan, accelerator=setting.accelerator)
    measured = bytes_of(tracker, forecast)
    for kind in ("allocated", "reserved"):
        num_bytes = measured[f"{kind}_bytes"]
        measured[f"{kind}_error"] = None if num_bytes is None else measured[f"forecast_{kind}_bytes"] / num_bytes - 1
    return {
        "model": name,
        "lever": lever,
        "micro_batch": micro_batch,
        "method": forecast.method,
        **measured,
        "by_kind": {each.value: count for each, count in tracker.peak().num_bytes.items()},
        "forecast_by_kind": {each.value: count for each, count in forecast.bytes_by_kind.items()},
    }


def forecast_of_allocator(tensor_bytes: int, fixed_bytes: Mapping[str, int]) -> dict[str, int]:
    """Return the forecast ``allocated`` and ``reserved`` bytes, computed from the parts of a forecast.

    The allocator counts workspaces as allocated, but it does not count the device context and the buffers of
    collectives.
    """
    allocated = tensor_bytes + fixed_bytes.get("workspace", 0)
    return {"allocated": allocated, "reserved": allocated + fixed_bytes.get("allocator", 0)}


def bytes_of(tracker: MemoryTracker, forecast: Forecast) -> Values:
    """Return the measured and forecast bytes that the allocator assigned to tensors, and took from the device."""
    forecasts = forecast_of_allocator(forecast.tensor_bytes, forecast.fixed_bytes)
    return {
        "allocated_bytes": tracker.allocator_peak_bytes or tracker.peak().total(),
        "forecast_allocated_bytes": forecasts["allocated"],
        "reserved_bytes": tracker.reserved_peak_bytes,
        "forecast_reserved_bytes": forecasts["reserved"],
        "counts_operations": tracker.allocator_peak_bytes is None,
    }
