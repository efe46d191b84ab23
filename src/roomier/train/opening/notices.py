"""Notices at the start of a run about settings that may be unintended, and values that loggers and the Trainer show."""

from __future__ import annotations

import math
from typing import Any

from roomier.api.datamodule import DataModule
from roomier.api.hparams import plain_items
from roomier.api.lightning_module import logged_hparams_of
from roomier.api.module import Module, network_of
from roomier.core.batch_norms import BATCH_NORMS
from roomier.core.errors import RoomierError
from roomier.core.log import notice
from roomier.data.batch_feeds import length_of
from roomier.data.combined import CombinedLoader
from roomier.run.options import LoopOptions
from roomier.run.run import Batches


def report_evaluation_mode(module: Module) -> None:
    """Print a notice about modules in evaluation mode.

    Some models are loaded in this mode, and some users set this mode to freeze modules.
    """
    network = network_of(module)
    names = [name or type(network).__name__ for name, each in network.named_modules() if not each.training]
    if names:
        notice(
            f"{len(names)} modules are in evaluation mode and stay in this mode, without dropout (the first: "
            f"{names[0]}). Call model.train() before fit to train them in training mode"
        )


def report_batch_statistics(module: Module, gradients: str) -> None:
    """Print a notice about BatchNorm modules if a batch is split, because they use the statistics of each
    micro-batch."""
    found = [
        name or type(each).__name__
        for name, each in network_of(module).named_modules()
        if isinstance(each, BATCH_NORMS) and each.training
    ]
    if found:
        notice(
            f"{gradients} differ from the gradients of the full batch: {len(found)} BatchNorm modules (the first: "
            f"{found[0]}) use the statistics of each micro-batch. GroupNorm, LayerNorm, and BatchNorm in evaluation "
            "mode do not depend on the micro-batch"
        )


def report_validation_at_unknown_end(options: LoopOptions, interval: float, num_training: float) -> None:
    """Print a notice if validation runs only at the end of the loader.

    Training may end before the end of the loader because of ``max_steps`` or ``max_time``.
    """
    limits = {"max_steps": options.max_steps} if options.max_steps != -1 else {"max_time": options.max_time}
    [(limit, value)] = limits.items()
    if math.isinf(interval) and math.isinf(num_training) and value is not None:
        notice(
            "the training loader has no length, so validation runs only when the loader ends. If "
            f"{limit}={value} ends training earlier, validation does not run. To validate within an epoch, set "
            "val_check_interval to a number of batches"
        )


def num_batches_of_loaders(batches: Batches, limit: float) -> list[float]:
    """Return the number of batches of each loader, counting each loader in a CombinedLoader separately."""
    counts = list[float]()
    for source, num_batches in zip(batches.evaluated, batches.limits, strict=True):
        if not isinstance(source.loader, CombinedLoader):
            counts.append(num_batches)
            continue
        for length in map(length_of, source.loader.flattened):
            is_share = isinstance(limit, float) and limit < 1.0 and math.isfinite(length)
            limited = int(length * limit) if is_share else length if isinstance(limit, float) else min(limit, length)
            counts.append(limited)
    return counts


def hyperparameters_to_log(module: Module, datamodule: DataModule | None) -> dict[str, Any]:
    """Return the hyperparameters of the module and the DataModule.

    Raises:
        RoomierError: the module and the DataModule set a hyperparameter to different values.
    """
    of_module, of_data = module.logged_hparams, {} if datamodule is None else logged_hparams_of(datamodule)
    for name in of_module.keys() & of_data.keys():
        if repr(of_module[name]) != repr(of_data[name]):  # compare repr, because some types do not support ==
            problem = "the module and the DataModule set this hyperparameter to different values"
            action = f"Rename one of them, or exclude one: save_hyperparameters(ignore={name!r})"
            raise RoomierError("hparams", {name: (of_module[name], of_data[name])}, problem, action)
    merged = {**of_data, **of_module}
    return {**merged, **plain_items(merged)}
