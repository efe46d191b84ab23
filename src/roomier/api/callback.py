"""Callback: code that runs at named moments of a run. A hook that is not overridden costs nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer

if TYPE_CHECKING:
    from roomier.api.module import Module


class Callback:
    """Override the hooks you need; names, arguments and order are those of Lightning's ``Callback``.

    ``batch_idx`` counts micro-batches of the running epoch from 0. One hook is roomier's own:
    :meth:`on_save_point`, the one moment of a step at which a checkpoint resumes bit for bit.
    """

    monitors: ClassVar[bool] = False
    """Whether it watches a logged metric, and so must be called after those who log."""

    @property
    def state_key(self) -> str:
        """The name under which :meth:`state_dict` is stored; override it to use a class twice."""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: tensors, numbers, strings, lists and dicts of these."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put back what :meth:`state_dict` gave."""

    def setup(self, trainer: Any, pl_module: Module, stage: str) -> None: ...
    def teardown(self, trainer: Any, pl_module: Module, stage: str) -> None: ...
    def on_fit_start(self, trainer: Any, pl_module: Module) -> None: ...
    def on_fit_end(self, trainer: Any, pl_module: Module) -> None: ...
    def on_sanity_check_start(self, trainer: Any, pl_module: Module) -> None: ...
    def on_sanity_check_end(self, trainer: Any, pl_module: Module) -> None: ...
    def on_train_start(self, trainer: Any, pl_module: Module) -> None: ...
    def on_train_end(self, trainer: Any, pl_module: Module) -> None: ...
    def on_train_epoch_start(self, trainer: Any, pl_module: Module) -> None: ...
    def on_train_epoch_end(self, trainer: Any, pl_module: Module) -> None: ...

    def on_train_batch_start(self, trainer: Any, pl_module: Module, batch: Any, batch_idx: int) -> None: ...
    def on_train_batch_end(self, trainer: Any, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None: ...

    def on_before_zero_grad(self, trainer: Any, pl_module: Module, optimizer: Optimizer) -> None: ...
    def on_before_backward(self, trainer: Any, pl_module: Module, loss: Tensor) -> None: ...
    def on_after_backward(self, trainer: Any, pl_module: Module) -> None: ...
    def on_before_optimizer_step(self, trainer: Any, pl_module: Module, optimizer: Optimizer) -> None: ...

    def on_save_point(self, trainer: Any, pl_module: Module) -> None:
        """After everything of one optimizer step: its hooks, the validation that was due, and, where the
        epoch is over, its end. ``trainer.save_checkpoint(path)`` writes at once here; from any other hook
        of a running fit it is put off to this moment."""

    def on_validation_start(self, trainer: Any, pl_module: Module) -> None: ...
    def on_validation_end(self, trainer: Any, pl_module: Module) -> None: ...
    def on_validation_epoch_start(self, trainer: Any, pl_module: Module) -> None: ...
    def on_validation_epoch_end(self, trainer: Any, pl_module: Module) -> None: ...
    def on_validation_batch_start(
        self, trainer: Any, pl_module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...
    def on_validation_batch_end(
        self,
        trainer: Any,
        pl_module: Module,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None: ...

    def on_test_start(self, trainer: Any, pl_module: Module) -> None: ...
    def on_test_end(self, trainer: Any, pl_module: Module) -> None: ...
    def on_test_epoch_start(self, trainer: Any, pl_module: Module) -> None: ...
    def on_test_epoch_end(self, trainer: Any, pl_module: Module) -> None: ...
    def on_test_batch_start(
        self, trainer: Any, pl_module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...
    def on_test_batch_end(
        self,
        trainer: Any,
        pl_module: Module,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None: ...

    def on_predict_start(self, trainer: Any, pl_module: Module) -> None: ...
    def on_predict_end(self, trainer: Any, pl_module: Module) -> None: ...
    def on_predict_epoch_start(self, trainer: Any, pl_module: Module) -> None: ...
    def on_predict_epoch_end(self, trainer: Any, pl_module: Module) -> None: ...
    def on_predict_batch_start(
        self, trainer: Any, pl_module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...
    def on_predict_batch_end(
        self,
        trainer: Any,
        pl_module: Module,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None: ...

    def on_exception(self, trainer: Any, pl_module: Module, exception: BaseException) -> None: ...
    def on_save_checkpoint(self, trainer: Any, pl_module: Module, checkpoint: dict[str, Any]) -> None: ...
    def on_load_checkpoint(self, trainer: Any, pl_module: Module, checkpoint: dict[str, Any]) -> None: ...


@runtime_checkable
class ChecksState(Protocol):
    """A callback that rejects a malformed state before anything of a checkpoint is loaded."""

    def check_stored_state(self, state: Any, place: str) -> None:
        """Check a stored state, whose tensors need not be read yet.

        Args:
            place: of ``state`` in the checkpoint.

        Raises:
            FormError: ``load_state_dict`` cannot load it.
        """
        ...


@runtime_checkable
class PlacesTensors(Protocol):
    """A callback that writes tensors of the model's size into a checkpoint, in ``on_save_checkpoint``, and says where
    they go when it is loaded, so that no rank reads more than its part."""

    def places(self, weights: Mapping[str, Tensor], stored: Mapping[str, Any]) -> dict[str, Any]:
        """Tensors to be filled, by key of the checkpoint.

        Args:
            weights: of the model, by name.
            stored: the checkpoint, with the shape and dtype of each tensor in its place.
        """
        ...
