"""Train PyTorch models that exceed the available memory, with one Trainer, one strategy flag and a Plan."""

from importlib.metadata import version
from typing import TYPE_CHECKING

from roomier.api import provided as _provided
from roomier.core import start_folder as start_folder  # recorded before the script changes the working directory
from roomier.core.late_names import late_names as _late_names

__version__ = version("roomier")

# Imported on first use, so that creating a Plan or printing the command's help does not wait for the import of torch.
_HOMES = {
    "Accelerator": "prepared.accelerator",
    "Callback": "api.callback",
    "CheckpointError": "core.errors",
    "DataError": "core.errors",
    "DataModule": "api.datamodule",
    "Logger": "api.logger",
    "Module": "api.module",
    "Plan": "plan",
    "PlanError": "core.errors",
    "RoomierError": "core.errors",
    "Trainer": "trainer",
    "TrainingError": "core.errors",
    "prepare": "prepared.prepare",
    "seed_everything": "core.device.rng",
}
_FOLDERS = ("adapters", "callbacks", "checkpoint", "data", "loggers", "memory", "models", "tuner")

_provided.homes.update(
    load_module="roomier.checkpoint.module",
    load_datamodule="roomier.checkpoint.module",
    export_onnx="roomier.checkpoint.export.onnx",
    export_torchscript="roomier.checkpoint.export.torchscript",
)

__all__ = sorted(["__version__", *_HOMES])

if TYPE_CHECKING:
    from roomier.api.callback import Callback as Callback
    from roomier.api.datamodule import DataModule as DataModule
    from roomier.api.logger import Logger as Logger
    from roomier.api.module import Module as Module
    from roomier.core.device.rng import seed_everything as seed_everything
    from roomier.core.errors import CheckpointError as CheckpointError
    from roomier.core.errors import DataError as DataError
    from roomier.core.errors import PlanError as PlanError
    from roomier.core.errors import RoomierError as RoomierError
    from roomier.core.errors import TrainingError as TrainingError
    from roomier.plan import Plan as Plan
    from roomier.prepared.accelerator import Accelerator as Accelerator
    from roomier.prepared.prepare import prepare as prepare
    from roomier.trainer import Trainer as Trainer
else:
    __getattr__, __dir__ = _late_names(__name__, _HOMES, files=(*_FOLDERS, "plugins", "strategies"))
