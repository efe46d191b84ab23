"""Engines for custom training loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from roomier.api.engine import StepHooks
from roomier.api.lightning_module import as_module
from roomier.api.module import network_of
from roomier.core.device.resolve import resolve_device
from roomier.core.errors import PlanError, TrainingError
from roomier.core.log import notice
from roomier.engine.build import build
from roomier.engine.eager import EagerEngine
from roomier.engine.optimizers import configure_by_name
from roomier.launch import join, place, present_launch
from roomier.plan import Plan
from roomier.plan.lever_rules import without_host_tiers
from roomier.plan.rules import refuse
from roomier.techniques.optim.configured import Configured
from roomier.techniques.precision.policy import set_matmul_precision


class PreparedEngine(EagerEngine):
    """An :class:`EagerEngine` whose ``step`` clips the gradients according to the Plan, unless ``clip`` was called
    before the step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hooks = StepHooks(keeps_gradients=True)  # a loop can read gradients after the update, as in plain PyTorch
        self._clipped: set[int] = set()  # optimizers whose gradients were clipped since the last backward pass
        self._is_before_any_backward = True

    def forward_backward(  # type: ignore[override] # the step of a custom loop takes only the batch
        self, step: Callable[[Any], Any], batches: Sequence[Any]
    ) -> Tensor | None:
        loss = super().forward_backward(lambda batch, _: step(batch), batches)
        self._is_before_any_backward = False  # even if every step returned None and no backward pass ran
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
        """Update the parameters. If :meth:`clip` was not called, clip the gradients according to the Plan first.

        Raises:
            TrainingError: there are no gradients, because no backward pass has run yet.
        """
        chosen = self._chosen(optimizer)
        if closure is None:  # a closure computes the gradients, and can clip them
            self._check_gradients(chosen)
            unclipped = [each for each in chosen if id(each) not in self._clipped]
            if unclipped == chosen:
                self.clip(optimizer=optimizer)  # clips by the norm over all optimizers, as clip() does
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
            action = "Call engine.forward_backward(training_step, batches) before engine.step()"
            raise TrainingError("step", None, "there are no gradients, because no backward pass has run yet", action)


def planner_errors(plan: Plan) -> list[PlanError]:
    """Return a list with one error if ``plan`` requires the planner, which custom loops do not run; otherwise, an empty
    list."""
    if plan.parallel.strategy != "auto":
        return []
    nearest = "zero3" if plan.parallel.num_ranks > 1 else "single"
    problem = "is not supported in custom loops, because the planner requires the step and the data of a Trainer"
    action = f"Use {nearest!r}, or pass trainer.plan after a run with Trainer(strategy='auto')"
    return [PlanError("strategy", "auto", problem, action)]


AnyPrepared = TypeVar("AnyPrepared", bound=PreparedEngine)


def build_prepared(
    plan: Plan,
    module: nn.Module,
    given: Sequence[Optimizer],
    engine_class: type[AnyPrepared],
    *,
    max_steps: int | None = None,
    allows_none: bool = False,
) -> tuple[AnyPrepared, Configured]:
    """Join the ranks of ``plan`` and build an engine for ``module``.

    Args:
        plan: Plan whose techniques are applied to ``module``.
        module: any ``nn.Module``, which is moved, converted and sharded in place.
        given: the optimizers of the parameters of ``module``. If ``module`` is sharded, the optimizers receive the
            sharded parameters.
        engine_class: the class of the engine.
        max_steps: number of optimizer steps, for a schedule that ``plan`` names.
        allows_none: if True, allow a model without an optimizer.

    Raises:
        PlanError: there is no optimizer, both ``given`` and ``plan`` define one, an optimizer already had states when
            its parameters were sharded, or the strategy is ``"auto"``.
    """

    def optimizers(blocks: Sequence[nn.Module]) -> Configured:
        if given and plan.optimizer.name is not None:
            raise PlanError(
                "optimizer", plan.optimizer.name, "an optimizer was passed as well", "Remove one of the two"
            )
        if given or (allows_none and plan.optimizer.name is None):
            replace_parameters()
            return Configured(list(given))
        if plan.optimizer.name is None:
            raise PlanError("optimizer", None, "no optimizer was passed, and the plan names none", "Pass an optimizer")
        return configure_by_name(plan, network, lambda: max_steps or float("inf"), blocks)

    refuse(planner_errors(plan))
    if plan.choice.memory_budget_bytes is not None:
        notice("memory_budget: the memory of a custom loop is not forecast, so the limit has no effect")
    wrapped = as_module(module)
    network = network_of(wrapped)
    replace_parameters = replacement_of_parameters(network, given)
    world = place(plan.parallel.devices, plan.parallel.num_nodes, present_launch())
    device_type = resolve_device(plan.parallel.accelerator).type
    plan, ranks = without_host_tiers(plan, device_type), join(world, device_type)
    built = build(plan, wrapped, optimizers, engine_class, ranks)
    set_matmul_precision(plan.precision.matmul)
    return built


def replacement_of_parameters(network: nn.Module, optimizers: Sequence[Optimizer]) -> Callable[[], None]:
    """Return a function that updates ``optimizers`` after parameters of ``network`` were replaced. Sharding replaces
    parameters with new parameters that have the same names. The returned function passes the new parameters to the
    optimizers.
    """
    names = {id(each): name for name, each in network.named_parameters(remove_duplicate=False)}

    def replace_parameters() -> None:
        now = dict(network.named_parameters(remove_duplicate=False))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                before = list(group["params"])
                group["params"][:] = [now.get(names.get(id(each), ""), each) for each in before]
                replaced = [old for old, new in zip(before, group["params"], strict=True) if new is not old]
                if any(each in optimizer.state for each in replaced):
                    problem = "has states of parameters that are now sharded"
                    action = "Call prepare before the first step, and load saved states afterwards"
                    raise PlanError("optimizer", type(optimizer).__name__, problem, action)

    return replace_parameters
