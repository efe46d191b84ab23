"""``python -m benchmarks seed NAME``: the table of an article, with measured, published and forecast values.

Each training runs in processes ``python -m benchmarks.seed.case SETTINGS``, in which the Trainer runs as in a user's
script and starts the other ranks. With ``--json``, each row is one line:

- ``model``, ``size``, ``configuration``, ``strategy``, ``precision``: settings of the training run; ``num_parameters``,
  ``micro_batch``, ``accumulate``, ``global_batch``: sizes of the training run;
- ``hardware``: machine of the forecast; ``ranks``: number of ranks;
- ``forecast_bytes``: total size of all tensors at the peak of a step on one rank; ``forecast_fits``: whether the plan
  fits on ``hardware``; ``forecast_step_s``, ``forecast_samples_per_s``, ``forecast_epoch_s``;
- ``measured_bytes``, ``measured_by_kind``: the same peak, measured by :class:`roomier.callbacks.MemoryForecast` on the
  rank with the most memory; ``error``: forecast / measured - 1;
- ``step_s``: median time of an optimizer step; ``step_s_all``, ``samples_per_s``, ``epoch_s``; ``losses`` of rank 0;
- ``published``: values of the article, or null; ``problem``: why a value is missing, or null.

With ``--forecast``, no training runs, and measured values are null.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich import box
from rich.console import RenderableType
from rich.table import Table
from torch.utils.data import DataLoader

from benchmarks.lever_rows import ROWS
from benchmarks.lever_worker import Repeated
from benchmarks.machine import circumstances
from benchmarks.rank_processes import run_worker
from benchmarks.seed.models import MODELS, SIZES, Training, minigpt
from benchmarks.seeds import CONTEXT_MIB
from roomier.api.callback import Callback
from roomier.callbacks.forecast import MemoryForecast
from roomier.core.device.resolve import num_devices, resolve_device
from roomier.core.device.streams import synchronize
from roomier.core.errors import RoomierError, did_you_mean
from roomier.core.log import notice
from roomier.core.units import format_seconds
from roomier.plan import Plan, plan_from_flags
from roomier.planner.choosing.pricing import ClosedForms, Prices
from roomier.planner.hardware.host import available_memory_bytes, num_cores
from roomier.planner.hardware.machine import Machine
from roomier.planner.hardware.spec import machine_of
from roomier.trainer.trainer import Trainer

EIGHT_A100 = "a100-40gb:8"


@dataclass(frozen=True)
class Published:
    """Values that an article states.

    Attributes:
        hardware: machine of the article, as accepted by ``machine_of``.
        memory_mib: memory of one device in MiB.
        meter: ``"allocated"`` (``max_memory_allocated``) or ``"occupied"`` (memory of the device in use).
        epoch_s: duration of an epoch.
        samples_per_s: samples per second.
    """

    hardware: str
    memory_mib: float
    meter: str
    epoch_s: float | None = None
    samples_per_s: float | None = None


@dataclass(frozen=True)
class Configuration:
    """Settings of a training run.

    Attributes:
        name: name of the row.
        flags: arguments of the Trainer. The precision ``"16"`` means fp16 on a GPU and bf16 on a CPU. The tier
            ``"lower"`` means host memory on a GPU and the disk on a CPU.
        published: values reported in the article; None if the article reports none.
    """

    name: str
    flags: Mapping[str, Any]
    published: Published | None = None

    def keywords(self, kind: str) -> dict[str, Any]:
        """Return the arguments of the Trainer on a device of ``kind``, such as ``"cpu"``."""
        keywords = dict(self.flags)
        if keywords.get("precision") == "16":
            keywords["precision"] = "bf16-mixed" if kind == "cpu" else "16-mixed"
        if keywords.get("offload") == "lower":
            keywords["offload"] = {"optimizer_states": "disk" if kind == "cpu" else "cpu"}
        return keywords

    def micro_batch(self, batch_size: int) -> int:
        """Return the number of samples per micro-batch if a rank processes ``batch_size`` samples in a step.

        Only rows from the Hugging Face guide accumulate gradients. In these rows, a micro-batch is one sample.
        """
        num_micro_batches: int = self.flags.get("accumulate_grad_batches", 1)
        return max(1, batch_size // num_micro_batches)


_FULL = {"activation_checkpointing": "full"}
_LOWER = {"offload": "lower"}


def _mingpt() -> list[Configuration]:
    base = {"precision": "16", "optimizer": "adamw", "gradient_clip_val": 1.0}

    def row(name: str, flags: Mapping[str, Any], memory_mib: float = 0, epoch_s: float = 0) -> Configuration:
        published = Published(EIGHT_A100, memory_mib, "allocated", epoch_s) if memory_mib else None
        return Configuration(name, {**base, **flags}, published)

    return [
        row("ddp", {"strategy": "ddp"}, 36148.55, 43.69),
        row("zero2", {"strategy": "zero2"}),
        row("zero3", {"strategy": "zero3"}, 7796.98, 45.05),
        row("zero3, offload", {"strategy": "zero3", **_LOWER}, 4976.98, 248.39),
        row("zero3, offload, recompute", {"strategy": "zero3", **_LOWER, **_FULL}, 2192.98, 256.91),
    ]


def _sharded() -> list[Configuration]:
    half = {"precision": "16"}
    rows: dict[str, dict[str, Any]] = {
        "ddp": {"strategy": "ddp"},
        "ddp, 16-bit": {"strategy": "ddp", **half},
        "zero2": {"strategy": "zero2"},
        "zero2, 16-bit": {"strategy": "zero2", **half},
        "zero3, 16-bit": {"strategy": "zero3", **half},
        "zero3, 16-bit, recompute": {"strategy": "zero3", **half, **_FULL},
        "zero3, 16-bit, offload": {"strategy": "zero3", **half, **_LOWER},
        "zero3, 16-bit, offload, recompute": {"strategy": "zero3", **half, **_LOWER, **_FULL},
    }
    return [Configuration(name, {"optimizer": "adam", **flags}) for name, flags in rows.items()]


def _guide() -> list[Configuration]:
    """Return the rows of Hugging Face's guide, which :mod:`benchmarks.lever_rows` lists, and sharded strategies."""
    rows = []
    for name, lever in ROWS.items():
        if lever.published is not None:
            samples_per_s, memory_mib = lever.published
            published = Published("v100-16gb:1", memory_mib, "occupied", 512 / samples_per_s, samples_per_s)
            rows.append(Configuration(name, {"optimizer": "adamw", **lever.roomier}, published))
    strategies = ("zero2", "zero3")  # the guide uses one device
    return [*rows, *(Configuration(name, {"optimizer": "adamw", "strategy": name}) for name in strategies)]


def configurations_of(model: str) -> list[Configuration]:
    """Return the settings for a model of :data:`benchmarks.seed.models.MODELS`."""
    return {"minigpt": _mingpt, "bert-large": _guide}.get(model, _sharded)()


_TRACKED_STEP = 3  # with deferred updates, the first update runs in step 2
_NUM_WARMUP = _TRACKED_STEP + 1  # the step after the tracked step fills caches again


class StepTimes(Callback):
    """Callback that measures the time between the ends of consecutive optimizer steps after the warm-up.

    Attributes:
        durations_s: duration of each step in seconds.
        losses: loss of this rank in each step.
    """

    reads_parameters = False  # otherwise every step waits for the updates of offloaded states

    def __init__(self, device: torch.device) -> None:
        self.durations_s: list[float] = []
        self.losses: list[float] = []
        self._device = device
        self._last: tuple[int, float] | None = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Measure an optimizer step, if a step ends with this micro-batch."""
        step = trainer.global_step
        if self._last is not None and step == self._last[0]:
            return
        synchronize(self._device)
        now = time.perf_counter()
        if self._last is not None and step > _NUM_WARMUP:
            self.durations_s.append(now - self._last[1])
        self.losses.append(float(outputs["loss"].detach() if isinstance(outputs, Mapping) else outputs.detach()))
        self._last = (step, now)


def training_of(settings: Mapping[str, Any]) -> Training:
    """Return the model and the data that ``settings`` selects: a size in :data:`MODELS`, or a minGPT of any size."""
    own = settings["own_size"]
    if own is not None:
        return minigpt(own["n_layer"], own["n_head"], own["n_embd"], context=own["block_size"])
    return MODELS[settings["model"]].sizes[settings["size"]]


def train(settings: Mapping[str, Any], name: str, folder: str) -> dict[str, Any]:
    """Run the configuration ``name`` and return the measured values."""
    [configuration] = [each for each in configurations_of(settings["model"]) if each.name == name]
    training = training_of(settings)
    micro_batch = configuration.micro_batch(settings["batch_size"] or training.micro_batch)
    device = resolve_device(settings["accelerator"])
    keywords = configuration.keywords(device.type)
    if settings["precision"] is not None:
        keywords["precision"] = settings["precision"]
    if isinstance(keywords.get("offload"), dict) and "disk" in keywords["offload"].values():
        keywords["offload"] = {**keywords["offload"], "folder": folder}
    times, forecast = StepTimes(device), MemoryForecast(at_step=_TRACKED_STEP)
    num_steps = _NUM_WARMUP + settings["steps"]
    trainer = Trainer(
        **keywords,
        learning_rate=1e-4,
        accelerator=settings["accelerator"],
        devices=settings["ranks"],
        max_steps=num_steps,
        callbacks=[forecast, times],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    torch.manual_seed(0)
    num_samples = micro_batch * num_steps * settings["ranks"] * keywords.get("accumulate_grad_batches", 1)
    data = DataLoader(Repeated(training.samples(), num_samples), batch_size=micro_batch, collate_fn=training.collate)
    trainer.fit(training.make_model(), data)
    record = forecast.record
    found: dict[str, Any] = {
        "step_s": statistics.median(times.durations_s),
        "step_s_all": times.durations_s,
        "losses": times.losses,
        "is_rank_0": trainer.is_global_zero,
    }
    if record is not None:
        seconds = record.forecast.time
        found |= {
            "forecast_bytes": record.forecast_bytes,
            "forecast_method": record.forecast.method,
            "forecast_step_s": None if seconds is None else seconds.total_s,
            "measured_bytes": record.measured_bytes,
            "measured_by_kind": {kind.value: count for kind, count in record.worst.peak.peak.items()},
            "num_parameters": record.num_parameters,
        }
    return found


def main(settings: dict[str, Any]) -> None:
    """Run each configuration in ``settings``. Rank 0 writes the values to the file ``settings["result"]``."""
    warnings.filterwarnings("ignore")
    for name in settings["configurations"]:
        with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            try:
                found = train(settings, name, folder)
            except Exception:
                found = {"error": traceback.format_exc(limit=-3), "is_rank_0": True}
        gc.collect()
        if found.pop("is_rank_0"):
            with Path(settings["result"]).open("a") as file:
                file.write(json.dumps({"configuration": name, **found}) + "\n")
        if "error" in found:  # the other ranks cannot continue
            sys.exit(1)


_ALIASES = {"mingpt": "minigpt", "bert": "bert-large", "deepspeech": "deepspeech2"}
_OWN_SIZE = {"n_layer": 15, "n_head": 16, "n_embd": 3072, "block_size": 128}
_MEASURED = ("measured_bytes", "measured_by_kind", "error", "step_s", "step_s_all", "samples_per_s", "epoch_s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("model", help=", ".join(MODELS))
    parser.add_argument(
        "--size", choices=SIZES, default=None, help="default: seed with --forecast or on a GPU, otherwise middle"
    )
    parser.add_argument("--only", default="", help="only configurations whose name contains this text")
    parser.add_argument(
        "--ranks", "--gpus", type=int, default=None, help="default: 1 for bert-large, otherwise all GPUs, or 2 on a CPU"
    )
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each configuration (%(default)s)")
    parser.add_argument("--batch_size", "--batch-size", type=int, default=None, help="samples per rank and step")
    parser.add_argument("--precision", default=None, help="16, bf16 or 32; default: the precision of each row")
    parser.add_argument("--accelerator", default="auto", help="as in Trainer(accelerator=...) (%(default)s)")
    parser.add_argument("--forecast", default=None, metavar="HARDWARE", help="only forecasts, such as a100-40gb:8")
    own = parser.add_argument_group("minGPT", "the options of minGPT's benchmark.py")
    for name, default in _OWN_SIZE.items():
        own.add_argument(f"--{name}", type=int, default=None, help=f"{default} if another of these options is set")
    own.add_argument("--limit_train_batches", type=int, default=None, help="number of steps per epoch (128)")
    own.add_argument("--cpu_offload", action="store_true", help="only the configurations with offload")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the rows of all configurations in ``lines``, and the names of failed configurations in ``failed``."""
    settings = settings_of(options)
    chosen = _chosen(options, settings["model"])
    facts = circumstances()
    rows = [forecast_row(settings, each) for each in chosen]
    if options.forecast is None:
        possible = [row["configuration"] for row in rows if row["problem"] is None]
        batches = [possible] if settings["size"] == "tiny" else [[each] for each in possible]
        measured = {name: found for names in batches if names for name, found in _run(settings, names).items()}
        rows = [_with_measurement(row, measured.get(row["configuration"]), settings) for row in rows]
    failed = [row["configuration"] for row in rows if row.pop("has_failed", False)]
    lines = [{"case": "seed", **row, **facts} for row in rows]
    return {"case": "seed", "model": settings["model"], "size": settings["size"], "lines": lines, "failed": failed}


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options as JSON data for the worker, with the defaults of this machine."""
    model = _ALIASES.get(options.model, options.model)
    if model not in MODELS:
        raise RoomierError("model", options.model, "is not a model of this benchmark", did_you_mean(model, MODELS))
    given = {name: getattr(options, name) for name in _OWN_SIZE if getattr(options, name) is not None}
    if model != "minigpt" and (given or options.cpu_offload or options.limit_train_batches is not None):
        name = next(iter(given), "cpu_offload" if options.cpu_offload else "limit_train_batches")
        raise RoomierError(f"--{name}", getattr(options, name), "is an option only for minigpt", "Remove it")
    for name in ("ranks", "steps", "batch_size", "limit_train_batches", *_OWN_SIZE):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise RoomierError(f"--{name}", value, "must be at least 1", "Use a positive integer")
    if given and options.size is not None:
        raise RoomierError(f"--{next(iter(given))}", next(iter(given.values())), "contradicts --size", "Remove one")
    device = resolve_device(options.accelerator)
    usual = "seed" if options.forecast is not None or device.type != "cpu" else "middle"
    most = 1 if model == "bert-large" else (2 if device.type == "cpu" else num_devices(device))
    return {
        "model": model,
        "size": "own" if given else options.size or usual,
        "own_size": {**_OWN_SIZE, **given} if given else None,
        "ranks": options.ranks or most,
        **{name: getattr(options, name) for name in ("steps", "batch_size", "precision", "accelerator")},
        "hardware": options.forecast,
        "epoch_steps": options.limit_train_batches or (128 if model == "minigpt" else None),
    }


def _chosen(options: argparse.Namespace, model: str) -> list[Configuration]:
    known = configurations_of(model)
    found = [
        each for each in known if options.only in each.name and ("offload" in each.name or not options.cpu_offload)
    ]
    if not found:
        action = f"Use a part of one of these names: {'; '.join(each.name for each in known)}"
        raise RoomierError("--only", options.only, "is part of no configuration", action)
    return found


# Forecasts ----------------------------------------------------------------------------------------------------------


def forecast_row(settings: Mapping[str, Any], configuration: Configuration) -> dict[str, Any]:
    """Return the row of a configuration with its forecast. ``problem`` states why the plan cannot run."""
    training = training_of(settings)
    micro_batch = configuration.micro_batch(settings["batch_size"] or training.micro_batch)
    machine = _machine(settings)
    row: dict[str, Any] = {
        "model": settings["model"],
        "size": settings["size"],
        "configuration": configuration.name,
        "hardware": machine.device.name,
        "ranks": machine.num_ranks,
        "micro_batch": micro_batch,
        "problem": None,
        "published": None if configuration.published is None else asdict(configuration.published),
    }
    row |= dict.fromkeys(_MEASURED)
    try:
        plan = _plan(settings, configuration, machine)
        row |= {
            "strategy": plan.parallel.strategy,
            "precision": plan.precision.mode,
            "accumulate": plan.batch.accumulate_grad_batches,
            "global_batch": micro_batch * plan.batch.accumulate_grad_batches * machine.num_ranks,
        }
        workload = training.workload(micro_batch)
        row["num_parameters"] = workload.num_parameters
        row |= _forecast(ClosedForms(workload, machine), plan, micro_batch, machine, settings)
    except RoomierError as error:
        return {**row, "problem": str(error)}
    if settings["hardware"] is None and not row["forecast_fits"]:
        row["problem"] = "does not fit on this machine, so it was not run"
    return row


def _machine(settings: Mapping[str, Any]) -> Machine:
    if settings["hardware"] is not None:
        return machine_of(settings["hardware"])
    kind = resolve_device(settings["accelerator"]).type
    return machine_of(f"{'cpu' if kind == 'cpu' else 'this'}:{settings['ranks']}")


def _plan(settings: Mapping[str, Any], configuration: Configuration, machine: Machine) -> Plan:
    keywords = configuration.keywords(machine.device.kind)
    if settings["precision"] is not None:
        keywords["precision"] = settings["precision"]
    keywords |= {"devices": machine.devices_per_node, "num_nodes": machine.num_nodes}
    return plan_from_flags(accelerator=machine.device.kind, **keywords)


def _forecast(
    prices: Prices, plan: Plan, micro_batch: int, machine: Machine, settings: Mapping[str, Any]
) -> dict[str, Any]:
    forecast = prices.estimate(plan, micro_batch)
    step_s = None if forecast.time is None else forecast.time.total_s
    memory_bytes = machine.device.memory_bytes
    if machine.device.kind == "cpu":
        memory_bytes = available_memory_bytes() // machine.num_ranks
    return {
        "forecast_bytes": forecast.tensor_bytes,
        "forecast_method": forecast.method,
        "forecast_fits": forecast.fits(memory_bytes),
        **_speeds("forecast_", step_s, forecast.global_batch, settings),
    }


def _speeds(prefix: str, step_s: float | None, global_batch: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the time of a step, samples per second and the time of an epoch."""
    samples_per_s = global_batch / step_s if step_s else None
    epoch_s = None
    if step_s:
        num_steps = settings["epoch_steps"] or MODELS[settings["model"]].epoch_samples / global_batch
        epoch_s = num_steps * step_s
    return {f"{prefix}step_s": step_s, f"{prefix}samples_per_s": samples_per_s, f"{prefix}epoch_s": epoch_s}


# Measurements -------------------------------------------------------------------------------------------------------


def _run(settings: Mapping[str, Any], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Run each configuration in ``names``, in one group of processes. Return the values, keyed by name."""
    notice(f"bench seed: {settings['model']}, {settings['size']}: {'; '.join(names)}")
    variables = {
        "OMP_NUM_THREADS": str(max(1, num_cores() // settings["ranks"])),
        "ROOMIER_MAX_DEVICES": str(settings["ranks"]),
    }
    text, code, last_lines = run_worker("benchmarks.seed.case", {**settings, "configurations": names}, **variables)
    found = {line.pop("configuration"): line for line in map(json.loads, text.splitlines())}
    if code:
        notice(f"bench seed: the training failed:\n{last_lines}")
        missing = next((name for name in names if name not in found), None)
        found |= {} if missing is None else {missing: {"error": f"exit code {code}\n{last_lines}"}}
    return found


def _with_measurement(row: dict[str, Any], found: dict[str, Any] | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    if row["problem"] is not None:
        return row
    if found is None or "error" in found:
        return {**row, "problem": "was not run" if found is None else found["error"], "has_failed": True}
    row = {**row, **found, **_speeds("", found["step_s"], row["global_batch"], settings)}
    if "measured_bytes" not in found:
        return {**row, "problem": "the training run recorded no forecast", "has_failed": True}
    row["error"] = found["forecast_bytes"] / found["measured_bytes"] - 1
    return {**row, **_speeds("forecast_", found["forecast_step_s"], row["global_batch"], settings)}


# Table --------------------------------------------------------------------------------------------------------------


def table(result: Mapping[str, Any]) -> RenderableType:
    """Return a table with the measured, forecast and published values of each configuration. The table fits into 80
    columns."""
    lines = result["lines"]
    first = lines[0]
    model = MODELS[result["model"]]
    sizes = f"{first.get('num_parameters') or 0:,} parameters, {first['ranks']} ranks, {first['hardware']}"
    hardware = {line["published"]["hardware"] for line in lines if line["published"]}
    shown = Table(
        title=f"{result['model']}, {result['size']}: {sizes}",
        caption=f"article: {model.text}\npublished values: {', '.join(hardware) or 'none'}; torch {first['torch']}",
        box=box.SIMPLE_HEAD,
    )
    for name in ("configuration", ""):
        shown.add_column(name)
    for name in ("measured", "forecast", "published"):
        shown.add_column(name, justify="right")
    for line in lines:
        published = line["published"] or {}
        is_occupied = published.get("meter") == "occupied" and line["measured_bytes"] is None
        forecast_mib = _mib(line.get("forecast_bytes"), CONTEXT_MIB if is_occupied else 0)
        own = ("epoch_s", "samples_per_s")
        epochs, speeds = ([line[each], line.get(f"forecast_{each}"), published.get(each)] for each in own)
        rows = [
            ("MiB", _mib(line["measured_bytes"]), forecast_mib, _number(published.get("memory_mib"))),
            ("epoch", *map(_seconds, epochs)),
            ("samples/s", *map(_number, speeds)),
        ]
        name = line["configuration"]
        for quantity, *cells in rows:
            if any(cells) or quantity == "MiB":
                shown.add_row(name, quantity, *cells)
                name = ""
        if line["problem"] is not None:
            shown.add_row(f"  {line['problem'].splitlines()[0]}")
        elif line.get("forecast_fits") is False:
            shown.add_row(f"  does not fit on {line['hardware']}")
    return shown


def _mib(num_bytes: float | None, more_mib: float = 0) -> str:
    return "" if num_bytes is None else f"{num_bytes / 2**20 + more_mib:,.1f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"


def _seconds(value: float | None) -> str:
    return "" if value is None else format_seconds(value)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
