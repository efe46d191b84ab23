"""Measurements of this machine in one process: matrix products, memory, copies, operations, and updates.

Each measurement takes about the given number of seconds and returns the second-best result of its repetitions, because
other programs slow down some repetitions, and a clock adjustment can make one appear too fast.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from roomier.core.device.capability import capabilities_of
from roomier.core.device.memory import available_bytes
from roomier.core.device.streams import synchronize
from roomier.techniques.precision.policy import matmul_precision

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_SMALLEST, _LARGEST = 128, 8192  # number of rows of a matrix
_IS_LONG_S = 0.02  # for longer products, the launch overhead is negligible


def product_rate(dtype: str, device: torch.device, seconds: float) -> float | None:
    """Return the highest rate of square matrix products in FLOP/s; None if the device does not support the dtype.

    Args:
        dtype: one of ``DTYPES``.
        device: device to measure.
        seconds: approximate duration of the measurement.
    """
    if dtype == "tf32" and device.type != "cuda":
        return None
    deadline = time.perf_counter() + seconds
    with matmul_precision("high" if dtype == "tf32" else "highest"):
        best, size = 0.0, _SMALLEST
        while True:
            try:
                a, b, out = (torch.full((size, size), 0.5, dtype=DTYPES[dtype], device=device) for _ in range(3))
            except (TypeError, RuntimeError):  # mps does not support float64, and memory can be full
                return best or None
            took = _typical_seconds(partial(torch.mm, a, b, out=out), device, seconds / 16)
            best = max(best, 2 * size**3 / took)
            # The next product takes about 8 times as long and runs at least 3 times.
            is_over = size > _SMALLEST and time.perf_counter() + 24 * took > deadline
            if is_over or took > _IS_LONG_S or size >= _LARGEST:
                return best
            size *= 2


def memory_rate(device: torch.device, seconds: float, num_bytes: int | None = None) -> float:
    """Return the combined read and write rate of a copy of ``num_bytes``, in bytes per second.

    The default is 128 MiB, or 16 MiB on a CPU, because most of the data of a model that is trained on a CPU fits in its
    caches (a core of an Intel Xeon copied 25 GB/s with up to 16 MiB, and 9 to 12 GB/s with 64 MiB), and because other
    programs interrupt a long copy on busy cores.
    """
    if num_bytes is None:
        num_bytes = 2**24 if device.type == "cpu" else _fitting(2**27, device)
    source = torch.ones(num_bytes // 4, device=device)  # zeros would map to one page of memory
    target = torch.ones_like(source)
    return 2 * source.nbytes / _typical_seconds(lambda: target.copy_(source), device, seconds)


def host_copy_rate(device: torch.device, seconds: float, num_bytes: int = 2**27) -> float:
    """Return the rate of copies from pinned host memory to ``device``, in bytes per second."""
    num_bytes = _fitting(num_bytes, device)
    source = torch.ones(num_bytes // 4, pin_memory=True)
    target = torch.ones(num_bytes // 4, device=device)
    return source.nbytes / _typical_seconds(lambda: target.copy_(source, non_blocking=True), device, seconds)


def operation_seconds(device: torch.device, seconds: float, num_operations: int = 500) -> float:
    """Return the time in seconds that the host needs to launch one trivial operation with autograd."""
    small = torch.zeros(8, device=device, requires_grad=True)

    def run() -> None:
        result = small
        for _ in range(num_operations):
            result = result + 1.0

    return _typical_seconds(run, device, seconds) / num_operations


def update_rate(device: torch.device, seconds: float, num_parameters: int = 2**24) -> float:
    """Return the rate of an AdamW update in bytes per second, counting 4 numbers read and 3 written per parameter.

    A device without fused optimizers runs separate kernels, so its update rate is lower than its memory bandwidth.
    """
    # 16 bytes per parameter: the value, the gradient and two states in float32.
    num_parameters = _fitting(16 * num_parameters, device) // 16
    parameters = [torch.nn.Parameter(torch.ones(num_parameters // 4, device=device)) for _ in range(4)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    is_fused = "adamw" in capabilities_of(device).fused_optimizers
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=is_fused)
    num_bytes = 7 * sum(parameter.nbytes for parameter in parameters)
    return num_bytes / _typical_seconds(optimizer.step, device, seconds)


RATES = {
    "memory_bytes_per_s": (memory_rate, 1 / 8),
    "operation_s": (operation_seconds, 1 / 16),
    "update_bytes_per_s": (update_rate, 1 / 8),
    "host_bytes_per_s": (host_copy_rate, 1 / 8),
}
"""Measurements of one rank without communication, by name, each with its share of the available time."""


def _fitting(num_bytes: int, device: torch.device) -> int:
    """Return ``num_bytes``, or fewer bytes if the memory of ``device`` is almost full, for example after an
    out-of-memory error."""
    available = available_bytes(device)
    return num_bytes if available is None else max(2**20, min(num_bytes, available // 4))


def _typical_seconds(run: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Return the second-shortest time of ``run`` in seconds. After a warm-up, ``run`` is repeated until ``seconds``
    have passed, but at least three times. If the warm-up takes longer than ``seconds``, ``run`` is repeated only once,
    and the shorter time of the two is returned."""
    start = time.perf_counter()
    first = seconds_of(run, device)
    if first > seconds:
        return min(first, seconds_of(run, device))
    took: list[float] = []
    while len(took) < 3 or time.perf_counter() < start + seconds:
        took.append(seconds_of(run, device))
    return sorted(took)[1]


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Call ``run``, and return the time in seconds until ``device`` has finished all work."""
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return max(time.perf_counter() - start, 1e-9)
