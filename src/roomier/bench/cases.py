"""The cases ``roomier bench`` knows. One file each; listing them imports none."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, cast

from rich.console import RenderableType


class CaseModule(Protocol):
    """What the file of a case defines."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """The options of this case."""

    def measure(self, options: argparse.Namespace) -> dict[str, Any]:
        """Run it. What comes back is plain data for one JSON object; nothing is written to standard output."""

    def table(self, result: Mapping[str, Any]) -> RenderableType:
        """``result`` for a reader."""


@dataclass(frozen=True)
class Case:
    """One named measurement.

    Attributes:
        summary: one line for the list of cases.
        module: where it lives; it defines what :class:`CaseModule` says.
    """

    summary: str
    module: str

    def load(self) -> CaseModule:
        return cast(CaseModule, import_module(self.module))


CASES: dict[str, Case] = {
    "overhead": Case(
        "what a step of the Trainer costs above the same step in a bare PyTorch loop", "roomier.bench.overhead"
    ),
    "levers": Case(
        "time and memory of each lever of one device, beside the Hugging Face Trainer", "roomier.bench.levers"
    ),
    "optimizers": Case(
        "loss, memory and time of optimizers with states of few bits, beside AdamW", "roomier.bench.optimizers"
    ),
    "planner": Case("the peak of a step as it is forecast, beside the peak as it is", "roomier.bench.planner"),
    "seeds": Case(
        "memory that four articles published, beside the forecast of the same training", "roomier.bench.seeds"
    ),
    "choice": Case("what strategy='auto' picks, beside all plans that fit, each of them run", "roomier.bench.choice"),
    "strategies": Case("memory and step time of each strategy beside plain PyTorch DDP", "roomier.bench.strategies"),
}
