"""Optimizers for a manual ``training_step``. Their method ``step`` counts steps, unscales gradients and calls the
hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from roomier.api.adapt import seen_by_user
from roomier.optim.proxy import OptimizerProxy

if TYPE_CHECKING:
    from roomier.run.run import Run


class ManualOptimizer(OptimizerProxy):
    """Proxy of ``optimizer`` with a different ``step`` method. All other attributes are read from ``optimizer``.

    Args:
        optimizer: optimizer to wrap.
        run: the run that counts the steps.
    """

    def __init__(self, optimizer: Optimizer, run: Run) -> None:
        super().__init__(optimizer)
        self._run = run

    def step(self, closure: Any = None) -> Any:
        """Run one optimizer step: ``closure``, then ``on_before_optimizer_step``, then the update.

        The step increments ``global_step``.

        Args:
            closure: function that computes the loss and the gradients. Optimizers such as LBFGS call the closure
                several times.

        Returns:
            The value that the first call of ``closure`` returned; None if no closure was passed.
        """
        loss = self._update(closure, self._run.hooks.on_before_optimizer_step)
        self._run.progress.global_step += 1
        return loss

    def _update(self, closure: Any, before: Sequence[Callable[[Optimizer], Any]]) -> Any:
        """Run ``closure``, ``before`` and the update. Return the value that the first call of ``closure`` returned."""
        engine, optimizer = self._run.engine, self.optimizer
        losses: list[Any] = []

        def with_hooks() -> Any:
            losses.append(None if closure is None else closure())
            if before and not leaves_out():
                engine.unscale(optimizer)
            for hook in before:
                hook(optimizer)
            return losses[-1]

        def leaves_out() -> bool:
            # A closure that returns no loss has not run backward, so the scaler would find no gradients to unscale.
            return engine.scaler.is_on and closure is not None and losses[-1] is None

        if closure is not None and not engine.scaler.is_on:
            engine.step(optimizer, with_hooks)
            return losses[0] if losses else None
        with_hooks()
        if not leaves_out():
            engine.step(optimizer)
        return losses[0]

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Inside the context, set ``requires_grad`` to False for all parameters that only other optimizers update.

        Args:
            sync_grad: has no effect. Gradients are averaged over the ranks after each backward pass, so all ranks have
                the same gradients in a step.
        """
        module = seen_by_user(self._run.module)
        module.toggle_optimizer(self)
        try:
            yield
        finally:
            module.untoggle_optimizer(self)
