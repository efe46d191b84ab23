"""The parts of ``python -m benchmarks gpu``, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from roomier.core.device.resolve import resolve_device

SIZES = ("tiny", "full")
"""``"full"`` is for GPUs. ``"tiny"`` takes seconds on a CPU, and its values have no meaning."""

Values = dict[str, Any]
Rows = Mapping[str, Callable[[], Values]]
"""Mapping from the name of a row to a function that measures the row and returns JSON data. If the device lacks a
required capability, the data contains only the key ``"unsupported"`` with the reason."""


@dataclass(frozen=True)
class Setting:
    """The size of the models, and the device.

    Attributes:
        size: one of :data:`SIZES`.
        accelerator: value of ``Trainer(accelerator=...)``.
    """

    size: str
    accelerator: str

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return resolve_device(self.accelerator)


@dataclass(frozen=True)
class Part:
    """A part of the benchmark.

    Attributes:
        module: import path of a module with the functions ``rows(setting)``, which returns the rows, the most important
            rows first, and ``summary(values)``, which returns one line of text for the values of a measured row.
        limit_s: seconds after which the process of the part is stopped.
        tiny_limit_s: the same limit for the size ``"tiny"``. Only a part that hangs reaches this limit.
    """

    module: str
    limit_s: float
    tiny_limit_s: float = 240.0

    def limit_of(self, size: str) -> float:
        """Return the time limit in seconds."""
        return self.tiny_limit_s if size == "tiny" else self.limit_s


# The limits add up to 9 minutes, which leaves 3 of the 12 minutes of `make gpu` for its device tests.
PARTS: dict[str, Part] = {
    "copies": Part("benchmarks.gpu.copies", 25),
    "planner": Part("benchmarks.gpu.planner", 130),
    "mfu": Part("benchmarks.gpu.mfu", 150),
    "levers": Part("benchmarks.gpu.levers", 150),
    "strategies": Part("benchmarks.gpu.strategies", 55),
    "overhead": Part("benchmarks.gpu.overhead", 30),
}
