"""``python -m benchmarks offload``: time and memory of optimizer states on disk, compared with the same training
without offload.

The result is one JSON object: the settings, and the following keys.

- ``resident_s``: median time of a step without offload.
- ``modes``: for each update mode: ``step_s``, the median time of a step; ``bytes_read`` and ``bytes_written`` per step;
  ``raw_io_s``, the time of the same transfers without the tier, in one reading and one writing thread, while the
  machine runs no computation; ``overlap_ratio``, which is ``step_s`` divided by the larger of ``resident_s`` and
  ``raw_io_s``; ``formula_ratio``, which is ``step_s`` divided by the planner's formula for the measured durations.
- ``disk_read_ratio``, ``disk_write_ratio`` and ``disk_both_ratio``: speed of the tier's reads and writes relative to
  the same transfers without the tier, while the machine runs no computation; ``under_load``: the same ratios while each
  core multiplies matrices.
- ``memory``: with ``--memory``, the largest peak resident memory of all ranks, in fresh processes: without offload,
  with optimizer states on disk, and with optimizer states and parameters on disk.

Steps of all modes and steps without offload alternate, so that load on the machine affects all of them equally.
Gradients are clipped by norm with a limit that no gradient exceeds, so speculative updates are accepted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import fields
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import RenderableType
from rich.table import Table
from torch import Tensor

from benchmarks.machine import circumstances, resident_bytes, restart_peak
from benchmarks.rank_processes import run_on_ranks
from roomier.core.host_memory import give_back_freed
from roomier.engine.offloaded_updates import OffloadedUpdates
from roomier.engine.prepared import PreparedEngine
from roomier.models.gpt import GPT, GPTConfig
from roomier.plan import OffloadPlan, plan_from_flags
from roomier.planner.timing.step_time import Durations, waits_s
from roomier.prepared.prepare import prepare
from roomier.techniques.tiers.buffers import ALIGNMENT_BYTES, allocate
from roomier.techniques.tiers.disk import DiskTier
from roomier.techniques.tiers.scratch import Scratch

MEMORY_ROWS: dict[str, tuple[str, ...]] = {
    "none": (),
    "disk": ("optimizer_states",),
    "disk, with parameters": ("optimizer_states", "parameters"),
}
"""Rows of ``--memory``: the parts of the model states that are on disk."""
MODES = ("plain", "deferred", "speculative")
_CONTEXT = 128  # tokens per sequence
# With its default settings, glibc retains freed memory, so the peak would depend on the order of the allocations.
_RETURNS_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
_MEMORY_SETTINGS = ("ranks", "strategy", "communication", "buffers", "update")
_RECORD_BYTES, _NUM_RECORDS = 2**26, 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--width", type=int, default=1024, help="width of the GPT (%(default)s)")
    parser.add_argument("--layers", type=int, default=6, help="number of layers of the GPT (%(default)s)")
    parser.add_argument("--vocab", type=int, default=4096, help="size of the vocabulary (%(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per step (%(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each mode (%(default)s)")
    parser.add_argument("--folder", default=None, help="folder of the disk tier; by default a temporary folder")
    parser.add_argument("--memory", action="store_true", help="measure the peak memory of ranks instead of times")
    parser.add_argument("--update", choices=MODES, default="deferred", help="update mode with --memory (%(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks with --memory (%(default)s)")
    parser.add_argument("--strategy", default="zero3", help="strategy with --memory (%(default)s)")
    parser.add_argument("--communication", default="overlapped", help="communication with --memory (%(default)s)")
    parser.add_argument("--buffers", type=int, default=3, help="buffers of the disk tier with --memory (%(default)s)")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure step times and the speed of the disk. With ``--memory``, measure the peak memory of ranks instead."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        facts = {**circumstances(), "settings": _settings(options)}
        if options.memory:
            return {**facts, "memory": {name: _peaks(options, folder, name) for name in MEMORY_ROWS}}
        return {**facts, **_times(options, folder)}


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    names = ("width", "layers", "vocab", "tokens", "steps", *(_MEMORY_SETTINGS if options.memory else ()))
    return {name: getattr(options, name) for name in names}


def model_of(width: int, layers: int, vocab: int) -> GPT:
    """Return the GPT of the benchmark, with equal initial weights in each call."""
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab, _CONTEXT, layers, max(1, width // 64), width, dropout=0.0))


def batch_of(num_tokens: int, vocab: int) -> Tensor:
    """Return token ids with the shape ``[sequences, tokens + 1]``."""
    length = min(num_tokens, _CONTEXT)
    generator = torch.Generator().manual_seed(1)
    return torch.randint(vocab, (max(1, num_tokens // length), length + 1), generator=generator)


class _Training:
    """Training run whose steps are timed one at a time.

    Args:
        options: parsed command-line options of the benchmark.
        offload: offload settings of the plan; None keeps all tensors in memory.
    """

    def __init__(self, options: argparse.Namespace, offload: Mapping[str, Any] | None) -> None:
        self._network = model_of(options.width, options.layers, options.vocab)
        plan = plan_from_flags(
            accelerator="cpu", optimizer={"name": "adamw", "lr": 1e-4}, gradient_clip_val=1e9, offload=offload
        )
        self._engine: PreparedEngine = prepare(self._network, plan=plan)
        self._batch = batch_of(options.tokens, options.vocab)
        self.loss: Tensor | None = None
        self._after_forward_s = 0.0

    def step(self) -> Durations:
        """Run one step and return the durations of its parts."""
        start_s = time.perf_counter()
        self.loss = self._engine.forward_backward(self._forward, [self._batch])
        before_update_s = time.perf_counter()
        self._engine.step()
        end_s, forward_s = time.perf_counter(), self._after_forward_s - start_s
        return Durations(forward_s, forward_s, before_update_s - self._after_forward_s, end_s - before_update_s)

    def _forward(self, batch: Tensor) -> Tensor:
        loss: Tensor = self._network(batch[:, :-1], batch[:, 1:])[1]
        self._after_forward_s = time.perf_counter()
        return loss

    @property
    def ring_share(self) -> float:
        """Fraction of the transfers that fills the buffers before the first update."""
        num_units = len(updates._units) if isinstance(updates := self._engine._updates, OffloadedUpdates) else 1
        return min(1.0, OffloadPlan.buffers / num_units) / 2

    def moved_bytes(self) -> tuple[int, int]:
        """Complete the updates and their writes, and return the number of bytes read from and written to the disk."""
        updates = self._engine._updates
        if not isinstance(updates, OffloadedUpdates):
            return 0, 0
        updates.settle()
        tier = updates._states._staging._tier
        return tier.bytes_read, tier.bytes_written

    def close(self) -> None:
        """Free the tier."""
        self._engine.close()


def _times(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    tiers = {mode: {"optimizer_states": "disk", "folder": folder, "update": mode} for mode in MODES}
    trainings = {"resident": _Training(options, None), **{mode: _Training(options, tiers[mode]) for mode in MODES}}
    for _ in range(3):  # the first steps create the states
        for each in trainings.values():
            each.step()
    before = {name: each.moved_bytes() for name, each in trainings.items()}
    steps: dict[str, list[Durations]] = {name: [] for name in trainings}
    for _ in range(options.steps):
        for name, each in trainings.items():
            steps[name].append(each.step())
    moved = {
        name: [(now - earlier) // options.steps for now, earlier in zip(each.moved_bytes(), before[name], strict=True)]
        for name, each in trainings.items()
    }
    losses = {float(each.loss) for each in trainings.values() if each.loss is not None}
    shares = {name: each.ring_share for name, each in trainings.items()}
    num_parameters = sum(each.numel() for each in trainings["resident"]._network.parameters())
    for each in trainings.values():
        each.close()
    disk = _Disk(folder)
    resident = _median_of(steps["resident"])
    resident_s = median(map(_seconds, steps["resident"]))
    modes = {}
    for mode in MODES:
        read, written = moved[mode]
        raw_io_s = disk.raw_s(read, written)
        step_s = median(map(_seconds, steps[mode]))
        formula_s = resident_s + waits_s(mode, raw_io_s, shares[mode], resident)
        modes[mode] = {
            "step_s": round(step_s, 4),
            "bytes_read": read,
            "bytes_written": written,
            "raw_io_s": round(raw_io_s, 4),
            "overlap_ratio": round(step_s / max(resident_s, raw_io_s), 3),
            "formula_ratio": round(step_s / formula_s, 3),
        }
    result = {
        "num_parameters": num_parameters,
        "resident_s": round(resident_s, 4),
        "forward_s": round(resident.forward_s, 4),
        "modes": modes,
        **disk.ratios(),
        "under_load": disk.ratios_under_load(),
        "failed": [] if len(losses) == 1 else [f"the losses differ: {sorted(losses)}"],
    }
    disk.close()
    return result


def _seconds(step: Durations) -> float:
    return step.forward_s + step.backward_s + step.update_s


def _median_of(steps: Sequence[Durations]) -> Durations:
    return Durations(*(median(getattr(each, field.name) for each in steps) for field in fields(Durations)))


class _Disk:
    """Transfers between memory and a file, while the machine runs no computation."""

    def __init__(self, folder: str) -> None:
        self._scratch = Scratch(folder)
        self._buffers = [allocate(_RECORD_BYTES, pinned=False).fill_(1) for _ in range(2)]  # as in tiers
        self._tier = DiskTier(self._scratch, [_RECORD_BYTES] * _NUM_RECORDS, 4, pinned=False, closes_scratch=True)
        for record in range(_NUM_RECORDS):
            self._tier.put(record, self._tier.blank(record).fill_(1))
        self._tier.settle()

    def raw_s(self, num_read: int, num_written: int) -> float:
        """Return the time to read ``num_read`` and write ``num_written`` bytes at the same time, in one thread each."""
        return median(self._raw_once_s(num_read, num_written) for _ in range(3))

    def _raw_once_s(self, num_read: int, num_written: int) -> float:
        aligned = [each.numpy() for each in self._buffers]
        flags = os.O_RDWR | (getattr(os, "O_DIRECT", 0) if self._scratch.is_direct else 0)
        file = os.open(self._scratch.path, flags)

        def transfer(call: Callable[..., int], buffer: Any, num_bytes: int) -> None:
            chunk, done = 2**22, 0
            while done < num_bytes:
                position = ALIGNMENT_BYTES + done % (_RECORD_BYTES * (_NUM_RECORDS - 1)) // chunk * chunk
                first = done % _RECORD_BYTES
                done += call(file, [buffer[first : first + chunk]], position)

        with ThreadPoolExecutor(2) as pool:
            start_s = time.perf_counter()
            both = [
                pool.submit(transfer, os.preadv, aligned[0], num_read),
                pool.submit(transfer, os.pwritev, aligned[1], num_written),
            ]
            wait(both)
            elapsed_s = time.perf_counter() - start_s
        os.close(file)
        return elapsed_s

    def ratios(self) -> dict[str, float]:
        """Return the speed of the tier relative to raw transfers: reads, writes, and both at the same time."""
        all_bytes = _RECORD_BYTES * _NUM_RECORDS
        found: dict[str, list[float]] = {"disk_read_ratio": [], "disk_write_ratio": [], "disk_both_ratio": []}
        for _ in range(3):
            for name, read, written in (
                ("disk_read_ratio", all_bytes, 0),
                ("disk_write_ratio", 0, all_bytes),
                ("disk_both_ratio", all_bytes, all_bytes),
            ):
                raw_s = self._raw_once_s(read, written)
                found[name].append(raw_s / self._tier_s(reads=read > 0, writes=written > 0))
        return {name: round(median(values), 3) for name, values in found.items()}

    def ratios_under_load(self) -> dict[str, float]:
        """Return the result of :meth:`ratios`, measured while each core multiplies matrices."""
        ends = threading.Event()

        def multiply() -> None:
            matrix = torch.rand(512, 512)
            while not ends.is_set():
                matrix @ matrix

        with ThreadPoolExecutor(num := os.cpu_count() or 1) as pool:
            for _ in range(num):
                pool.submit(multiply)
            try:
                return self.ratios()
            finally:
                ends.set()

    def _tier_s(self, *, reads: bool, writes: bool) -> float:
        tier, records = self._tier, list(range(_NUM_RECORDS))
        start_s = time.perf_counter()
        if reads:
            tier.expect(records)
        for record in records:
            buffer = tier.take(record) if reads else tier.blank(record)
            if writes:
                tier.put(record, buffer)
            else:
                tier.drop(buffer)
        tier.settle()
        return time.perf_counter() - start_s

    def close(self) -> None:
        """Remove the file."""
        self._tier.close()


def _peaks(options: argparse.Namespace, folder: str, name: str) -> dict[str, Any]:
    tiers = dict.fromkeys(MEMORY_ROWS[name], "disk")
    mode = "deferred" if "parameters" in tiers else options.update
    settings = {
        **_settings(options),
        "strategy": options.strategy if options.ranks > 1 else "single",
        "offload": {**tiers, "folder": folder, "update": mode, "buffers": options.buffers} if tiers else None,
    }
    return run_on_ranks("benchmarks.offload", options.ranks, settings, _RETURNS_FREED_MEMORY)


def table(result: Mapping[str, Any]) -> RenderableType:
    """Return ``result`` as a table for a terminal."""
    if "memory" in result:
        made = Table("optimizer states", "peak memory of a rank", "step")
        for name, each in result["memory"].items():
            made.add_row(name, f"{each['peak_rss_bytes'] / 1e6:.0f} MB", f"{each['step_s']:.3f} s")
        return made
    made = Table("mode", "step", "raw I/O", "ratio to lower bound", "ratio to forecast", "read", "written")
    made.add_row("resident", f"{result['resident_s']:.3f} s")
    for mode, each in result["modes"].items():
        made.add_row(
            mode,
            f"{each['step_s']:.3f} s",
            f"{each['raw_io_s']:.3f} s",
            f"{each['overlap_ratio']:.2f}",
            f"{each['formula_ratio']:.2f}",
            f"{each['bytes_read'] / 1e6:.0f} MB",
            f"{each['bytes_written'] / 1e6:.0f} MB",
        )
    made.caption = (
        f"the tier reads at {result['disk_read_ratio']:.2f} and writes at {result['disk_write_ratio']:.2f} times the "
        "speed of raw transfers"
    )
    return made


_NUM_WARMUP = 2  # steps in which states and buffers are created


def main(folder: Path, settings: dict[str, Any]) -> None:
    """Train, and write the median step time and the largest peak resident memory of all ranks."""
    with torch.device("meta"):  # so that no rank holds the unsharded model
        network = model_of(settings["width"], settings["layers"], settings["vocab"])
    plan = plan_from_flags(
        strategy={"name": settings["strategy"], "communication": settings["communication"]},
        accelerator="cpu",
        devices=settings["ranks"],
        optimizer={"name": "adamw", "lr": 1e-4},
        gradient_clip_val=1.0,
        offload=settings["offload"],
    )
    engine = prepare(network, plan=plan)
    num_parameters = sum(each.numel() for each in network.parameters())
    batch = batch_of(settings["tokens"], settings["vocab"])
    times_s: list[float] = []
    for step in range(_NUM_WARMUP + settings["steps"]):
        if step == _NUM_WARMUP:
            give_back_freed()
            restart_peak()
            times_s.clear()
        start_s = time.perf_counter()
        engine.forward_backward(lambda batch: network(batch[:, :-1], batch[:, 1:])[1], [batch])
        engine.step()
        times_s.append(time.perf_counter() - start_s)
    peaks = engine.ranks.gather(resident_bytes())
    engine.close()
    if engine.ranks.is_zero:
        result = {"peak_rss_bytes": max(peaks), "step_s": round(median(times_s), 4), "num_parameters": num_parameters}
        (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
