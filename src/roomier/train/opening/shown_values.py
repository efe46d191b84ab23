"""Values of a run that loggers and the Trainer show."""

from __future__ import annotations

import math
from typing import Any

from roomier.api.datamodule import DataModule
from roomier.api.lightning_module import logged_hparams_of
from roomier.api.module import Module
from roomier.core.errors import RoomierError
from roomier.data.batch_feeds import length_of
from roomier.data.combined import CombinedLoader
from roomier.run.run import Batches


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
    return {**of_data, **of_module}
