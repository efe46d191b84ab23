"""Train PyTorch models that exceed the available memory, with one Trainer, one strategy flag and a Plan."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from roomier.api import provided as _provided
from roomier.core import start_folder as start_folder  # recorded before the script changes the working directory

if TYPE_CHECKING:
    from roomier.api.callback import Callback
    from roomier.api.datamodule import DataModule
    from roomier.api.logger import Logger
    from roomier.api.module import Module
    from roomier.core.device.rng import seed_everything
    from roomier.core.errors import CheckpointError, DataError, PlanError, RoomierError, TrainingError
    from roomier.plan import Plan
    from roomier.prepared.accelerator import Accelerator
    from roomier.prepared.prepare import prepare
    from roomier.trainer import Trainer

__version__ = version("roomier")

_FOLDERS = ("adapters", "callbacks", "checkpoint", "data", "loggers", "memory", "models", "tuner")

# Imported on first use, so that creating a Plan or printing the command's help does not wait for the import of torch.
_HOMES = {
    "Accelerator": "roomier.prepared.accelerator",
    "Callback": "roomier.api.callback",
    "CheckpointError": "roomier.core.errors",
    "DataError": "roomier.core.errors",
    "DataModule": "roomier.api.datamodule",
    "Logger": "roomier.api.logger",
    "Module": "roomier.api.module",
    "Plan": "roomier.plan",
    "PlanError": "roomier.core.errors",
    "RoomierError": "roomier.core.errors",
    "Trainer": "roomier.trainer",
    "TrainingError": "roomier.core.errors",
    "prepare": "roomier.prepared.prepare",
    "seed_everything": "roomier.core.device.rng",
}

_provided.homes.update(
    load_module="roomier.checkpoint.module",
    load_datamodule="roomier.checkpoint.module",
    export_onnx="roomier.checkpoint.export.onnx",
    export_torchscript="roomier.checkpoint.export.torchscript",
)


def __getattr__(name: str) -> Any:
    if name in _FOLDERS or name in ("plugins", "strategies"):  # these two modules contain only an error
        return import_module(f"roomier.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_FOLDERS})


__all__ = [
    "Accelerator",
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
