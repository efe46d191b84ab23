"""roomier trains PyTorch models that do not fit: one Trainer, one strategy flag, planned before it runs."""

from importlib.metadata import version

from roomier.api.callback import Callback
from roomier.api.datamodule import DataModule
from roomier.api.logger import Logger
from roomier.api.module import Module
from roomier.core.errors import CheckpointError, DataError, PlanError, RoomierError, TrainingError
from roomier.core.rng import seed_everything
from roomier.engine.build import prepare
from roomier.plan import Plan
from roomier.trainer import Trainer

__version__ = version("roomier")

__all__ = [
    "Callback",
    "CheckpointError",
    "DataError",
    "DataModule",
    "Logger",
    "Module",
    "Plan",
    "PlanError",
    "RoomierError",
    "Trainer",
    "TrainingError",
    "__version__",
    "prepare",
    "seed_everything",
]
