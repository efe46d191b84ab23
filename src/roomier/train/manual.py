"""The optimizers a manual ``training_step`` sees: stepping one counts, scales and calls the hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

if TYPE_CHECKING:
    from roomier.train.run import Run


class ManualOptimizer:
    """Stands in for ``optimizer``; everything but ``step`` is the optimizer's own."""

    def __init__(self, optimizer: Optimizer, run: Run) -> None:
        self.optimizer = optimizer
        self._run = run

    def step(self, closure: Any = None) -> None:
        """One optimizer step: ``on_before_optimizer_step``, then the update; counts in ``global_step``."""
        engine = self._run.engine
        if self._run.hooks.on_before_optimizer_step:
            engine.unscale(self.optimizer)
            for hook in self._run.hooks.on_before_optimizer_step:
                hook(self.optimizer)
        engine.step(self.optimizer, closure)
        self._run.progress.global_step += 1

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Only the parameters of this optimizer require gradients inside."""
        self._run.module.toggle_optimizer(self)
        try:
            yield
        finally:
            self._run.module.untoggle_optimizer(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)
