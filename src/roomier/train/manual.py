"""The optimizers a manual ``training_step`` sees: stepping one counts, scales and calls the hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from roomier.api.adapt import seen_by_user

if TYPE_CHECKING:
    from roomier.run.run import Run

_STATE = ("param_groups", "state", "defaults")


class ManualOptimizer:
    """Stands in for ``optimizer``; everything but ``step`` is the optimizer's own.

    It passes for one of the optimizer's class, so that a scheduler can be made over it, and a copy or a pickle of it is
    one of the optimizer.
    """

    def __init__(self, optimizer: Optimizer, run: Run) -> None:
        self.optimizer = optimizer
        self._run = run

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.optimizer)

    def step(self, closure: Any = None) -> Any:
        """One optimizer step: ``closure``, which computes the gradients where it is given (and may be called several
        times, as LBFGS does), ``on_before_optimizer_step``, then the update; counts in ``global_step``.

        Returns:
            The loss it began with: what ``closure`` returned first.
        """
        loss = self._update(closure, self._run.hooks.on_before_optimizer_step)
        self._run.progress.global_step += 1
        return loss

    def _update(self, closure: Any, before: Sequence[Callable[[Optimizer], Any]]) -> Any:
        """``closure``, then ``before`` with the optimizer, then the update; returns what ``closure`` returned first."""
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
            # A closure that gives no loss ran no backward, and the scaler looks at gradients before the optimizer does.
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
        """Only the parameters of this optimizer require gradients inside.

        Args:
            sync_grad: taken, and of no effect: ranks add up the gradients of each backward, so what a step sees is the
                same.
        """
        module = seen_by_user(self._run.module)
        module.toggle_optimizer(self)
        try:
            yield
        finally:
            module.untoggle_optimizer(self)

    def __repr__(self) -> str:
        return repr(self.optimizer)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.optimizer.__reduce_ex__(protocol)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _STATE:  # what is read here is the optimizer's, and so is what is written
            setattr(self.optimizer, name, value)
        else:
            super().__setattr__(name, value)
