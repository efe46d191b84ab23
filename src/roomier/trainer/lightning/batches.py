"""Attributes of Lightning's Trainer that ``to_onnx`` and ``to_torchscript`` of a LightningModule read.

These methods use the batch hooks to move their example input to the device. The Trainer provides the object that has
the hooks, and a profiler that measures the duration of the hooks.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch.profiler import record_function

from roomier.api.datamodule import DataModule
from roomier.api.overrides import overrides

if TYPE_CHECKING:
    from roomier.api.trainer_view import TrainerView


class NamedSpans:
    """The value of ``trainer.profiler``. ``with trainer.profiler.profile(name)`` names a span in a torch profile."""

    def profile(self, action_name: str) -> AbstractContextManager[Any]:
        """Return a context manager that names a span."""
        return record_function(action_name)


class BatchHooks:
    """Selector of the object whose batch hook is called: the DataModule if it overrides the hook, otherwise the
    module."""

    def __init__(self, trainer: TrainerView) -> None:
        self._trainer = trainer

    @property
    def _datahook_selector(self) -> BatchHooks:
        return self

    def get_instance(self, hook_name: str) -> Any:
        """Return the object on which the hook ``hook_name`` is called."""
        data = self._trainer.datamodule
        return data if data is not None and overrides(data, hook_name, DataModule) else self._trainer.lightning_module
