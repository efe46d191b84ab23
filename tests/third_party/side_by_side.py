"""Runs of third-party projects with Lightning's Trainer and with roomier's Trainer."""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from roomier import Trainer

if importlib.util.find_spec("torchvision") is not None:
    # torchvision from PyPI is built for CUDA. With a CPU build of torch, the operators of torchvision are not
    # available, and its import requires the declaration of two operators.
    with contextlib.suppress(RuntimeError):
        VISION_OPERATORS = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            VISION_OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning.pytorch as pl

SEPARATE = "requires {name} in a separate environment: python tests/third_party/each_project.py {name}"


def quiet_trainer(kind: Any, folder: Path, **keywords: Any) -> Any:
    """Return a Trainer of class ``kind`` that writes no files and prints no output."""
    quiet = {f"enable_{what}": False for what in ("checkpointing", "progress_bar", "model_summary")}
    return kind(**{"accelerator": "cpu", "logger": False, "default_root_dir": folder, **quiet, **keywords})


def both(
    make: Callable[[], tuple[Any, dict[str, Any]]], folder: Path, library: Any = pl, **keywords: Any
) -> list[tuple[Any, Any]]:
    """Fit the module and data that ``make`` returns under Lightning and under roomier, with equal seeds.

    Args:
        library: ``"lightning.pytorch"``, or ``"pytorch_lightning"`` for modules of this package.
    """
    runs = []
    for kind in (library.Trainer, Trainer):
        pl.seed_everything(0, verbose=False)
        module, data = make()
        pl.seed_everything(1, verbose=False)
        trainer = quiet_trainer(kind, folder, **keywords)
        trainer.fit(module, **data)
        runs.append((trainer, module))
    return runs


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest absolute difference between two state dicts with equal names."""
    assert one.keys() == other.keys()
    pairs = [(one[name], other[name]) for name in one if one[name].is_floating_point() and one[name].numel()]
    return max(float((own - expected).abs().max()) for own, expected in pairs)
