"""Eager engine: runs forward and backward as ordinary PyTorch code on this rank's device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from roomier.api.engine import Step, StepHooks
from roomier.core.device.transfer import BatchMover
from roomier.core.errors import CheckpointError, TrainingError
from roomier.core.ranks import announced
from roomier.engine.facts import Facts
from roomier.engine.forward_levers import Levers
from roomier.engine.losses import CountTerms, complex_loss_error, loss_of, term_weights, zero_gradients
from roomier.engine.moments import Moments
from roomier.engine.optimizer_state import (
    check_optimizer,
    check_values,
    load_optimizer,
    optimizer_state,
    parameter_names,
    shard_like,
    state_places,
)
from roomier.engine.updates import Updates
from roomier.launch.failure import is_of_lost_peer
from roomier.plan import BatchPlan
from roomier.techniques.parallel.parallel import Parallel
from roomier.techniques.precision.scaler import LossScaler


@dataclass(slots=True)
class Window:
    """State of one optimizer step while its micro-batches run.

    Attributes:
        weights: for each micro-batch, its fraction of the loss terms in the global batch. Empty if losses are summed
            without weights.
        loss: sum of the weighted losses so far (0-dim, detached).
        left_out: weights of the micro-batches whose step returned None.
    """

    step: Step
    size: int
    weights: tuple[float | Tensor, ...]
    loss: Tensor | None = None
    left_out: tuple[float | Tensor, ...] = ()


class EagerEngine:
    """Engine for eager execution. See :class:`roomier.api.engine.Engine` for the contract of each method.

    Args:
        facts: the network with its blocks, device, precision and ranks.
        optimizers: the optimizers of the network's parameters.
        batch_plan: settings for accumulation and clipping.
        count_terms: function that returns the number of terms over which a batch's loss is averaged, or the number of
            ranks that compute a sum over the same samples; None for one such rank.
        parallel: wrapper that distributes the network across ranks.
        levers: memory techniques installed in the network's ``forward`` methods, such as recomputation.
        updates: object that determines when the optimizers step: during the backward pass or after it.
    """

    def __init__(
        self,
        facts: Facts,
        optimizers: Sequence[Optimizer],
        *,
        batch_plan: BatchPlan,
        count_terms: CountTerms | None,
        parallel: Parallel,
        levers: Levers,
        updates: Updates,
    ) -> None:
        device, precision = facts.device, facts.precision
        self.module = facts.network
        self.blocks: Sequence[nn.Module] = facts.blocks
        self.ranks = facts.ranks
        self.optimizers = list(optimizers)
        self.device = device
        self.hooks = StepHooks()
        self.scheduler: LRScheduler | None = None  # the scheduler that the Plan names, for custom loops
        unscale_away = updates.parameters.unscale_away if updates.acts else None
        self.scaler = LossScaler(device, unscale_away, is_on=precision.scales_loss)
        self._batch_plan = batch_plan
        self._count_terms = count_terms
        self._parallel = parallel
        self._loss_factor = parallel.loss_factor
        self.levers = levers
        self._updates, self._acts = updates, updates.acts
        self._moments = Moments(parallel, levers, updates)
        self._context = levers.forward_context
        self._backward_context = levers.backward_context
        self._to_device = (BatchMover(device),) if device.type != "cpu" else ()
        self._convert = (precision.convert_batch,) if precision.weight_dtype else ()
        self._unscaled: set[int] = set()
        self._freed_gradients = False
        if updates.acts and (watch := updates.watch()) is not None:
            self.watch(watch)

    def forward_backward(self, step: Step, batches: Sequence[Any]) -> Tensor | None:
        window = self._begin_window(step, batches)
        try:
            for index, batch in enumerate(batches):
                self._micro_batch(window, index, self._start_micro_batch(index, batch))
        except BaseException:
            self._abandon_window()
            raise
        return self._end_window(window)

    def step_with_closure(
        self, step: Step, batches: Sequence[Any], update: Callable[[Callable[[], Tensor | None]], Any]
    ) -> Tensor | None:
        window, last = self._begin_window(step, batches), len(batches) - 1
        try:
            for index, batch in enumerate(batches[:-1]):
                self._micro_batch(window, index, self._start_micro_batch(index, batch))
            on_device = self._start_micro_batch(last, batches[-1])
            earlier = window.loss, window.left_out  # of the micro-batches before the last

            @torch.enable_grad()
            def closure() -> Tensor | None:
                window.loss, window.left_out = earlier
                loss = self._micro_batch(window, last, on_device)
                if window.left_out:  # the optimizer may update the parameters after this call
                    self._weigh_again(window)
                return loss

            if not self.hooks.is_skipping():
                update(closure)
        except BaseException:
            self._abandon_window()
            raise
        return self._end_window(window)

    def _begin_window(self, step: Step, batches: Sequence[Any]) -> Window:
        hooks = self.hooks
        if (
            hooks.zero_grad is None
            and not self._freed_gradients
            and (not hooks.frees_gradients or any(each.grad is not None for each in self._parameters()))
        ):
            self.zero_grad()
        self._freed_gradients = False
        weights: tuple[float | Tensor, ...] = ()
        if not (len(batches) == 1 and self.ranks.is_alone) and self._count_terms is not None:
            weights = term_weights(self._count_terms, batches, self.ranks)
        window = Window(step, len(batches), weights)
        for begin_step in self._moments.begin_step:  # no error can occur between this loop and the first micro-batch
            begin_step(self.optimizers, batches)
        return window

    def _end_window(self, window: Window) -> Tensor | None:
        for end_gradients in self._moments.end_gradients:
            end_gradients()
        if window.left_out:
            self._weigh_again(window)
        return window.loss

    def _abandon_window(self) -> None:
        for abandon in self._moments.abandon:
            abandon()

    def _start_micro_batch(self, index: int, batch: Any) -> Any:
        """End the previous micro-batch, if any. Move micro-batch ``index`` to the device and call ``batch_start``."""
        hooks = self.hooks
        if index:
            hooks.batch_end(index - 1)
        on_device = self.move(batch)
        hooks.batch_start(on_device, index)
        return on_device

    def _micro_batch(self, window: Window, index: int, on_device: Any) -> Tensor | None:
        """Run forward and backward for one micro-batch. The activations are freed when this method returns.

        Returns:
            The weighted loss on which backward ran (0-dim, detached). None if there is no loss or no loss term.
        """
        hooks = self.hooks
        for begin_micro_batch in self._moments.begin_micro_batch:
            is_first = index == 0 and hooks.zero_grad is None  # a zero_grad hook may keep the gradients
            begin_micro_batch(is_first=is_first, is_last=index == window.size - 1)
        runner = self._parallel.runner  # DDP replaces the runner after the first step
        run_step, context = window.step if runner is None else partial(runner, window.step), self._context
        if context.make is nullcontext and not context.watches:
            output = run_step(on_device, index)
        else:
            with context():
                output = run_step(on_device, index)
        if hooks.zero_grad is not None and index == 0:
            for optimizer in self.optimizers:
                hooks.zero_grad(optimizer)
        loss = loss_of(output)
        if loss is None:
            self._check_may_be_left_out()
            if self.ranks.is_alone:  # several ranks skip the whole window, whose gradients are discarded
                window.left_out += window.weights[index : index + 1]
            return None
        if window.weights:
            weight = window.weights[index]
            if not isinstance(weight, Tensor) and weight == 0:
                self._add_no_terms(window, loss)
                return None
            loss = loss * weight
        scaled = loss if self._loss_factor == 1 else loss * self._loss_factor
        self.backward(scaled)
        detached = loss.detach()
        hooks.batch_loss(detached, index)
        window.loss = detached if window.loss is None else window.loss + detached
        return detached if scaled is loss else scaled.detach()

    def _add_no_terms(self, window: Window, loss: Tensor) -> None:
        # A micro-batch without loss terms has the loss 0/0 and does not contribute, so its backward pass is skipped. If
        # other ranks wait for this rank's gradients, backward runs and produces zeros instead.
        if self.ranks.is_alone:
            return
        with zero_gradients(loss) as zero:
            self.backward(zero)
        window.loss = zero.detach() if window.loss is None else window.loss

    def _check_may_be_left_out(self) -> None:
        if self.ranks.is_alone or self.hooks.is_skipping():
            return
        raise TrainingError(
            "training_step",
            None,
            f"returned no loss on rank {self.ranks.world.rank}, but every rank must return a loss, because all ranks "
            "reduce gradients together",
            "Return a zero loss that depends on the parameters, such as 0.0 * loss",
        )

    def _weigh_again(self, window: Window) -> None:
        # The step returned None for some micro-batches. The loss is the mean over the terms of the other micro-batches,
        # so the weights of the other micro-batches were too small.
        if window.loss is None:
            return
        factor = 1 / (1 - sum(window.left_out))
        for parameter in self._parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        if self._acts:
            self._updates.parameters.scale_away(factor)
        window.loss, window.left_out = window.loss * factor, ()

    def move(self, batch: Any) -> Any:
        if self.hooks.transfer is not None:
            batch = self.hooks.transfer(batch)
        else:
            for move in self._to_device:
                batch = move(batch)
        for convert in self._convert:
            batch = convert(batch)
        return batch

    def forward(self, step: Callable[[Any], Any], batch: Any) -> Any:
        self._freed_gradients = False  # as in settle()
        for begin_micro_batch in self._moments.begin_micro_batch:
            begin_micro_batch(is_first=False, is_last=True)
        runner = self._parallel.runner
        with self._context():
            return step(batch) if runner is None else runner(step, batch)

    @property
    def allows_inference_mode(self) -> bool:
        """True if :meth:`forward` supports ``torch.inference_mode``. If False, use ``torch.no_grad``."""
        return self._parallel.allows_inference_mode

    @property
    def trace(self) -> int:
        """Hash of the executed units. It must be equal on all ranks; see ``Parallel.trace``."""
        return self._parallel.trace

    def settle(self) -> None:
        """Complete pending updates, and free unsharded parameters."""
        self._freed_gradients = False  # an evaluation that follows can run a backward pass, which creates gradients
        self._updates.settle()
        self._parallel.release()

    def complete_updates(self) -> None:
        """Complete pending updates."""
        self._updates.settle()

    def trained_parameters_changed(self) -> None:
        """Account for parameters that were frozen or unfrozen since the last step. Every rank must call this method."""
        self._parallel.trained_parameters_changed()

    def watch(self, context: AbstractContextManager[Any]) -> None:
        """Enter ``context`` around the next training forward pass only."""
        self.levers.forward_context.watches.append(context)

    def close(self) -> None:
        """Restore the original ``forward`` methods, and close the updates. Call this after the last step."""
        self._updates.close()
        self.levers.undo()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        hooks = self.hooks
        for before in hooks.before_backward:
            before(loss)
        if self.scaler.is_on:
            loss = self.scaler.scale(loss)
        try:
            if self._acts:
                run = partial(self._run_backward, loss, *args, **kwargs)
                self._updates.backward(run, hooks.change_gradient)
            else:
                self._run_backward(loss, *args, **kwargs)
        except RuntimeError as error:
            if loss.is_complex() and not (args or kwargs):
                raise complex_loss_error(loss) from None
            if is_of_lost_peer(error) and (cause := announced()):
                raise cause from error
            raise
        for after in hooks.after_backward:
            after()

    def _run_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        moments = self._moments
        for begin_backward in moments.begin_backward:
            begin_backward()
        if self._backward_context is nullcontext:
            self.hooks.backward(loss, *args, **kwargs)
        else:
            with self._backward_context():
                self.hooks.backward(loss, *args, **kwargs)
        for end_backward in moments.end_backward:
            end_backward()

    def unscale(self, optimizer: Optimizer | None = None) -> None:
        """Divide the gradients by the loss scale. A repeated call before the next step has no effect."""
        if not self.scaler.is_on:
            return
        for each in self._chosen(optimizer):
            if id(each) not in self._unscaled:
                self.scaler.unscale(each)
                self._unscaled.add(id(each))

    def change_gradients(self, optimizer: Optimizer | None = None) -> None:
        if change := self.hooks.change_gradient:
            self._updates.change(self._parameters(optimizer), change)

    def clip(
        self, max_norm: float | None = None, algorithm: str | None = None, *, optimizer: Optimizer | None = None
    ) -> Tensor | None:
        limit = self._batch_plan.gradient_clip_val if max_norm is None else max_norm
        if limit is None:
            return None
        self.unscale(optimizer)
        algorithm = algorithm or self._batch_plan.gradient_clip_algorithm
        return self._updates.clip([*self._parameters(optimizer)], limit, algorithm)

    def step(self, optimizer: Optimizer | None = None, closure: Any = None) -> None:
        moments, scaler = self._moments, self.scaler
        for begin_update in moments.begin_update:
            begin_update(closure)
        for each in self.optimizers if optimizer is None else [optimizer]:
            if self._acts:
                self.unscale(each)
                self._updates.step(each, scaler, closure)
                self._unscaled.discard(id(each))
            elif scaler.is_on:
                scaler.step(each, closure)
                self._unscaled.discard(id(each))
            elif closure is None:  # the step of some optimizers accepts no argument
                each.step()
            else:
                each.step(closure)
        for end_update in moments.end_update:
            end_update()
        # GradScaler.update() clears the record of the optimizers that were unscaled. Therefore, it is called only after
        # every optimizer that was unscaled for clipping has stepped.
        if scaler.is_on and not self._unscaled:
            scaler.update()
        if not self.hooks.keeps_gradients:
            self.free_gradients(optimizer)

    def _chosen(self, optimizer: Optimizer | None) -> list[Optimizer]:
        return self.optimizers if optimizer is None else [optimizer]

    def leave_out_update(self) -> None:
        """Skip the update of this step. The loss scale does not change."""
        state = self.scaler.state()
        self.scaler.update()  # without this call, the scaler would not unscale the next gradients
        self.scaler.load(state)
        self._unscaled.clear()

    def zero_grad(self) -> None:
        """Free the gradients of the parameters of all optimizers."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def free_gradients(self, optimizer: Optimizer | None = None) -> None:
        for each in self.optimizers if optimizer is None else [optimizer]:
            each.zero_grad()
        self._freed_gradients = True

    def _parameters(self, optimizer: Optimizer | None = None) -> Iterator[Tensor]:
        chosen = [optimizer] if optimizer else self.optimizers
        return (p for each in chosen for group in each.param_groups for p in group["params"])

    def weights(self) -> dict[str, Any]:
        self.settle()  # a checkpoint stores the shards, not the unsharded parameters
        return self.module.state_dict()

    def state(self) -> dict[str, Any]:
        self.settle()
        names = parameter_names(self.module)
        return {
            "module": self.weights(),
            "optimizers": [optimizer_state(optimizer, names) for optimizer in self.optimizers],
            "scaler": self.scaler.state(),
            **self._updates.state(),
        }

    def check(self, state: Mapping[str, Any]) -> None:
        self.settle()
        names, saved = parameter_names(self.module), state["optimizers"]
        if len(saved) != len(self.optimizers):
            problem = f"the checkpoint has {len(saved)} optimizers, but this run has {len(self.optimizers)}"
            action = "Configure the same optimizers as in the saved run"
            raise CheckpointError("optimizer", [type(each).__name__ for each in self.optimizers], problem, action)
        for index, (optimizer, stored) in enumerate(zip(self.optimizers, saved, strict=True)):
            check_optimizer(optimizer, stored, names)
            check_values(optimizer, stored, names, f"optimizers[{index}]")

    def places(self, stored: Sequence[Mapping[str, Any]], **kinds: Any) -> list[dict[str, Any]]:
        names, away = parameter_names(self.module), self._updates.away
        found = [
            state_places(optimizer, state, names, away=away, **kinds)
            for optimizer, state in zip(self.optimizers, stored, strict=True)
        ]
        states: dict[str, Any] = {name: state for each in found for name, state in each["state"].items()}
        self._updates.place({parameter: states[name] for parameter, name in names.items() if name in states})
        return found

    def load_weights(self, weights: Mapping[str, Any]) -> None:
        own = self.weights()
        self.module.load_state_dict({name: shard_like(own.get(name), each) for name, each in weights.items()})

    def load(self, state: dict[str, Any]) -> None:
        self.settle()
        self.load_weights(state["module"])
        names = parameter_names(self.module)
        for optimizer, stored in zip(self.optimizers, state["optimizers"], strict=True):
            load_optimizer(optimizer, stored, names, self._updates.away)
        self.scaler.load(state["scaler"])
        self._updates.load(state, self.device)
