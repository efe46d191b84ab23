"""The benchmarks of ``python -m benchmarks``, each in a separate file. Importing this module does not import the
benchmarks."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

CASES = {
    "overhead": "time of a step of the Trainer compared with the same step in a bare PyTorch loop",
    "levers": "time and memory of each memory technique on one device, compared with the Hugging Face Trainer",
    "optimizers": "loss, memory and time of low-bit optimizers, compared with AdamW",
    "planner": "forecast and measured peak memory of a step",
    "offload": "time and memory of optimizer states on disk, compared with all states in memory",
    "seeds": "memory published by four articles, compared with the forecast of the same training",
    "seed": "training of a model from these articles: memory and time, compared with published values and the forecast",
    "choice": "the choice of strategy='auto', compared with measurements of all plans that fit",
    "gpu": "memory, speed and copies on an accelerator, compared with forecasts",
    "strategies": "memory and step time of each strategy, compared with PyTorch DDP",
    "upload": "time of a step during an upload to remote storage, compared with a local background save",
    "drift": "overhead and strategies of this checkout, compared with an earlier commit",
}
"""Mapping from the name of each benchmark to its description."""


def load(name: str) -> ModuleType:
    """Import the module of the benchmark ``name``.

    The module defines three functions:

    - ``add_arguments(parser)`` adds the options of the benchmark;
    - ``measure(options)`` returns the data of one JSON object. If the data contains a list ``"lines"``, its items are
      printed instead, one object per line. If the list ``"failed"`` in the data is not empty, the command ends with
      exit code 1. The function must not write to standard output;
    - ``table(result)`` returns the result as a table for a terminal.
    """
    return import_module(f"benchmarks.{name}{'.case' if name in ('seed', 'gpu') else ''}")
