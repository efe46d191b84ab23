"""``python -m benchmarks overhead``: step time of the Trainer compared with the step time of a bare PyTorch loop."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import RenderableType

import roomier
from benchmarks import toy
from benchmarks.calls import CallCount, FrameCount, folder_of
from benchmarks.machine import circumstances
from benchmarks.options import at_least, table_of
from benchmarks.timing import Cost, Stamps, interleave, median, median_difference, one_thread, quartiles_of_difference
from benchmarks.toy import Lightning
from roomier.api.callback import Callback
from roomier.trainer import Trainer

# the time of one self.log is one tenth of the time of ten calls, which reduces the noise by the same factor
NUM_LOGGED = 10
_NUM_CALLBACKS = 50
LOG_INTERVAL = 50  # default of log_every_n_steps: times and calls are counted over complete intervals
_FIRST_COUNTED, _LAST_COUNTED = LOG_INTERVAL, 3 * LOG_INTERVAL


class IdleCallback(Callback):
    """A callback that overrides no hook."""


class EmptyCallback(Callback):
    """A callback that overrides one hook with an empty function."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--steps", type=at_least(4 * LOG_INTERVAL), default=1000, help="steps per block (%(default)s)")
    parser.add_argument("--repeats", type=at_least(1), default=15, help="blocks per kind (%(default)s)")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark. Values whose names end with ``_us`` are microseconds per step, and values whose names end with
    ``_s`` are seconds."""
    batches = toy.toy_batches(options.steps)
    lightning = toy.load_lightning()
    facts = circumstances()
    with one_thread():
        settings = toy.run_trainer(batches, Stamps())
        samples = interleave(_blocks(batches, lightning), options.repeats)
        wall = {name: [cost.wall_us for cost in costs] for name, costs in samples.items()}
        cpu = {name: [cost.cpu_us for cost in costs] for name, costs in samples.items()}
        result = {
            "case": "overhead",
            "bare_us": median(wall["bare"]),
            **figures_of("trainer", wall, cpu),
            "idle_callback_us": median_difference(cpu["trainer_50_idle"], cpu["trainer"], _NUM_CALLBACKS),
            "empty_hook_us": median_difference(cpu["trainer_50_empty"], cpu["trainer"], _NUM_CALLBACKS),
            **_count(toy.run_trainer, batches, Trainer.fit, roomier),
            **import_times(min(options.repeats, 5)),
        }
        if lightning is not None:
            result["lightning"] = {
                "version": lightning.version,
                **figures_of("lightning", wall, cpu),
                "idle_callback_us": median_difference(cpu["lightning_50_idle"], cpu["lightning"], _NUM_CALLBACKS),
                **_count(lightning.run, batches, lightning.fit, lightning.package),
                **import_times(min(options.repeats, 5), lightning.import_line),
            }
            result["lightning_module"] = figures_of("adapted", wall, cpu)
    return {
        **result,
        "model": toy.MODEL_TEXT,
        "trainer": settings,
        "steps": options.steps,
        "repeats": options.repeats,
        "samples_wall_us": wall,
        "samples_cpu_us": cpu,
        **facts,
    }


def _blocks(batches: list[toy.Batch], peer: Lightning | None) -> dict[str, Callable[[], Cost]]:
    blocks = {
        "bare": timed(toy.run_bare, batches),
        "trainer": timed(toy.run_trainer, batches),
        "trainer_10_logs": timed(toy.run_trainer, batches, num_logged=NUM_LOGGED),
        "trainer_50_idle": timed(toy.run_trainer, batches, callbacks=_many(IdleCallback)),
        "trainer_50_empty": timed(toy.run_trainer, batches, callbacks=_many(EmptyCallback)),
    }
    if peer is not None:
        blocks["lightning"] = timed(peer.run, batches)
        blocks["lightning_10_logs"] = timed(peer.run, batches, num_logged=NUM_LOGGED)
        blocks["lightning_50_idle"] = timed(peer.run, batches, num_callbacks=_NUM_CALLBACKS)
        blocks["adapted"] = timed(peer.run_adapted, batches)
        blocks["adapted_10_logs"] = timed(peer.run_adapted, batches, num_logged=NUM_LOGGED)
    return blocks


def timed(run: Callable[..., Any], batches: list[toy.Batch], **settings: Any) -> Callable[[], Cost]:
    """Return a function that calls ``run(batches, probe, **settings)`` and returns the cost of a step."""

    def block() -> Cost:
        stamps = Stamps()
        run(batches, stamps, **settings)
        return stamps.cost(num_warmup=LOG_INTERVAL, period=LOG_INTERVAL)

    return block


def figures_of(who: str, wall: Mapping[str, list[float]], cpu: Mapping[str, list[float]]) -> dict[str, Any]:
    """Return the overhead of the loop ``who`` compared with the bare loop, and the time of one ``self.log``.

    The time of ``self.log`` is a small difference between two large times, so it is measured as CPU time, which
    is less noisy than wall time.
    """
    return {
        "trainer_us": median(wall[who]),
        "overhead_us": median_difference(wall[who], wall["bare"]),
        "overhead_quartiles_us": quartiles_of_difference(wall[who], wall["bare"]),
        "overhead_cpu_us": median_difference(cpu[who], cpu["bare"]),
        "log_us": median_difference(cpu[f"{who}_10_logs"], cpu[who], NUM_LOGGED),
    }


def _count(run: Callable[..., Any], batches: list[toy.Batch], fit: Any, *packages: Any) -> dict[str, Any]:
    """Return the frames between ``fit`` and ``training_step``, and the calls per step, in the code of ``packages``."""
    folders = tuple(map(folder_of, packages))
    frames = FrameCount(fit.__code__, folders, at_index=_FIRST_COUNTED)
    run(batches, frames)
    calls = CallCount(folders, _FIRST_COUNTED, _LAST_COUNTED)
    run(batches, calls)
    return {"frames_to_training_step": len(frames.frames), "frames": frames.frames, "calls_per_step": calls.per_step}


def import_times(num_processes: int, import_line: str = "from roomier import Trainer") -> dict[str, float]:
    """Return the seconds to import torch, and to import a Trainer after torch: medians over fresh processes."""
    code = (
        f"from time import perf_counter as now; a = now(); import torch; b = now(); {import_line}; "
        "print(b - a, now() - b)"
    )
    runs = [
        subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True).stdout.split()
        for _ in range(num_processes)
    ]
    torch_s, trainer_s = (median([float(text) for text in column]) for column in zip(*runs, strict=True))
    return {"import_s": trainer_s, "import_torch_s": torch_s}


def table(result: Mapping[str, Any]) -> RenderableType:
    """Return a table with one line for each value, and a column for Lightning if it is installed."""
    lightning, adapted = result.get("lightning"), result.get("lightning_module")
    low, high = result["overhead_quartiles_us"]
    rows = [
        ("step of the bare loop", "bare_us", "µs"),
        ("step of the Trainer", "trainer_us", "µs"),
        ("overhead per step", "overhead_us", "µs"),
        ("overhead per step, CPU time", "overhead_cpu_us", "µs"),
        ("one self.log", "log_us", "µs"),
        ("a callback without overridden hooks", "idle_callback_us", "µs"),
        ("a callback with one empty hook", "empty_hook_us", "µs"),
        ("library frames from fit to training_step", "frames_to_training_step", ""),
        ("library calls per step", "calls_per_step", ""),
        ("import over torch", "import_s", "s"),
    ]
    caption = (
        f"median of {result['repeats']} x {result['steps']} interleaved steps; quartiles of the overhead: "
        f"{low:.1f} to {high:.1f} µs"
    )
    peers = [] if lightning is None else [f"lightning {lightning['version']}", "its module in roomier"]
    found = table_of(result, "overhead of a training step", caption, ("",), ("roomier", *peers))
    for label, key, unit in rows:
        cells = [_shown(result[key], unit)]
        if lightning is not None:
            cells += [_shown(figures.get(key), unit) for figures in (lightning, adapted or {})]
        found.add_row(label, *cells)
    return found


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    return f"{value:.3g} {unit}".rstrip() if unit else f"{value:g}"


def _many(kind: type[Callback]) -> list[Callback]:
    return [kind() for _ in range(_NUM_CALLBACKS)]
