"""Engine: the one thing that varies at step time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Step = Callable[[Any], Any]
"""Takes a batch on the device; returns the loss, a mapping with the key ``"loss"``, or None to leave it out."""


@dataclass
class StepHooks:
    """What the training loop wants called inside ``forward_backward``; empty costs nothing.

    Attributes:
        zero_grad: called in place of ``optimizer.zero_grad()`` after the first forward of a window, where
            Lightning documents it; None frees the gradients before that forward, which lowers the peak.
        backward: called in place of ``loss.backward()``.
        transfer: called in place of the move to the device.
        batch_start: called with each micro-batch on the device, before its forward.
        batch_end: called after the backward of each micro-batch but the last, whose end comes after the update.
        is_skipping: whether a hook asked to leave out this step, on every rank.
    """

    before_backward: tuple[Callable[[Tensor], Any], ...] = ()
    after_backward: tuple[Callable[[], Any], ...] = ()
    zero_grad: Callable[[Optimizer], Any] | None = None
    backward: Callable[..., Any] | None = None
    transfer: Callable[[Any], Any] | None = None
    batch_start: Callable[[Any], Any] | None = None
    batch_end: Callable[[], Any] | None = None
    is_skipping: Callable[[], bool] | None = None


class Parallel(Protocol):
    """What a module was made into for several ranks: what the engine tells it at each step.

    Attributes:
        runner: calls a step on a batch, with the parameters there that it needs.
        loss_factor: what each loss is multiplied by, so that the gradients are their sum over the ranks.
        allows_inference_mode: what is gathered in ``torch.inference_mode`` serves training afterwards.
        trace: stands for the parts of the model that were run so far, in their order; the same on all ranks, or one
            rank took what it gathered for another part.
        late_parameters: whose gradients are complete after :meth:`end_backward`, not when autograd has them.
    """

    runner: nn.Module
    loss_factor: float
    allows_inference_mode: bool
    trace: int
    late_parameters: Sequence[nn.Parameter]

    def begin_micro_batch(self, *, is_first: bool, is_last: bool) -> None:
        """Before the forward of each micro-batch of a step."""
        ...

    def begin_backward(self) -> None:
        """Before each backward, with the gradients there that it is added to."""
        ...

    def end_backward(self) -> None:
        """After each backward."""
        ...

    def end_update(self) -> None:
        """After each update of parameters."""
        ...

    def release(self) -> None:
        """Free what is gathered: after an evaluation, and before parameters are looked at by name."""
        ...

    def trained_parameters_changed(self) -> None:
        """Some were frozen or unfrozen since the last step, on all ranks."""
        ...

    def clip_grad_norm_(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Scale the gradients down to ``max_norm``; their norm before, over all ranks."""
        ...

    def clip_grad_value_(self, parameters: Sequence[Tensor], max_value: float) -> None:
        """Clamp each element of the gradients."""
        ...

    def join_norms(self, norms: Mapping[Tensor, Tensor]) -> Tensor:
        """The norm of all gradients, over all ranks (0-dim), from that of this rank's part of each, by parameter."""
        ...


class Engine(Protocol):
    """Runs optimizer steps of one module under one Plan."""

    module: nn.Module
    optimizers: list[Optimizer]
    device: torch.device
    hooks: StepHooks

    def forward_backward(self, step: Step, batches: Sequence[Any]) -> Tensor | None:
        """Gradients of one optimizer step from its micro-batches, as if they were one batch.

        Args:
            step: computes the loss of one micro-batch.
            batches: the micro-batches as the loader gave them.

        Returns:
            This rank's share of the loss of the whole batch (0-dim, detached, on the device); the sum over the ranks is
            that loss. None where every step returned None.
        """
        ...

    def step_with_closure(
        self, step: Step, batches: Sequence[Any], update: Callable[[Callable[[], Tensor | None]], Any]
    ) -> Tensor | None:
        """As :meth:`forward_backward`, for an update that asks for the gradients itself.

        Args:
            update: called once all micro-batches but the last have run. Its argument runs the last one, with its
                gradients, and returns its weighted loss; LBFGS calls it several times a step. Not called where a hook
                leaves the step out.
        """
        ...

    def move(self, batch: Any) -> Any:
        """``batch`` on the device, in the dtype of the weights where the precision asks for it."""
        ...

    def forward(self, step: Step, batch: Any) -> Any:
        """``step`` on a moved ``batch`` in the precision of the Plan, without a backward (evaluation, manual mode)."""
        ...

    def release(self) -> None:
        """Free what :meth:`forward` gathered from other ranks; called when an evaluation is over."""
        ...

    def close(self) -> None:
        """Give the module its own forward back; called when the run is over, and no step follows."""
        ...

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """The backward of one loss, for manual optimization."""
        ...

    def clip(
        self, max_norm: float | None = None, algorithm: str | None = None, *, optimizer: Optimizer | None = None
    ) -> Tensor | None:
        """Clip the gradients; by default as the Plan says. Returns their norm before (``"norm"`` only)."""
        ...

    def step(self, optimizer: Optimizer | None = None, closure: Any = None) -> None:
        """Update the parameters."""
        ...

    def weights(self) -> dict[str, Any]:
        """The weights and buffers of :meth:`state` alone."""
        ...

    def state(self) -> dict[str, Any]:
        """Weights, optimizer states and loss scale by fully qualified name; tensors are not copied."""
        ...

    def check(self, state: Mapping[str, Any]) -> None:
        """Check that the states of optimizers in ``state``, whose tensors need not be read yet, can be loaded.

        Raises:
            CheckpointError: they belong to other optimizers.
            FormError: a value is malformed.
        """
        ...

    def load(self, state: dict[str, Any]) -> None:
        """Put back what :meth:`state` gave; weights are copied in place."""
        ...
