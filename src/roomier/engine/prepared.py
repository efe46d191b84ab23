"""The engine behind ``roomier.prepare``: it sees to what the Trainer sees to in its own loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from roomier.api.engine import StepHooks
from roomier.core.errors import TrainingError
from roomier.engine.eager import EagerEngine


class PreparedEngine(EagerEngine):
    """An :class:`EagerEngine` whose ``step`` clips as the Plan says where ``clip`` was not called before it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hooks = StepHooks(keeps_gradients=True)  # a loop may read them after the update, as in plain PyTorch
        self._clipped: set[int] = set()  # optimizers whose gradients were clipped since the last backward
        self._is_before_any_backward = True

    def forward_backward(  # type: ignore[override]  # the step of a custom loop takes the batch alone
        self, step: Callable[[Any], Any], batches: Sequence[Any]
    ) -> Tensor | None:
        loss = super().forward_backward(lambda batch, _: step(batch), batches)
        self._is_before_any_backward = False  # also where every step returned None, which runs no backward
        return loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self._clipped.clear()
        super().backward(loss, *args, **kwargs)
        self._is_before_any_backward = False

    def clip(
        self, max_norm: float | None = None, algorithm: str | None = None, *, optimizer: Optimizer | None = None
    ) -> Tensor | None:
        self._clipped.update(id(each) for each in self._chosen(optimizer))
        return super().clip(max_norm, algorithm, optimizer=optimizer)

    def step(self, optimizer: Optimizer | None = None, closure: Any = None) -> None:
        """Update the parameters; the gradients are clipped first as the Plan says, if :meth:`clip` was not called.

        Raises:
            TrainingError: there are no gradients, since nothing was run backward yet.
        """
        chosen = self._chosen(optimizer)
        if closure is None:  # else the gradients come in the closure, which can clip them there
            self._check_gradients(chosen)
            unclipped = [each for each in chosen if id(each) not in self._clipped]
            if unclipped == chosen:
                self.clip(optimizer=optimizer)  # the norm over all of them, as where clip() is called
            else:
                for each in unclipped:
                    self.clip(optimizer=each)
        super().step(optimizer, closure)
        self._clipped.difference_update(id(each) for each in chosen)

    def _chosen(self, optimizer: Optimizer | None) -> list[Optimizer]:
        return self.optimizers if optimizer is None else [optimizer]

    def _check_gradients(self, optimizers: Sequence[Optimizer]) -> None:
        if not self._is_before_any_backward:
            return
        groups = [group for each in optimizers for group in each.param_groups]
        if all(parameter.grad is None for group in groups for parameter in group["params"]):
            raise TrainingError(
                "step",
                None,
                "there are no gradients: nothing was run backward yet",
                "Call engine.forward_backward(training_step, batches) before engine.step()",
            )
