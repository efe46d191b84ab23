"""The benchmarks of ``roomier bench``, each in a separate file. Importing this module does not import the
benchmarks."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, cast

from rich.console import RenderableType


class CaseModule(Protocol):
    """Functions that the module of a benchmark must define."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the options of this benchmark."""

    def measure(self, options: argparse.Namespace) -> dict[str, Any]:
        """Run the benchmark.

        Returns:
            The data of one JSON object. If the data contains a list ``"lines"``, its items are printed instead, one
            object per line. If the list ``"failed"`` in the data is not empty, the command ends with exit code 1. The
            function must not write to standard output.
        """

    def table(self, result: Mapping[str, Any]) -> RenderableType:
        """Return ``result`` as a table for a terminal."""


@dataclass(frozen=True)
class Case:
    """A benchmark.

    Attributes:
        summary: one-line description for the list of benchmarks.
        module: import path of a module that implements :class:`CaseModule`.
    """

    summary: str
    module: str

    def load(self) -> CaseModule:
        """Import the module of the benchmark."""
        return cast(CaseModule, import_module(self.module))


CASES: dict[str, Case] = {
    "overhead": Case(
        "time of a step of the Trainer compared with the same step in a bare PyTorch loop", "roomier.bench.overhead"
    ),
    "levers": Case(
        "time and memory of each single-device lever, compared with the Hugging Face Trainer", "roomier.bench.levers"
    ),
    "optimizers": Case("loss, memory and time of low-bit optimizers, compared with AdamW", "roomier.bench.optimizers"),
    "planner": Case("forecast and measured peak memory of a step", "roomier.bench.planner"),
    "offload": Case(
        "time and memory of optimizer states on disk, compared with all states in memory", "roomier.bench.offload"
    ),
    "seeds": Case(
        "memory published by four articles, compared with the forecast of the same training", "roomier.bench.seeds"
    ),
    "seed": Case(
        "training of a model from these articles: memory and time, compared with published values and the forecast",
        "roomier.bench.seed.case",
    ),
    "choice": Case(
        "the choice of strategy='auto', compared with measurements of all plans that fit", "roomier.bench.choice"
    ),
    "gpu": Case("memory, speed and copies on an accelerator, compared with forecasts", "roomier.bench.gpu.case"),
    "strategies": Case("memory and step time of each strategy, compared with PyTorch DDP", "roomier.bench.strategies"),
    "drift": Case("overhead and strategies of this checkout, compared with an earlier commit", "roomier.bench.drift"),
}
