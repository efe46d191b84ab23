"""Engine: the protocol between the training loop and the code that computes gradients and updates."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Step = Callable[[Any, int], Any]
"""Function that computes the loss of one micro-batch.

The arguments are the micro-batch on the device and its index in the window (the micro-batches of one optimizer step).
The step returns the loss, a mapping with the key ``"loss"``, or None to skip the micro-batch.
"""


def _do_nothing(*_: Any) -> None:
    """Do nothing. This function is the default of several fields of :class:`StepHooks`."""


@dataclass
class StepHooks:
    """Functions of the training loop that the engine calls inside ``forward_backward``.

    Attributes:
        before_backward: called with each loss before its backward pass.
        after_backward: called after each backward pass.
        zero_grad: called instead of ``optimizer.zero_grad()`` after the first forward pass of a window, as in
            Lightning. If None, the gradients are freed before this forward pass, which lowers the peak memory.
        keeps_gradients: True if ``Engine.step`` does not free the gradients, because hooks may read them after the
            update. The gradients are then freed by ``Engine.free_gradients``, or in the next window.
        frees_gradients: True if the loop calls ``Engine.free_gradients`` after each step. A window then zeroes
            gradients only if some exist, for example because user code ran a backward pass before the fit.
        backward: called instead of ``loss.backward()``.
        transfer: called instead of moving a micro-batch to the device.
        batch_start: called with each micro-batch on the device and its index in the window, before its forward pass.
        batch_loss: called after the backward pass of each micro-batch with its loss (0-dim, detached) and its index.
        batch_end: called at the end of each micro-batch with its index, except the last micro-batch of the window. The
            training loop calls the hooks of the last micro-batch after the update.
        change_gradient: called with each parameter and its gradient (or this rank's shard) by
            ``Engine.change_gradients``. Engines that free gradients during the backward pass call it during backward,
            and may call it twice.
        step_name: name of the method that :meth:`Engine.forward` runs, such as ``"validation_step"``.
        is_skipping: returns True on every rank if a hook on any rank requested to skip this step.
    """

    before_backward: tuple[Callable[[Tensor], Any], ...] = ()
    after_backward: tuple[Callable[[], Any], ...] = ()
    zero_grad: Callable[[Optimizer], Any] | None = None
    keeps_gradients: bool = False
    frees_gradients: bool = False
    backward: Callable[..., Any] = Tensor.backward
    transfer: Callable[[Any], Any] | None = None
    batch_start: Callable[[Any, int], Any] = _do_nothing
    batch_loss: Callable[[Tensor, int], Any] = _do_nothing
    batch_end: Callable[[int], Any] = _do_nothing
    change_gradient: Callable[[Tensor, Tensor], Any] | None = None
    step_name: str = "training_step"
    is_skipping: Callable[[], bool] = bool


class LossScale(Protocol):
    """Factor by which the loss is multiplied with precision ``"16-mixed"``. With other precisions, the factor is 1.

    Attributes:
        num_skipped: number of steps skipped so far because their gradients were not finite (0-dim, on the device).
    """

    num_skipped: Tensor

    @property
    def is_on(self) -> bool:
        """True if losses are scaled."""

    @property
    def factor(self) -> float:
        """The factor as a number. Reading this value waits for the device."""


class Engine(Protocol):
    """Object that runs the optimizer steps of one module under one Plan. The loop and the callbacks use only the
    members of this protocol.

    Attributes:
        module: the module whose parameters are trained and stored.
        blocks: the blocks of ``module``; see :func:`roomier.api.blocks.find_blocks`.
        optimizers: the optimizers of the module's parameters.
        device: the device of this rank.
        hooks: functions of the training loop that :meth:`forward_backward` calls.
    """

    module: nn.Module
    blocks: Sequence[nn.Module]
    optimizers: list[Optimizer]
    device: torch.device
    hooks: StepHooks

    @property
    def scaler(self) -> LossScale:
        """The loss scale. The loss scale is disabled unless the precision is ``"16-mixed"``."""

    @property
    def allows_inference_mode(self) -> bool:
        """True if :meth:`forward` supports ``torch.inference_mode``. Otherwise evaluations use ``torch.no_grad``."""

    @property
    def trace(self) -> int:
        """Number that is equal on all ranks if all ranks ran the same parts of the model in the same order."""

    def forward_backward(self, step: Step, batches: Sequence[Any]) -> Tensor | None:
        """Compute the gradients of one optimizer step from its micro-batches, as if they were one batch.

        Args:
            step: function that computes the loss of one micro-batch.
            batches: the micro-batches as the loader returned them.

        Returns:
            This rank's share of the loss of the full batch (0-dim, detached, on the device). The sum of the shares over
            all ranks is the loss of the full batch. None if ``step`` returned None for every micro-batch. A rank that
            computes no loss returns a loss share of zero.
        """

    def step_with_closure(
        self, step: Step, batches: Sequence[Any], update: Callable[[Callable[[], Tensor | None]], Any]
    ) -> Tensor | None:
        """Compute gradients like :meth:`forward_backward`, but those of the last micro-batch in a closure.

        Args:
            update: called after all micro-batches except the last have run. The argument of ``update`` is a closure
                that computes the gradients of the last micro-batch and returns its weighted loss. LBFGS calls the
                closure several times per step. ``update`` is not called if a hook skips the step.
        """

    def move(self, batch: Any) -> Any:
        """Return ``batch`` on the device, in the dtype of the weights if the precision requires it."""

    def forward(self, step: Callable[[Any], Any], batch: Any) -> Any:
        """Run ``step`` on a moved ``batch`` in the precision of the Plan, without a backward pass.

        Evaluations and manual optimization call this method.
        """

    def settle(self) -> None:
        """Finish pending updates and free unsharded parameters.

        Every rank must call this method before any code reads parameters or optimizer states, for example to save a
        checkpoint, run an evaluation, average weights or change ``requires_grad``.
        """

    def complete_updates(self) -> None:
        """Finish pending updates before user hooks read parameters or optimizer states within a step."""

    def close(self) -> None:
        """Restore the module's original ``forward`` method. Call this after the last step."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass of one loss, for manual optimization."""

    def unscale(self, optimizer: Optimizer | None = None) -> None:
        """Divide the gradients by the loss scale before any code reads them. A second call has no effect."""

    def change_gradients(self, optimizer: Optimizer | None = None) -> None:
        """Call ``hooks.change_gradient`` with each complete, unscaled gradient, before :meth:`clip`."""

    def clip(
        self, max_norm: float | None = None, algorithm: str | None = None, *, optimizer: Optimizer | None = None
    ) -> Tensor | None:
        """Clip the gradients, by default as the Plan specifies. With ``"norm"``, return the norm before clipping."""

    def step(self, optimizer: Optimizer | None = None, closure: Any = None) -> None:
        """Update the parameters, then free the gradients unless ``hooks.keeps_gradients`` is set."""

    def free_gradients(self, optimizer: Optimizer | None = None) -> None:
        """Free the gradients. Called after the update and after all hooks that may read the gradients."""

    def leave_out_update(self) -> None:
        """Skip the update of this step. Called instead of :meth:`step`. The loss scale does not change."""

    def trained_parameters_changed(self) -> None:
        """Handle parameters that were frozen or unfrozen since the last step. Every rank must call this method."""

    def watch(self, context: AbstractContextManager[Any]) -> None:
        """Run only the next forward pass of training inside ``context``."""

    def weights(self) -> dict[str, Any]:
        """Return the weights and buffers that :meth:`state` includes."""

    def load_weights(self, weights: Mapping[str, Any]) -> None:
        """Copy ``weights`` into the module. Tensors that are not sharded are sharded like those of the module."""

    def state(self) -> dict[str, Any]:
        """Return the weights, optimizer states and loss scale. Tensors are not copied."""

    def check(self, state: Mapping[str, Any]) -> None:
        """Check that the optimizer states in ``state`` can be loaded, before their tensors are read.

        Raises:
            CheckpointError: ``state`` belongs to different optimizers.
        """

    def places(
        self, stored: Sequence[Mapping[str, Any]], *, is_spec: Callable[[Any], bool], unneeded: Any
    ) -> list[dict[str, Any]]:
        """Return ``stored`` with an empty tensor for :meth:`load` in place of each tensor that this rank reads.

        Args:
            stored: the states of each optimizer in a checkpoint.
            is_spec: function that returns True if a value describes a tensor by its ``shape`` and ``dtype``.
            unneeded: value that replaces tensors that this rank does not need.
        """

    def load(self, state: dict[str, Any]) -> None:
        """Restore the state that :meth:`state` returned. Weights are copied in place."""
