"""``roomier.prepare``, which returns an engine for a custom loop, or the prepared objects of an Accelerator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from roomier.core.errors import PlanError
from roomier.engine.prepared import PreparedEngine, build_prepared
from roomier.plan import Plan
from roomier.prepared.accelerator import Accelerator

PlanSource = Plan | Mapping[str, Any] | str | Path | None


@overload
def prepare(
    module: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    plan: PlanSource = None,
    max_steps: int | None = None,
) -> PreparedEngine: ...


@overload
def prepare(module: Any, optimizer: Any, *objects: Any, plan: PlanSource = None) -> tuple[Any, ...]: ...


def prepare(
    module: Any,
    optimizer: Any = None,
    *objects: Any,
    plan: PlanSource = None,
    max_steps: int | None = None,
) -> Any:
    """Return the engine that the Trainer uses, or prepared objects for a custom training loop.

    With a model and optimizers, the result is the engine. ``engine.step()`` clips the gradients according to ``plan``.
    If you call ``engine.clip(...)`` before ``engine.step()``, your call replaces this clipping. For example, you can
    set a different limit or read the norm that ``engine.clip`` returns.

    If a DataLoader or a scheduler is among the arguments, the result is the tuple of prepared objects that
    ``Accelerator(plan=plan).prepare`` returns, in the same order. ``model.accelerator`` is the Accelerator, with
    ``backward``, ``accumulate``, ``gather_for_metrics``, ``print`` and ``save``.

    Args:
        module: any ``nn.Module``. The module is moved and converted in place.
        optimizer: one or more optimizers of the module's parameters. If None, the optimizer that ``plan`` names is
            created.
        objects: DataLoaders, schedulers, and additional models and optimizers, in any order.
        plan: a Plan, a mapping, or the path of a YAML or JSON file. None is ``Plan()``.
        max_steps: number of optimizer steps in the run, for the learning rate schedule that ``plan`` names. Call
            ``engine.scheduler.step()`` after each optimizer step.

    Raises:
        PlanError: neither ``optimizer`` nor ``plan`` defines an optimizer, both define one, or ``plan`` is invalid.

    Example:
        >>> engine = roomier.prepare(model, optimizer, plan=roomier.Plan())
        >>> for batches in windows:
        ...     loss = engine.forward_backward(training_step, batches)
        ...     engine.step()
        >>> model, optimizer, loader = roomier.prepare(model, optimizer, loader)
    """
    if any(isinstance(each, (DataLoader, LRScheduler)) for each in (module, optimizer, *objects)):
        if max_steps is not None:
            problem = "is not supported together with a loader or scheduler"
            raise PlanError("max_steps", max_steps, problem, "Create the scheduler for this number of steps")
        if isinstance(optimizer, (list, tuple)):
            problem = "is a list, but a loader or scheduler was passed as well"
            raise PlanError("optimizer", len(optimizer), problem, "Pass each optimizer as a separate argument")
        others = objects if optimizer is None else (optimizer, *objects)
        return Accelerator(plan=plan).prepare(module, *others)
    if objects:
        action = "Pass several optimizers as a list, or pass a DataLoader or a scheduler as well"
        raise PlanError("prepare", objects, "is neither a DataLoader nor a scheduler", action)
    given = [] if optimizer is None else [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    plan = Plan() if plan is None else Plan.of(plan)
    engine, configured = build_prepared(plan, module, given, PreparedEngine, max_steps=max_steps)
    engine.scheduler = configured.schedulers[0].scheduler if configured.schedulers else None
    return engine
