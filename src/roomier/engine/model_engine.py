"""Engine for a model that a custom loop, such as a script for Accelerate, calls directly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roomier.core.errors import PlanError, TrainingError
from roomier.core.tree import map_tensors, tensors
from roomier.engine.facts import Facts
from roomier.engine.forward_levers import Levers
from roomier.engine.parallel import Parallel
from roomier.engine.prepared import PreparedEngine
from roomier.engine.updates import Updates
from roomier.plan import BatchPlan
from roomier.techniques.optim.configured import Configured, check_ownership, check_sharded_parameters

_LOW_PRECISION = (torch.float16, torch.bfloat16)


class ModelEngine(PreparedEngine):
    """A :class:`PreparedEngine` with separate calls for the forward pass, the backward pass and the update.

    Gradients are averaged over the ranks, as in DistributedDataParallel. Several engines can share one backward pass;
    see :meth:`chain`.

    Args:
        facts: the network with its blocks, device, precision and ranks.
        optimizers: the optimizers of the network's parameters.
        batch_plan: settings for clipping.
        count_terms: not used, because the loop computes the mean of a loss.
        parallel: wrapper that distributes the network across ranks.
        levers: memory techniques installed in the network's ``forward`` methods.
        updates: object that determines where the optimizer states are stored.

    Attributes:
        is_sharded: whether gradients are sharded across ranks.
        reduces: whether the next backward pass reduces the gradients across the ranks. If False, the gradients
            accumulate on each rank.
    """

    def __init__(
        self,
        facts: Facts,
        optimizers: Sequence[Optimizer],
        *,
        batch_plan: BatchPlan,
        count_terms: Any,
        parallel: Parallel,
        levers: Levers,
        updates: Updates,
    ) -> None:
        super().__init__(
            facts,
            optimizers,
            batch_plan=batch_plan,
            count_terms=None,
            parallel=parallel,
            levers=levers,
            updates=updates,
        )
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
            output = self.module(*args, **kwargs) if runner is None else runner(self._call_module, args, kwargs)
        if self._widens:
            output = map_tensors(_widened, output)
        if is_training and self._is_chained:
            self._watch(output)
        return output

    def _call_module(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return self.module(*args, **kwargs)

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


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _LOW_PRECISION else tensor
