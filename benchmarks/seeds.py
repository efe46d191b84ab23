"""``python -m benchmarks seeds``: memory values published in articles, compared with forecasts of the same training
runs.

The result is one JSON object with ``rows``, one for each published value:

- ``source`` and ``what``: the article and the configuration; ``hardware``: the machine;
- ``published_mib``: the published value; ``meter``: ``"allocated"`` (``max_memory_allocated`` of torch) or
  ``"occupied"`` (the memory of the device in use, reported by ``nvidia-smi``);
- ``forecast_mib``: the current version's forecast for the same configuration. The forecast includes all tensors at the
  peak. With ``"occupied"``, the forecast also includes the memory of the CUDA context (:data:`CONTEXT_MIB`);
- ``fits``: whether the plan fits on the device, including the memory outside tensors, and offloaded data fits in host
  memory and on disk; None without a forecast;
- ``host_mib``, ``disk_mib``: offloaded data of one rank in host memory and on disk;
- ``answer``: the error if the plan is rejected;
- ``ratio``: forecast / published; ``why``: the reason for the difference.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from benchmarks.models.bert import BertConfig
from benchmarks.models.transformer_lm import TransformerLMConfig
from benchmarks.seed import models
from roomier.core.errors import RoomierError
from roomier.core.units import parse_bytes
from roomier.models.gpt import GPTConfig
from roomier.plan import plan_from_flags
from roomier.planner.choosing.pricing import ClosedForms
from roomier.planner.dry_runs.confirm import confirm
from roomier.planner.hardware.spec import machine_of
from roomier.planner.workload import Workload

_NUM_COLUMNS = 5  # columns: configuration, published, forecast, fits, difference


def generated_cells(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return the cells ``forecast`` and ``fits`` for a row of ``python -m benchmarks seeds``."""
    if row["answer"]:
        return "", "rejected"
    return f"{row['forecast_mib']:,.0f}", "yes" if row["fits"] else "no"


def documented_cells(text: str) -> dict[str, tuple[str, str]]:
    """Return the cells ``forecast`` and ``fits`` of each configuration in the tables of ``text``."""
    return {cells[0]: (cells[2], cells[3]) for cells in map(_cells, text.splitlines()) if len(cells) == _NUM_COLUMNS}


def with_current_cells(text: str, rows: Iterable[Mapping[str, Any]]) -> str:
    """Return ``text`` with the generated cells of ``rows``. Other lines and cells do not change."""
    found = {row["what"]: generated_cells(row) for row in rows}
    lines = []
    for line in text.splitlines():
        cells = _cells(line)
        if len(cells) == _NUM_COLUMNS and cells[0] in found:
            line = "| " + " | ".join([*cells[:2], *found[cells[0]], cells[4]]).rstrip() + " |"
        lines.append(line)
    return "\n".join(lines) + "\n"


def _cells(line: str) -> list[str]:
    if not line.startswith("|"):
        return []
    return [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]


CONTEXT_MIB = 1343
"""Memory that the CUDA context and kernels use on a V100, as reported in the Hugging Face guide."""

_SHAKESPEARE = 65  # number of different characters in the text of the minGPT benchmark
_MINGPT, _BERT, _SHARDED = "Lightning + DeepSpeed", "Hugging Face guide", "Lightning Sharded"
_OFFLOAD = "offload on one GPU"


@dataclass(frozen=True)
class Published:
    """One published value.

    Attributes:
        source: the article.
        what: the configuration.
        hardware: name of the machine, as accepted by :func:`machine_of`.
        workload: function that creates the model to train and its micro-batch.
        flags: arguments of :func:`plan_from_flags`.
        published_mib: the value in MiB; None if the article states only whether the model fits.
        meter: ``"allocated"`` or ``"occupied"``.
        why: the reason for the difference between the value and the forecast.
        host_memory: memory of the host; empty to use the memory of a typical node with this device.
    """

    source: str
    what: str
    hardware: str
    workload: Callable[[], Workload]
    flags: Mapping[str, Any]
    published_mib: float | None
    meter: str
    why: str
    host_memory: str = ""


def mingpt(num_layers: int, width: int) -> Callable[[], Workload]:
    """Return a function that creates the GPT in SeanNaren/minGPT's benchmark.py of March 2021, with 128 characters and
    16 heads."""
    return partial(models.minigpt(num_layers, 16, width).workload, 1)


def bert_large(batch_size: int) -> Callable[[], Workload]:
    """Return a function that creates ``bert-large-uncased`` with a classifier, 512 tokens, and materialized attention
    scores as in 2022."""
    return partial(models.bert(BertConfig(fused_attention=False), batch_size).workload, batch_size)


def sentence_model(num_layers: int, batch_size: int) -> Callable[[], Workload]:
    """Return a function that creates the model in the article about Lightning Sharded."""
    return partial(models.transformer_lm(TransformerLMConfig(num_layers=num_layers), batch_size).workload, batch_size)


def gpt(num_layers: int, num_heads: int, width: int, batch_size: int) -> Callable[[], Workload]:
    """Return a function that creates a GPT with sequences of 1024 tokens and the vocabulary of GPT-2."""
    return partial(models.gpt(GPTConfig(50257, 1024, num_layers, num_heads, width), batch_size).workload, batch_size)


_FP16 = {"precision": "16-mixed", "optimizer": "adamw", "gradient_clip_val": 1.0}
_TWO_COPIES = (
    "DDP of 2021 stored gradients in addition to the buckets (4 bytes more per parameter); in this version, gradients "
    "are views of the buckets"
)
_LABEL = "the article prints this value for 12.8B, but the README of the benchmark prints it for the 1.7B model"
_SMALL = {"accumulate_grad_batches": 4, "activation_checkpointing": "full", "precision": "16-mixed"}
_CACHE = "nvidia-smi also counts memory that the allocator reserves"
_A100S = "a100-40gb:8"


def published() -> Iterator[Published]:
    """Yield all published values, in the order of the articles."""
    ddp, zero3 = {**_FP16, "strategy": "ddp"}, {**_FP16, "strategy": "zero3"}
    large = mingpt(16, 8192)
    yield Published(_MINGPT, "1.7B, ddp, fp16", _A100S, mingpt(15, 3072), ddp, 36148.55, "allocated", _TWO_COPIES)
    next_size = (
        "larger than the largest model that fit; the forecast has 4 bytes fewer per parameter, so more layers fit"
    )
    yield Published(_MINGPT, "2.3B (20 layers), ddp, fp16", _A100S, mingpt(20, 3072), ddp, None, "allocated", next_size)
    yield Published(_MINGPT, "1.7B, zero3, fp16", _A100S, mingpt(15, 3072), zero3, 7796.98, "allocated", _LABEL)
    yield Published(_MINGPT, "12.8B, ddp, fp16", _A100S, large, ddp, None, "allocated", "states alone are 205 GB")
    zero2 = {**_FP16, "strategy": "zero2"}
    whole = "each rank holds the unsharded weights and activations"
    yield Published(_MINGPT, "12.8B, zero2, fp16", _A100S, large, zero2, None, "allocated", whole)
    fits = "the article states that the model fits, without a value"
    yield Published(_MINGPT, "12.8B, zero3, fp16", _A100S, large, zero3, None, "allocated", fits)
    giant, full = mingpt(56, 8192), {**zero3, "activation_checkpointing": "full"}
    states = "without offload, the states alone require 84 GiB on each of eight devices"
    yield Published(_MINGPT, "45B, zero3, fp16, recompute", _A100S, giant, full, None, "allocated", states)
    offload = {**full, "precision": "bf16-mixed", **_both("cpu", "cpu")}
    larger = (
        "the article prints 4,977 MiB, which the README of the benchmark lists for the 1.7B model; the forecast uses "
        "bf16"
    )
    yield Published(_MINGPT, "45B, zero3 with offload, recompute", _A100S, giant, offload, None, "allocated", larger)
    plain = {"optimizer": "adam"}
    for num_layers, size, strategy in ((22, "1.2B", "ddp"), (22, "1.2B", "zero2"), (32, "1.7B", "zero2")):
        workload, flags = sentence_model(num_layers, 4), {**plain, "strategy": strategy}
        why = "the article states no value, batch size or precision; the forecast assumes fp32 and 4 sentences"
        yield Published(_SHARDED, f"{size}, {strategy}, fp32", _A100S, workload, flags, None, "allocated", why)
    yield from _bert_ladder()
    yield from _offloaded()


def _both(states: str, parameters: str) -> dict[str, Any]:
    return {"offload": {"optimizer_states": states, "parameters": parameters}}


def _offloaded() -> Iterator[Published]:
    """Yield rows for the model sizes that offloading makes possible on one GPU, according to ZeRO-Offload, DeepSpeed
    and LoHan."""
    base = {"optimizer": "adamw", "gradient_clip_val": 1.0, "activation_checkpointing": "full"}
    v100, server = "v100-32gb:1", "1.5TiB"
    half = {**base, "precision": "bf16-mixed", **_both("cpu", "cpu")}
    states = {**base, "precision": "bf16-mixed", "offload": {"optimizer_states": "cpu"}}
    small, wide, deep = gpt(40, 40, 5120, 4), gpt(50, 64, 8192, 1), gpt(127, 40, 5120, 1)
    rows = [
        ("13B, states in host memory", v100, small, states, server, "fp32 weights and gradients stay on the device"),
        ("13B, states and parameters in host memory", v100, small, half, server, "ZeRO-Offload: 13B on one V100"),
        ("40B of width 5120, both in host memory", v100, deep, half, server, "ZeRO-3 Offload: 40B on one V100"),
        ("40B of width 8192, both in host memory", v100, wide, half, server, "a block is the smallest unit"),
    ]
    low = {**base, "precision": "bf16-true"}
    huge, rtx = gpt(96, 96, 12288, 1), "rtx4090:1"
    on_disk = {**low, "offload": {"optimizer_states": "disk", "parameters": "disk", "activations": "cpu"}}
    rows += [("175B, both on disk", rtx, huge, on_disk, "768GiB", "LoHan: 175B on one RTX 4090 with SSDs")]
    for name, tiers, why in (
        ("in host memory", _both("cpu", "cpu"), "the states do not fit in host memory"),
        ("on disk", _both("disk", "disk"), "no published value"),
    ):
        rows.append((f"40B, both {name} (128 GiB)", "h200:1", gpt(50, 64, 8192, 4), {**low, **tiers}, "128GiB", why))
    for what, hardware, workload, flags, host_memory, why in rows:
        yield Published(_OFFLOAD, what, hardware, workload, flags, None, "allocated", why, host_memory)


def _bert_ladder() -> Iterator[Published]:
    adamw, adafactor, eight = ({"optimizer": name} for name in ("adamw", "adafactor", "adamw8bit"))
    factored = "torch's Adafactor stores only row and column means, without a first moment, as in the guide"
    rungs: list[tuple[str, int, dict[str, Any], int, str]] = [
        ("batch 4", 4, adamw, 14949, _CACHE),
        ("batch 1 x 4 accumulated", 1, {**adamw, "accumulate_grad_batches": 4}, 8681, _CACHE),
        ("and recompute", 1, {**adamw, "accumulate_grad_batches": 4, "activation_checkpointing": "full"}, 6775, _CACHE),
        ("batch 4, fp16", 4, {**adamw, "precision": "16-mixed"}, 13939, _CACHE),
        ("1 x 4, recompute, fp16", 1, {**adamw, **_SMALL}, 7275, _CACHE),
        ("batch 4, Adafactor", 4, adafactor, 12295, factored),
        ("1 x 4, recompute, fp16, Adafactor", 1, {**adafactor, **_SMALL}, 4847, factored),
        ("batch 4, 8-bit AdamW", 4, eight, 13085, _CACHE),
        ("1 x 4, recompute, fp16, 8-bit AdamW", 1, {**eight, **_SMALL}, 5363, _CACHE),
    ]
    for what, batch_size, flags, published_mib, why in rungs:
        name = f"BERT-large, 512 tokens, {what}"
        yield Published(_BERT, name, "v100-16gb:1", bert_large(batch_size), flags, published_mib, "occupied", why)


def row_of(each: Published, *, runs_dry: bool = False) -> dict[str, Any]:
    """Return the row that compares a published memory measurement with its forecast.

    Args:
        each: the published measurement.
        runs_dry: if True, forecast by a dry run instead of the memory formula.
    """
    row: dict[str, Any] = {
        **{name: getattr(each, name) for name in ("source", "what", "hardware", "published_mib", "meter")},
        **dict.fromkeys(("forecast_mib", "fits", "answer", "ratio", "host_mib", "disk_mib")),
        "answer": "",
        "why": each.why,
    }
    machine = machine_of(each.hardware)
    if each.host_memory:
        machine = replace(machine, host_memory_bytes=parse_bytes("host_memory", each.host_memory))
    try:
        plan = plan_from_flags(devices=machine.num_ranks, accelerator="cuda", **each.flags)
        workload = each.workload()
        prices = ClosedForms(workload, machine)
        forecast = confirm(workload, plan, machine) if runs_dry else prices.estimate(plan, workload.batch_size)
    except RoomierError as error:
        return row | {"answer": str(error)}
    forecast_mib = forecast.tensor_bytes / 2**20 + (CONTEXT_MIB if each.meter == "occupied" else 0)
    ratio = None if each.published_mib is None else forecast_mib / each.published_mib
    lower = {"host_mib": forecast.host_bytes / 2**20, "disk_mib": forecast.disk_bytes / 2**20}
    fits = forecast.fits(machine.device.memory_bytes)
    return row | {"forecast_mib": forecast_mib, "fits": fits, "ratio": ratio, **lower}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--only", default="", help="only rows whose name contains this text")
    parser.add_argument("--dry-run", action="store_true", help="forecast by dry runs, which takes minutes")
    parser.add_argument(
        "--update", type=Path, default=None, metavar="FILE", help="write the forecasts to this document"
    )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Forecast all published values."""
    rows = [row_of(each, runs_dry=options.dry_run) for each in published() if options.only in each.what]
    if not rows:
        raise RoomierError("--only", options.only, "no row contains this text", "Omit the option to see all rows")
    if options.update is not None:
        options.update.write_text(with_current_cells(options.update.read_text(), rows))
    return {"rows": rows}


def table(result: Mapping[str, Any]) -> RenderableType:
    """Return a table with one line for each published value."""
    shown = Table("configuration", "published MiB", "forecast MiB", "ratio", "fits", "why")
    for row in result["rows"]:
        numbers = [row["published_mib"], row["forecast_mib"]]
        fits = "rejected" if row["answer"] else "yes" if row["fits"] else "no"
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        cells = ["" if each is None else f"{each:,.0f}" for each in numbers]
        shown.add_row(row["what"], *cells, ratio, fits, row["answer"] or row["why"])
    return shown
