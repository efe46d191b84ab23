"""Optimizers for a manual ``training_step``. Their method ``step`` counts steps, unscales gradients and calls hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

from torch.optim import Optimizer

from roomier.api.adapt import seen_by_user
from roomier.core.errors import TrainingError
from roomier.plan.levers import lever_that_frees_gradients
from roomier.run.run import Run
from roomier.techniques.optim.proxy import OptimizerProxy


class ManualOptimizer(OptimizerProxy):
    """Proxy of ``optimizer`` with a different ``step`` method. All other attributes are read from ``optimizer``.

    Args:
        optimizer: optimizer to wrap.
        run: the run that counts the steps.
    """

    def __init__(self, optimizer: Optimizer, run: Run) -> None:
        super().__init__(optimizer)
        self._run = run

    def step(self, closure: Any = None, **options: Any) -> Any:
        """Run one optimizer step: ``closure``, then ``on_before_optimizer_step``, then the update.

        The step increments ``global_step``.

        Args:
            closure: function that computes the loss and the gradients. Optimizers such as LBFGS call the closure
                several times.
            options: additional arguments of the optimizer's ``step``.

        Returns:
            The value that the first call of ``closure`` returned; None if no closure was passed.
        """
        loss = self._update(closure, self._run.hooks.on_before_optimizer_step, options)
        self._run.progress.global_step += 1
        return loss

    def _update(
        self,
        closure: Any,
        before: Sequence[Callable[[Optimizer], Any]],
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> Any:
        """Run ``closure``, ``before`` and the update. Return the value that the first call of ``closure`` returned."""
        if options:
            with self._passing(options):
                return self._update(closure, before)
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
    def _passing(self, options: Mapping[str, Any]) -> Iterator[None]:
        """Inside the context, pass ``options`` to the ``step`` of the optimizer, which the engine calls."""
        plan, optimizer, own = self._run.plan, self.optimizer, vars(self.optimizer).get("step")
        if plan.offload.optimizer_states != "none" or lever_that_frees_gradients(plan) is not None:
            problem = "is not supported with offloaded states or updates in backward, which do not call optimizer.step"
            raise TrainingError("optimizer.step", sorted(options), problem, "Call optimizer.step(closure)")
        vars(optimizer)["step"] = partial(optimizer.step, **options)
        try:
            yield
        finally:
            del vars(optimizer)["step"]
            if own is not None:  # such as the step that a scheduler replaced
                vars(optimizer)["step"] = own

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Inside the context, set ``requires_grad`` to False for all parameters that only other optimizers update.

        Args:
            sync_grad: has no effect. Gradients are averaged over the ranks after each backward pass, so all ranks have
                the same gradients in a step.
        """
        with seen_by_user(self._run.module).toggled_optimizer(self):
            yield
