"""Measurements of time, in which the host waits for the device before it reads the clock."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import benchmarks.gpu.copies as copies_part
import benchmarks.gpu.mfu as mfu_part
import benchmarks.strategies
import roomier.planner.hardware.measure
import roomier.techniques.activation.profile
from benchmarks.lever_worker import Measurement
from benchmarks.seed.case import StepTimes
from benchmarks.strategies import Strategy
from benchmarks.training import ignore
from roomier.callbacks.straggler_monitor import StragglerMonitor
from roomier.callbacks.throughput import Throughput
from roomier.core.device import capability
from roomier.core.device.streams import synchronize, timed_event
from roomier.core.log import quiet
from roomier.core.ranks import Ranks
from roomier.techniques.activation.copies import Copies
from roomier.techniques.activation.disk_copies import DiskCopies
from roomier.techniques.tiers.scratch import Scratch
from tests.device.mutant_scenario import DEVICE, device, pending


def measured_seconds() -> list[Any]:
    roomier.planner.hardware.measure.seconds_of(pending, device())
    return []


def measured_host_copies() -> list[Any]:
    roomier.planner.hardware.measure.host_copy_rate(device(), 0.0, 4096)
    return []


def measured_collectives() -> list[Any]:
    benchmarks.strategies._seconds(pending, device())
    return []


def measured_offload() -> list[Any]:
    Copies(device())._finished_ns()
    return []


def measured_disk() -> list[Any]:
    """A measurement of copies to disk ends after the transfers."""
    folder = Path(tempfile.mkdtemp(prefix="mutant-"))
    with quiet():
        copies = DiskCopies(device(), Scratch(folder))
    copies.times()
    found = [job.is_done for job in (copies._write, copies._read and copies._read.job) if job is not None]
    copies.close()
    shutil.rmtree(folder)
    return found


def measured_bandwidth() -> list[Any]:
    setting = SimpleNamespace(device=device(), accelerator=DEVICE)
    row = copies_part._row("host to device pinned", 4096, setting)  # type: ignore[arg-type]
    return [row["kind"]]


def measured_turn() -> list[Any]:
    mfu_part._turn_s(lambda: None, 2, device())
    return []


def measured_lever() -> list[Any]:
    network = nn.Linear(2, 2).to(DEVICE)
    measurement = Measurement(2)
    while not measurement.end_step(network, []):
        pass
    return []


def measured_strategy() -> list[Any]:
    def step(enter: Callable[[str], None] = ignore) -> Tensor:
        enter("update")
        return torch.tensor(0.0)

    @contextmanager
    def running(keeps: bool) -> Iterator[Any]:
        yield SimpleNamespace(step=step)

    holder = SimpleNamespace(
        _running=running, _keeps=False, _device=device(), step_s=[], passes_s=[], busy_s=[], _ranks=Ranks(), loss=0.0
    )
    Strategy.time_turn(holder, 2)  # type: ignore[arg-type]
    return []


def recorded_profile() -> list[Any]:
    recorder = roomier.techniques.activation.profile.Recorder([], device())
    recorder.start()
    recorder.stop()
    return []


def logged_throughput() -> list[Any]:
    callback = Throughput()
    callback._device, callback._began_s = device(), time.monotonic()
    callback._log(SimpleNamespace(ranks=Ranks(), world_size=1, log_metrics=lambda rates: None))
    return []


def measured_step_times() -> list[Any]:
    loss = {"loss": torch.zeros(())}
    StepTimes(device()).on_train_batch_end(SimpleNamespace(global_step=1), None, loss, None, 0)
    return []


def measured_stragglers() -> list[Any]:
    callback = StragglerMonitor()
    callback._device = device()
    callback._hooks = [torch.nn.Identity().register_forward_hook(lambda *_: None)]
    callback.on_train_batch_end(SimpleNamespace(global_step=1, log_every_n_steps=1, ranks=Ranks()), None)
    return []


def measured_events() -> list[Any]:
    start, end = timed_event(device()), timed_event(device())
    synchronize(device())
    return [start.elapsed_time(end) >= 0]


def tried_capabilities() -> list[Any]:
    capability._tried.cache_clear()
    return [capability.capabilities_of(device()).has_pinned_memory]
