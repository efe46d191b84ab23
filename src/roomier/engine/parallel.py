"""Protocol of a model that is distributed across ranks, as the engine uses it in each step."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn


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
