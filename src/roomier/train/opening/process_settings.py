"""Process-wide settings that a run changes and restores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from roomier.plan import Plan
from roomier.run.options import LoopOptions
from roomier.techniques.precision.policy import matmul_precision


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
