"""Process-wide settings that a run changes and restores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from roomier.core.log import notice
from roomier.plan import Plan
from roomier.precision.policy import matmul_precision
from roomier.run.options import LoopOptions


@contextmanager
def process_settings(plan: Plan, options: LoopOptions) -> Iterator[None]:
    """Apply matmul precision, determinism, cuDNN benchmarking and anomaly detection inside the context."""
    with ExitStack() as stack:
        stack.enter_context(matmul_precision(plan.precision.matmul))
        if options.deterministic is not None:
            stack.enter_context(_deterministic(options.deterministic))
        if options.benchmark is not None:
            stack.enter_context(_benchmark(options.benchmark))
        if options.detect_anomaly:
            stack.enter_context(torch.autograd.set_detect_anomaly(True))
        yield


@contextmanager
def _deterministic(wanted: bool | str) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    before_warn = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(bool(wanted), warn_only=wanted == "warn")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=before_warn)


@contextmanager
def _benchmark(wanted: bool) -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = wanted
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@contextmanager
def profiled(profiler: object, folder: Path | None) -> Iterator[torch.profiler.profile | None]:
    """Run the profiler inside the context.

    Args:
        profiler: the profiler to use. ``"torch"`` writes a trace of a few early steps to ``<run>/profile``. A
            ``torch.profiler.profile`` is used unchanged. None disables profiling.

    Yields:
        The profiler, whose ``step`` must be called after each optimizer step; None if no profiler is used.
    """
    if profiler is None:
        yield None
        return
    if profiler == "torch":
        if folder is None:
            notice("profiler='torch': this run has no folder (logger=False or fast_dev_run), so no trace is written")
        profiler = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1),
            on_trace_ready=_write_trace(folder),
            profile_memory=True,
        )
    assert isinstance(profiler, torch.profiler.profile), "LoopOptions accepted an invalid profiler"
    with profiler:
        yield profiler


def _write_trace(folder: Path | None):  # type: ignore[no-untyped-def]
    def write(profile: torch.profiler.profile) -> None:
        if folder is None:
            return
        (folder / "profile").mkdir(exist_ok=True)
        path = folder / "profile" / f"trace-step={profile.step_num}.json"
        profile.export_chrome_trace(str(path))
        notice(f"profile written to {path}")

    return write
