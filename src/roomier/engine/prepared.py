"""Engines for custom training loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roomier.api.adapt import as_module
from roomier.api.engine import StepHooks
from roomier.api.module import network_of
from roomier.core.device.resolve import resolve_device
from roomier.core.errors import PlanError, TrainingError
from roomier.core.log import notice
from roomier.core.tree import map_tensors, tensors
from roomier.engine.build import build
from roomier.engine.eager import EagerEngine
from roomier.engine.facts import Facts
from roomier.engine.forward_levers import Levers
from roomier.engine.optimizers import configure_by_name
from roomier.launch import join, place, present_launch
from roomier.plan import Plan
from roomier.plan.levers import without_host_tiers
from roomier.plan.rules import refuse
from roomier.techniques.optim.configured import Configured, check_ownership, check_sharded_parameters
from roomier.techniques.parallel.parallel import Parallel
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


def loop_errors(plan: Plan) -> list[PlanError]:
    """Return an error for each setting of ``plan`` that requires the loop of a Trainer: the strategy ``"auto"``,
    context and pipeline parallelism, and seeds that depend on the step."""
    errors = []
    for name in ("context_parallel_size", "pipeline_parallel_size"):
        size = getattr(plan.parallel, name)
        if size > 1:  # implies events
            problem = "is not supported in custom loops, because no batch is known before the first step"
            errors.append(PlanError(name, size, problem, f"Use Trainer.fit, or {name}=1"))
    if not errors and plan.batch.seeding == "events":
        problem = "is not supported in custom loops, because the seeds depend on the number of the step"
        errors.append(PlanError("batch.seeding", "events", problem, "Use 'stream', or use a Trainer"))
    if plan.parallel.strategy != "auto":
        return errors
    nearest = "zero3" if plan.parallel.num_ranks > 1 else "single"
    problem = "is not supported in custom loops, because the planner requires the step and the data of a Trainer"
    action = f"Use {nearest!r}, or pass trainer.plan after a run with Trainer(strategy='auto')"
    return [*errors, PlanError("strategy", "auto", problem, action)]


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

    refuse(loop_errors(plan))
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


_LOW_PRECISION = (torch.float16, torch.bfloat16)


class ModelEngine(PreparedEngine):
    """A :class:`PreparedEngine` with separate calls for the forward pass, the backward pass and the update.

    Gradients are averaged over the ranks, as in DistributedDataParallel. Several engines can share one backward pass;
    see :meth:`chain`.

    The arguments are described in :class:`EagerEngine`.

    Attributes:
        is_sharded: whether gradients are sharded across ranks.
        reduces: whether the next backward pass reduces the gradients across the ranks. If False, the gradients
            accumulate on each rank.
    """

    def __init__(self, facts: Facts, *args: Any, parallel: Parallel, levers: Levers, **kwargs: Any) -> None:
        super().__init__(facts, *args, parallel=parallel, levers=levers, **kwargs)
        self._count_terms = None  # the loop computes the mean of a loss
        self.is_sharded = parallel.runner is not None and parallel.loss_factor == 1
        # With manual optimization, the gradients of a sharded model are already averaged.
        self._mean_factor = 1.0 if facts.is_manual else parallel.loss_factor / self.ranks.world.size
        # Autocast returns 16-bit outputs, from which the loop would compute a 16-bit loss. If the loss is computed in
        # chunks, the output is a placeholder for logits that are never materialized, so it is not converted.
        self._widens = facts.precision.autocast_dtype is not None and levers.output_layer is None
        # The script computes the loss after the forward pass, so contexts that watch the loss do not report before the
        # end of the first backward pass.
        watches = levers.forward_context.watches
        self._loss_watches: list[Any] = [each for each in watches if getattr(each, "is_of_loss", False)]
        watches[:] = [each for each in watches if each not in self._loss_watches]
        self.reduces = True
        self._begins_window = True
        self._is_chained = False
        self._is_in_backward = False

    def call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the output of the network. Outputs in 16 bits are converted to float32 under autocast.

        Args:
            args: positional arguments of the ``forward`` method.
            kwargs: keyword arguments of the ``forward`` method.

        Raises:
            TrainingError: the network is sharded, and inference mode is enabled.
        """
        if not self.allows_inference_mode and torch.is_inference_mode_enabled():
            problem = "is not supported with sharded models, whose buffers are also used in training"
            raise TrainingError("torch.inference_mode", True, problem, "Use torch.no_grad()")
        is_training = torch.is_grad_enabled()
        self._freed_gradients = False
        for begin_micro_batch in self._moments.begin_micro_batch:
            begin_micro_batch(is_first=is_training and self._begins_window, is_last=self.reduces or not is_training)
        self._begins_window &= not is_training
        runner = self._parallel.runner
        with self._context():
            output = (
                self.module(*args, **kwargs)
                if runner is None
                else runner(lambda args, kwargs: self.module(*args, **kwargs), args, kwargs)
            )
        if self._widens:
            output = map_tensors(lambda each: each.float() if each.dtype in _LOW_PRECISION else each, output)
        if is_training and self._is_chained:
            self._watch(output)
        return output

    def chain(self, other: ModelEngine) -> None:
        """Combine the backward passes of this engine and ``other`` into one, with the same loss scale.

        One backward pass can compute the gradients of several models, such as a generator and a discriminator. An
        engine reduces its gradients only if the backward pass reaches an output of its network.
        """
        self.hooks.backward = other._run_backward
        other.scaler, other._unscaled = self.scaler, self._unscaled
        self._is_chained = other._is_chained = True

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss if self._mean_factor == 1 else loss * self._mean_factor, *args, **kwargs)

    def _run_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if not self._is_chained:
            super()._run_backward(loss, *args, **kwargs)
            self._end_watches()
            return
        self._is_before_any_backward = self._is_in_backward = False
        with self._backward_context():  # only sharded models prepare a backward pass, and these are never chained
            self.hooks.backward(loss, *args, **kwargs)
        if self._is_in_backward:
            for end_backward in self._moments.end_backward:
                end_backward()
            self._end_watches()

    def _end_watches(self) -> None:
        watches, self._loss_watches = self._loss_watches, []
        for each in watches:
            each.report()

    def _watch(self, output: Any) -> None:
        if not any(each.requires_grad for each in self.module.parameters()):
            return
        found = list(tensors(output))
        if not found:
            problem = "contains no tensor, so roomier cannot determine which models a backward pass reaches"
            action = "Return a tensor, or a list, tuple or dict of tensors, or prepare one model per Accelerator"
            raise TrainingError("output of the model", type(output).__name__, problem, action)
        for each in found:
            if each.requires_grad:
                each.register_hook(self._note_backward)  # type: ignore[no-untyped-call]

    def _note_backward(self, _: Tensor) -> None:
        self._is_in_backward = True

    def owns_any(self, parameters: Sequence[Tensor]) -> bool:
        """Return whether ``parameters`` contains a parameter of the network."""
        own = {id(each) for each in self.module.parameters()}
        return any(id(each) in own for each in parameters)

    def begin_clip(self, parameters: Sequence[Tensor]) -> None:
        """Unscale the gradients of the optimizers that update any of ``parameters``. In this step, the clipping
        settings of the Plan do not apply to these optimizers."""
        own = {id(each) for each in parameters}
        for optimizer in self.optimizers:
            if any(id(each) in own for group in optimizer.param_groups for each in group["params"]):
                self.unscale(optimizer)
                self._clipped.add(id(optimizer))

    def clip_norm_of(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Scale the gradients of ``parameters`` to a norm of at most ``max_norm``, and return the norm before clipping
        (0-dim).

        Raises:
            TrainingError: ``norm_type`` is not 2, and the gradients are sharded.
        """
        if norm_type == 2:
            norm = self._updates.clip(parameters, max_norm, "norm")
            assert norm is not None
            return norm
        if self.is_sharded:
            problem = "is not supported for sharded gradients"
            raise TrainingError("norm_type", norm_type, problem, "Use norm_type=2, or strategy='ddp'")
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_values_of(self, parameters: Sequence[Tensor], max_value: float) -> None:
        """Clamp each element of the gradients of ``parameters`` to ``[-max_value, max_value]``."""
        self._updates.clip(parameters, max_value, "value")

    def step(self, optimizer: Optimizer | None = None, closure: Any = None) -> None:
        super().step(optimizer, closure)
        self._begins_window = True

    def _check_gradients(self, optimizers: Sequence[Optimizer]) -> None:
        if self.ranks.is_alone or not self._is_before_any_backward:
            return
        groups = [group for each in optimizers for group in each.param_groups]
        if any(parameter.grad is not None for group in groups for parameter in group["params"]):
            problem = "was called, but this method does not average the gradients over the ranks"
            raise TrainingError("loss.backward", None, problem, "Call accelerator.backward(loss)")

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Add an optimizer that was created after the engine.

        Raises:
            RoomierError: the optimizer has parameters of another model, or does not support sharded parameters.
            PlanError: the optimizer states are offloaded.
        """
        if self._acts:
            problem = "was created after the model was prepared, so its states cannot be offloaded"
            raise PlanError(
                "optimizer", type(optimizer).__name__, problem, "Pass the model and the optimizer to one prepare() call"
            )
        check_ownership(Configured([optimizer]), self.module.parameters())
        check_sharded_parameters([optimizer])
        self.optimizers.append(optimizer)
