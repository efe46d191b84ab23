"""Part ``planner``: forecast and measured memory of a step, for models and memory techniques.

The keys of a row are:

- ``model``, ``lever`` (:mod:`roomier.bench.lever_rows`), ``micro_batch``, and ``method`` of the forecast;
- ``allocated_bytes``: peak of the bytes that the allocator assigned to tensors. If the device has no allocator
  statistics, the tensors of all operations are counted instead (``counts_operations``);
- ``reserved_bytes``: peak of the bytes that the allocator took from the device; None without allocator statistics;
- ``forecast_allocated_bytes``, ``forecast_reserved_bytes``: the same by forecast. Both include the workspaces of the
  device's libraries;
- ``allocated_error``, ``reserved_error``: forecast / measured - 1;
- ``by_kind``, ``forecast_by_kind``: bytes of tensors at the peak.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from roomier.bench import lever_worker
from roomier.bench.gpu.parts import Rows, Setting, Values
from roomier.bench.lever_rows import BATCH_SIZE, keywords_of
from roomier.bench.planner_models import UNet
from roomier.bench.planner_truth import measured_step
from roomier.bench.strategy_ranks import TrainedGPT
from roomier.core.units import format_bytes
from roomier.hardware.this_machine import this_machine
from roomier.models.gpt import GPTConfig
from roomier.plan import plan_from_flags
from roomier.planner.dry_runs.confirm import confirm
from roomier.planner.workload import Workload

_LEVERS = ("vanilla", "mixed", "checkpointing", "selective", "step in backward", "offload", "adam8bit", "all", "most")
_GPT_LEVERS = (*_LEVERS, "chunked loss")

Made = tuple[nn.Module, Any]


def rows(setting: Setting) -> Rows:
    """Return a row for each model and memory technique."""
    levers_of = _TINY if setting.size == "tiny" else _FULL
    names = [(model, lever) for model, (_, levers) in levers_of.items() for lever in levers]
    return {f"{model}, {lever}": partial(_row, levers_of[model][0], model, lever, setting) for model, lever in names}


def summary(values: Mapping[str, Any]) -> str:
    """Return measured bytes and errors."""
    text = f"allocated {format_bytes(values['allocated_bytes'])}, forecast {values['allocated_error']:+.1%}"
    if values["reserved_bytes"] is not None:
        text += f"; reserved {format_bytes(values['reserved_bytes'])}, forecast {values['reserved_error']:+.1%}"
    return text


def _gpt(size: str, seq_len: int, micro_batch: int) -> Made:
    config = GPTConfig.named(size, context=seq_len, dropout=0.0)
    tokens = torch.arange(micro_batch * seq_len).view(micro_batch, seq_len) * 7 % config.vocab_size
    return TrainedGPT(config), (tokens, tokens.clone())


def _bert(micro_batch: int) -> Made:
    settings = {"model": "bert-large", "seq_len": 512}
    samples = lever_worker.make_samples(settings)[:micro_batch]
    batch = {name: torch.stack([each[name] for each in samples]) for name in samples[0]}
    return lever_worker.make_model(settings), batch


def _unet(width: int, image_size: int, micro_batch: int) -> Made:
    shape = (micro_batch, 3, image_size, image_size)
    return UNet(width, 4 * width), {"images": torch.linspace(-1, 1, 3 * image_size**2 * micro_batch).view(shape)}


_FULL: Mapping[str, tuple[Callable[[int], Made], tuple[str, ...]]] = {
    "gpt2": (partial(_gpt, "gpt2", 1024), _GPT_LEVERS),
    "bert-large": (_bert, _LEVERS),
    "unet": (partial(_unet, 96, 128), ("vanilla", "mixed", "adam8bit", "checkpointing")),
    "gpt2-medium": (partial(_gpt, "gpt2-medium", 1024), _GPT_LEVERS),
}
_TINY: Mapping[str, tuple[Callable[[int], Made], tuple[str, ...]]] = {
    "gpt-nano": (partial(_gpt, "gpt-nano", 64), ("vanilla", "most")),
    "unet": (partial(_unet, 16, 32), ("vanilla",)),
}


def _row(make: Callable[[int], Made], model: str, lever: str, setting: Setting) -> Values:
    plan = plan_from_flags(**keywords_of(lever, setting.device.type), accelerator=setting.accelerator, devices=1)
    micro_batch = BATCH_SIZE // plan.batch.accumulate_grad_batches
    torch.manual_seed(0)
    module, batch = make(micro_batch)
    forecast = confirm(Workload.of(module, batch), plan, this_machine(1, accelerator=setting.accelerator))
    tracker = measured_step(module, batch, plan, accelerator=setting.accelerator)
    peak = tracker.peak()
    measured_bytes = {
        "allocated": tracker.allocator_peak_bytes or peak.total(),
        "reserved": tracker.reserved_peak_bytes,
    }
    forecast_bytes = forecast_of_allocator(forecast.tensor_bytes, forecast.fixed_bytes)
    found: Values = {"model": model, "lever": lever, "micro_batch": micro_batch, "method": forecast.method}
    for name, num_bytes in measured_bytes.items():
        found[f"{name}_bytes"] = num_bytes
        found[f"forecast_{name}_bytes"] = forecast_bytes[name]
        found[f"{name}_error"] = None if num_bytes is None else forecast_bytes[name] / num_bytes - 1
    return {
        **found,
        "counts_operations": tracker.allocator_peak_bytes is None,
        "by_kind": {kind.value: count for kind, count in peak.num_bytes.items()},
        "forecast_by_kind": {kind.value: count for kind, count in forecast.bytes_by_kind.items()},
    }


def forecast_of_allocator(tensor_bytes: int, fixed_bytes: Mapping[str, int]) -> dict[str, int]:
    """Return the forecast of ``allocated`` and ``reserved`` bytes from the parts of a forecast.

    The allocator counts workspaces as allocated. It does not count the context and the buffers of collectives.
    """
    allocated = tensor_bytes + fixed_bytes.get("workspace", 0)
    return {"allocated": allocated, "reserved": allocated + fixed_bytes.get("allocator", 0)}
