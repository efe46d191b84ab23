"""Base class for callbacks: code that runs at defined points of a run. Hooks that are not overridden cost no time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

if TYPE_CHECKING:
    from roomier.api.module import Module


LOG_METHODS = ("log", "log_dict", "log_image", "log_figure", "log_histogram")


class Callback:
    """Base class for callbacks. Override the hooks that you need, and pass instances to ``Trainer(callbacks=[...])``.

    The names, arguments and order of the hooks are the same as in Lightning's ``Callback``. ``batch_idx`` counts the
    micro-batches of the current epoch from 0. The hook :meth:`on_save_point` exists only in roomier. Within a step,
    only this hook can save a checkpoint from which a run resumes with bit-identical results.

    Example:
        >>> class PrintLoss(roomier.Callback):
        ...     def on_train_epoch_end(self, trainer, pl_module):
        ...         print(trainer.current_epoch, float(trainer.callback_metrics["train_loss"]))  # if the module logs it
        >>> trainer = roomier.Trainer(max_epochs=3, callbacks=[PrintLoss()])
    """

    log: Callable[..., None]
    """:meth:`roomier.Module.log` of the module. Set during a run, unless the class defines ``log`` itself."""

    log_dict: Callable[..., None]
    """:meth:`roomier.Module.log_dict` of the module. Set during a run, unless the class defines ``log_dict`` itself."""

    log_image: Callable[..., None]
    """:meth:`roomier.Module.log_image` of the module, like :attr:`log`."""

    log_figure: Callable[..., None]
    """:meth:`roomier.Module.log_figure` of the module, like :attr:`log`."""

    log_histogram: Callable[..., None]
    """:meth:`roomier.Module.log_histogram` of the module, like :attr:`log`."""

    monitors: ClassVar[bool] = False
    """True if the callback monitors a logged metric. ``on_train_epoch_end`` of such a callback runs after the module's
    hook, which may log the metric."""

    reads_parameters = True
    """Whether the hooks that a class defines read parameters, gradients or optimizer states. If a class sets this
    attribute to False, updates of offloaded states can be pending while its hooks run. Subclasses do not inherit the
    value."""

    @property
    def state_key(self) -> str:
        """Key of the callback's state in a checkpoint. Override it to use several instances of a class in one run."""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints: tensors, numbers, strings, and lists and dicts of these values."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned."""

    def setup(self, trainer: Any, pl_module: Module, stage: str) -> None:
        """Called in every process at the start of ``fit``, ``validate``, ``test`` or ``predict``.

        Args:
            stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        """

    def teardown(self, trainer: Any, pl_module: Module, stage: str) -> None:
        """Called in every process when a Trainer method ends, even after an error. See :meth:`setup` for ``stage``."""

    def on_fit_start(self, trainer: Any, pl_module: Module) -> None:
        """Called at the start of a fit, after checkpoints are restored and before the sanity check."""

    def on_fit_end(self, trainer: Any, pl_module: Module) -> None:
        """Called at the end of a fit that was not interrupted."""

    def on_sanity_check_start(self, trainer: Any, pl_module: Module) -> None:
        """Called before the sanity check, which runs validation batches before training."""

    def on_sanity_check_end(self, trainer: Any, pl_module: Module) -> None:
        """Called after the sanity check, which runs validation batches before training."""

    def on_train_start(self, trainer: Any, pl_module: Module) -> None:
        """Called before the first training step."""

    def on_train_end(self, trainer: Any, pl_module: Module) -> None:
        """Called after the last training step."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Module) -> None:
        """Called before the first batch of an epoch, but not if the run resumes within an epoch."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Module) -> None:
        """Called at the end of an epoch, before metrics of the epoch are reduced and logged."""

    def on_train_batch_start(self, trainer: Any, pl_module: Module, batch: Any, batch_idx: int) -> None:
        """Called before the forward pass of a micro-batch. Return -1 to skip the rest of the epoch."""

    def on_train_batch_end(self, trainer: Any, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after a micro-batch. For the last micro-batch of a step, this hook is called after the update.

        Args:
            outputs: dict with the output of ``training_step``. The value of ``"loss"`` is the loss that was
                backpropagated.
        """

    def on_before_zero_grad(self, trainer: Any, pl_module: Module, optimizer: Optimizer) -> None:
        """Called before gradients are zeroed, after the first forward pass of a step."""

    def on_before_backward(self, trainer: Any, pl_module: Module, loss: Tensor) -> None:
        """Called with the loss (0-dim tensor) before each backward pass."""

    def on_after_backward(self, trainer: Any, pl_module: Module) -> None:
        """Called after each backward pass."""

    def on_gradient(self, trainer: Any, pl_module: Module, name: str, gradient: Tensor) -> None:
        """Called with each gradient of a step, to change it in place before :meth:`on_before_optimizer_step` and
        clipping.

        The gradient is reduced over the ranks and unscaled. This hook works in every mode, including updates during the
        backward pass and offloaded parameters, because it requires only one gradient at a time. With two backward
        passes per step, it is called twice with the same gradient and must change it in the same way. Ranks with the
        same shard must also change it in the same way, for example with random numbers from a seeded generator.

        Args:
            name: name of the parameter in the module.
            gradient: gradient of the parameter. If the parameter is sharded, this rank's rows (dimension 0) of the
                gradient; there can be zero rows.
        """

    def on_before_optimizer_step(self, trainer: Any, pl_module: Module, optimizer: Optimizer) -> None:
        """Called after the gradients of a step are computed, before clipping and the update."""

    def on_save_point(self, trainer: Any, pl_module: Module) -> None:
        """Called at the end of an optimizer step, after the step's other hooks, validation and end-of-epoch hooks.

        ``trainer.save_checkpoint(path)`` writes immediately in this hook. In other hooks of a running fit, the
        checkpoint is written at the next save point.
        """

    def on_validation_start(self, trainer: Any, pl_module: Module) -> None:
        """Called at the start of a validation run."""

    def on_validation_end(self, trainer: Any, pl_module: Module) -> None:
        """Called at the end of a validation run, after its metrics are reduced and logged."""

    def on_validation_epoch_start(self, trainer: Any, pl_module: Module) -> None:
        """Called before the first validation batch."""

    def on_validation_epoch_end(self, trainer: Any, pl_module: Module) -> None:
        """Called after the last validation batch, before metrics are reduced and logged."""

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before a validation batch."""

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after a validation batch with the output of ``validation_step``."""

    def on_test_start(self, trainer: Any, pl_module: Module) -> None:
        """Called at the start of a test run."""

    def on_test_end(self, trainer: Any, pl_module: Module) -> None:
        """Called at the end of a test run, after its metrics are reduced and logged."""

    def on_test_epoch_start(self, trainer: Any, pl_module: Module) -> None:
        """Called before the first test batch."""

    def on_test_epoch_end(self, trainer: Any, pl_module: Module) -> None:
        """Called after the last test batch, before metrics are reduced and logged."""

    def on_test_batch_start(
        self, trainer: Any, pl_module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before a test batch."""

    def on_test_batch_end(
        self, trainer: Any, pl_module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after a test batch with the output of ``test_step``."""

    def on_predict_start(self, trainer: Any, pl_module: Module) -> None:
        """Called at the start of a prediction run."""

    def on_predict_end(self, trainer: Any, pl_module: Module) -> None:
        """Called at the end of a prediction run, after its metrics are reduced and logged."""

    def on_predict_epoch_start(self, trainer: Any, pl_module: Module) -> None:
        """Called before the first prediction batch."""

    def on_predict_epoch_end(self, trainer: Any, pl_module: Module) -> None:
        """Called after the last prediction batch, before metrics are reduced and logged."""

    def on_predict_batch_start(
        self, trainer: Any, pl_module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before a prediction batch."""

    def on_predict_batch_end(
        self, trainer: Any, pl_module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after a prediction batch with the output of ``predict_step``."""

    def on_exception(self, trainer: Any, pl_module: Module, exception: BaseException) -> None:
        """Called if ``fit`` or another method of the Trainer ends with ``exception``."""

    def on_save_checkpoint(self, trainer: Any, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        """Called before a checkpoint is saved. Add tensors or plain data to ``checkpoint``."""

    def on_load_checkpoint(self, trainer: Any, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        """Called after a checkpoint is loaded, to read additional entries of ``checkpoint``."""


@runtime_checkable
class ChecksState(Protocol):
    """A callback that rejects a malformed state before any part of a checkpoint is loaded."""

    def check_stored_state(self, state: Any, place: str) -> None:
        """Check a stored state. The tensors of the stored state might not be loaded yet.

        Args:
            state: stored result of :meth:`Callback.state_dict`, which may be malformed.
            place: path of ``state`` in the checkpoint, for the error message.

        Raises:
            FormError: ``load_state_dict`` cannot load the state.
        """


@runtime_checkable
class PlacesTensors(Protocol):
    """A callback that saves tensors as large as the model in ``on_save_checkpoint``.

    The callback provides the tensors into which the saved tensors are loaded, so each rank reads only its shards.
    """

    def places(self, weights: Mapping[str, Tensor], stored: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tensors to fill, keyed by checkpoint entry.

        Args:
            weights: weights of the model, by name.
            stored: the checkpoint, with the shape and dtype of each tensor instead of its values.
        """


@dataclass(frozen=True)
class KeptWeights:
    """A copy of the trained parameters in float32 or higher precision, sharded like the parameters.

    Args:
        with_buffers: True if the copy includes the floating-point buffers that checkpoints contain.
        device: device of the copy; None for the device of the weights.
    """

    with_buffers: bool = False
    device: torch.device | None = None

    def is_on(self, device_type: str) -> bool:
        """Return True if the copy is stored on the device of the model. ``device_type`` is the type of this device."""
        return self.device is None or self.device.type == device_type


class KeptSnapshots(KeptWeights):
    """Description of snapshots of all model states in host memory, instead of a copy of the parameters."""

    def is_on(self, device_type: str) -> bool:
        """Return False."""
        return False


@runtime_checkable
class KeepsWeights(Protocol):
    """A callback that stores a copy of the weights during a fit.

    Attributes:
        kept_weights: description of the copy, which is available even before the copy is created.
    """

    kept_weights: KeptWeights

    def held_weights(self) -> Iterable[Tensor]:
        """Return this rank's shards of the copy; no tensors before the copy is created."""


def kept_by(callbacks: Iterable[object], *, now: bool = False) -> tuple[KeptWeights, ...]:
    """Return descriptions of the copies that ``callbacks`` store.

    Args:
        now: if True, include only copies that already exist.
    """
    found = []
    for each in callbacks:
        kept: Any = getattr(each, "kept_weights", None)
        is_kept = isinstance(each, KeepsWeights) and (not now or any(True for _ in each.held_weights()))
        if is_kept or isinstance(kept, KeptSnapshots):
            found.append(kept)
    return tuple(found)


def held_by(callbacks: Iterable[object]) -> list[Tensor]:
    """Return the existing tensors of the copies that ``callbacks`` store."""
    return [tensor for each in callbacks if isinstance(each, KeepsWeights) for tensor in each.held_weights()]


class GoBackError(Exception):
    """Exception that a callback raises to restore the newest checkpoint of the run and continue training from it.

    Every rank must raise this exception at the same place: in ``on_train_batch_end`` of the last micro-batch of a step,
    or in one of the functions in ``Run.looks``. The callback must ensure that the run does not return to the same
    checkpoint forever.

    Its text is the reason in the error if there is no checkpoint.
    """
