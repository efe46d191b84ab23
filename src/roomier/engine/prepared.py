"""``roomier.prepare``: the engine for custom training loops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from roomier.api.adapt import as_module
from roomier.api.engine import StepHooks
from roomier.api.wrapped import network_of
from roomier.core.errors import PlanError, TrainingError
from roomier.device.resolve import resolve_device
from roomier.engine.build import build
from roomier.engine.eager import EagerEngine
from roomier.engine.optimizers import configure_by_name
from roomier.launch import join, place, present_launch
from roomier.optim.configured import Configured
from roomier.plan import Plan
from roomier.precision.policy import set_matmul_precision


class PreparedEngine(EagerEngine):
    """An :class:`EagerEngine` whose ``step`` clips the gradients according to the Plan, unless ``clip`` was called
    before the step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hooks = StepHooks(keeps_gradients=True)  # a loop may read gradients after the update, as in plain PyTorch
        self._clipped: set[int] = set()  # optimizers whose gradients were clipped since the last backward pass
        self._is_before_any_backward = True

    def forward_backward(  # type: ignore[override]  # the step of a custom loop takes the batch only
        self, step: Callable[[Any], Any], batches: Sequence[Any]
    ) -> Tensor | None:
        loss = super().forward_backward(lambda batch, _: step(batch), batches)
        self._is_before_any_backward = False  # even if every step returned None, which runs no backward
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
        """Update the parameters. Clip the gradients according to the Plan first, if :meth:`clip` was not called.

        Raises:
            TrainingError: there are no gradients, because no backward has run yet.
        """
        chosen = self._chosen(optimizer)
        if closure is None:  # a closure computes the gradients, and can clip them
            self._check_gradients(chosen)
            unclipped = [each for each in chosen if id(each) not in self._clipped]
            if unclipped == chosen:
                self.clip(optimizer=optimizer)  # by the norm over all optimizers, as if the loop called clip()
            else:
                for each in unclipped:
                    self.clip(optimizer=each)
        super().step(optimizer, closure)
        self._clipped.difference_update(id(each) for each in chosen)

    def _check_gradients(self, optimizers: Sequence[Optimizer]) -> None:
        if not self._is_before_any_backward:
            return
        groups = [group for each in optimizers for group in each.param_groups]
        if all(parameter.grad is None for group in groups for parameter in group["params"]):
            raise TrainingError(
                "step",
                None,
                "there are no gradients, because no backward has run yet",
                "Call engine.forward_backward(training_step, batches) before engine.step()",
            )


def prepare(
    module: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    plan: Plan | Mapping[str, Any] | str | Path | None = None,
    max_steps: int | None = None,
) -> PreparedEngine:
    """Return the engine that the Trainer uses, for a custom training loop.

    ``engine.step()`` clips the gradients according to ``plan``. If you call ``engine.clip(...)`` before
    ``engine.step()``, your call replaces this clipping. For example, you can set a different limit or read the norm
    that ``engine.clip`` returns.

    Args:
        module: any ``nn.Module``. The module is moved and converted in place.
        optimizer: one or several optimizers of the module's parameters. None creates the optimizer that ``plan`` names.
        plan: a Plan, a mapping, or the path of a YAML or JSON file. None is ``Plan()``.
        max_steps: number of optimizer steps, for a schedule that ``plan`` names. Call ``engine.scheduler.step()`` after
            each optimizer step.

    Raises:
        PlanError: there is no optimizer, both ``optimizer`` and ``plan`` define one, or ``plan`` is invalid.

    Example:
        >>> engine = roomier.prepare(model, optimizer, plan=roomier.Plan())
        >>> for batches in windows:
        ...     loss = engine.forward_backward(training_step, batches)
        ...     engine.step()
    """
    plan = Plan() if plan is None else Plan.of(plan)
    given = [] if optimizer is None else [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)

    def optimizers(blocks: Sequence[nn.Module]) -> Configured:
        if given and plan.optimizer.name is not None:
            raise PlanError(
                "optimizer", plan.optimizer.name, "an optimizer was passed as well", "Remove one of the two"
            )
        if given:
            return Configured(given)
        if plan.optimizer.name is None:
            raise PlanError("optimizer", None, "none was passed, and the plan names none", "Pass one")
        return configure_by_name(plan, network_of(wrapped), lambda: max_steps or float("inf"), blocks)

    wrapped = as_module(module)
    world = place(plan.parallel.devices, plan.parallel.num_nodes, present_launch())
    ranks = join(world, resolve_device(plan.parallel.accelerator).type)
    engine, configured = build(plan, wrapped, optimizers, PreparedEngine, ranks)
    engine.scheduler = configured.schedulers[0].scheduler if configured.schedulers else None
    set_matmul_precision(plan.precision.matmul)
    return engine
