"""What a LightningModule's own ``to_onnx`` and ``to_torchscript`` ask the Trainer it was trained with.

They bring their example to the device by the hooks of a batch, and look up with whom these are, and how they are timed,
in places of Lightning's Trainer.
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
    """``trainer.profiler``: ``with trainer.profiler.profile(name)`` is a span of this name in a profile of torch."""

    def profile(self, action_name: str) -> AbstractContextManager[Any]:
        return record_function(action_name)


class BatchHooks:
    """Whose hook of a batch is called: the DataModule's where it has its own, else the module's."""

    def __init__(self, trainer: TrainerView) -> None:
        self._trainer = trainer

    @property
    def _datahook_selector(self) -> BatchHooks:
        return self

    def get_instance(self, hook_name: str) -> Any:
        data = self._trainer.datamodule
        return data if data is not None and overrides(data, hook_name, DataModule) else self._trainer.lightning_module
