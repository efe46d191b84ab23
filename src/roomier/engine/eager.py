"""The eager engine: forward and backward as PyTorch runs them, on this rank's device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from roomier.api.engine import Step, StepHooks
from roomier.core.errors import CheckpointError, TrainingError
from roomier.core.ranks import Ranks
from roomier.core.transfer import BatchMover
from roomier.engine.levers import Levers
from roomier.engine.no_terms import zero_gradients
from roomier.engine.optimizer_form import check_values
from roomier.engine.optimizer_state import (
    check_optimizer,
    cut_like,
    load_optimizer,
    optimizer_state,
    parameter_names,
)
from roomier.engine.parallel import Parallel
from roomier.engine.step_in_backward import StepInBackward
from roomier.plan import BatchPlan
from roomier.precision.policy import Precision
from roomier.precision.scaler import LossScaler, NoScale

CountTerms = Callable[[Any], int | Tensor]


@dataclass
class _Window:
    """The micro-batches of one optimizer step, while they run.

    Attributes:
        index: of the micro-batch that runs.
        last_loss: the loss that its backward ran on, weighted (0-dim, detached); None if its step returned None.
        weights: the share of each in the terms of all; None where losses are added as they are.
        loss: of those that ran.
        left_out: the weights of those whose step returned None.
    """

    step: Step
    size: int
    index: int = -1
    last_loss: Tensor | None = None
    weights: Sequence[float | Tensor] | None = None
    loss: Tensor | None = None
    left_out: list[float | Tensor] = field(default_factory=list)


class EagerEngine:
    """See :class:`roomier.api.engine.Engine` for the contract.

    Args:
        module: whose parameters are trained and stored.
        ranks: among which a batch is divided.
        parallel: what the module was made into for several ranks; None for one.
        levers: what works inside its forward.
        updates: where the optimizers step in the backward; None where they step after it.
        batch_plan: accumulation and clipping.
        count_terms: how many terms the loss of a micro-batch is the mean of; None where it is a sum.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        device: torch.device,
        precision: Precision,
        batch_plan: BatchPlan,
        count_terms: CountTerms | None,
        ranks: Ranks,
        parallel: Parallel | None = None,
        levers: Levers | None = None,
        updates: StepInBackward | None = None,
    ) -> None:
        self.module = module
        self.ranks = ranks
        self.optimizers = list(optimizers)
        self.device = device
        self.precision = precision
        self.hooks = StepHooks()
        self.scheduler: LRScheduler | None = None  # the one the Plan names, for loops of one's own
        self.scaler = LossScaler(device) if precision.scales_loss else NoScale(device)
        self._batch_plan = batch_plan
        self._count_terms = count_terms
        self._parallel = parallel
        self._loss_factor = 1 if parallel is None else parallel.loss_factor
        self.levers = levers
        self._updates = updates
        self._recompute = None if levers is None else levers.recompute
        self._context = precision.forward_context() if levers is None else levers.forward_context
        self._backward_context = nullcontext if levers is None else levers.backward_context
        self._to_device = BatchMover(device) if device.type != "cpu" else None
        self._converts = precision.weight_dtype is not None
        self._unscaled: set[int] = set()
        self._freed_gradients = False

    def forward_backward(self, step: Step, batches: Sequence[Any]) -> Tensor | None:
        window = self._begin_window(step, batches)
        try:
            for batch in batches:
                self._micro_batch(window, self._start_micro_batch(window, batch))
        except BaseException:
            self._abandon_window()
            raise
        return self._end_window(window)

    def step_with_closure(
        self, step: Step, batches: Sequence[Any], update: Callable[[Callable[[], Tensor | None]], Any]
    ) -> Tensor | None:
        window = self._begin_window(step, batches)
        try:
            for batch in batches[:-1]:
                self._micro_batch(window, self._start_micro_batch(window, batch))
            on_device = self._start_micro_batch(window, batches[-1])
            if not self.hooks.is_skipping():
                update(_Closure(self, window, on_device))
        except BaseException:
            self._abandon_window()
            raise
        return self._end_window(window)

    def _begin_window(self, step: Step, batches: Sequence[Any]) -> _Window:
        if self.hooks.zero_grad is None and not self._freed_gradients:
            self.zero_grad()
        self._freed_gradients = False
        if self._updates is not None:
            self._updates.begin_step(len(batches))
        window = _Window(step, len(batches))
        window.weights = None if self.ranks.is_alone and window.size == 1 else self._weights(batches)
        if self._recompute is not None:  # last: what it begins to measure, an error behind it ends
            self._recompute.begin_step(self.optimizers, batches)
        return window

    def _end_window(self, window: _Window) -> Tensor | None:
        if self._recompute is not None:
            self._recompute.end_step()
        if window.left_out and window.loss is not None:
            self._weigh_again(window)
        return window.loss

    def _abandon_window(self) -> None:
        if self._recompute is not None:
            self._recompute.abandon_step()

    def _start_micro_batch(self, window: _Window, batch: Any) -> Any:
        """The next micro-batch on the device, its hooks called."""
        hooks = self.hooks
        window.index += 1
        if window.index:
            hooks.batch_end(window.index - 1)
        on_device = self.move(batch)
        hooks.batch_start(on_device, window.index)
        return on_device

    def _micro_batch(self, window: _Window, on_device: Any) -> None:
        """Forward and backward of one micro-batch; what it uses is free when this returns."""
        hooks, index = self.hooks, window.index
        step, parallel = window.step, self._parallel
        if parallel is not None:
            is_first = index == 0 and hooks.zero_grad is None  # a hook in its place may keep gradients
            parallel.begin_micro_batch(is_first=is_first, is_last=index == window.size - 1)
        window.last_loss = None
        with self._context():
            output = step(on_device, index) if parallel is None else parallel.runner(step, on_device, index)
        if index == 0 and hooks.zero_grad is not None:
            for optimizer in self.optimizers:
                hooks.zero_grad(optimizer)
        loss = loss_of(output)
        if loss is None:
            self._check_may_be_left_out()
            if window.weights is not None:
                window.left_out.append(window.weights[index])
            return
        if window.weights is not None:
            weight = window.weights[index]
            # A micro-batch without a single term has the loss 0/0; it adds nothing, so it is left out. Where
            # others wait for this rank's gradients they get zeros.
            if not isinstance(weight, Tensor) and weight == 0:
                if not self.ranks.is_alone:
                    with zero_gradients(loss) as zero:
                        self.backward(zero)
                    window.loss = zero.detach() if window.loss is None else window.loss
                return
            loss = loss * weight
        scaled = loss if self._loss_factor == 1 else loss * self._loss_factor
        self.backward(scaled)
        loss, window.last_loss = loss.detach(), scaled.detach()
        hooks.batch_loss(window.last_loss, index)
        window.loss = loss if window.loss is None else window.loss + loss

    def _check_may_be_left_out(self) -> None:
        if self.ranks.is_alone or self.hooks.is_skipping():
            return
        raise TrainingError(
            "training_step",
            None,
            f"returned no loss on rank {self.ranks.world.rank}; of several ranks each must return one, for all reduce "
            "their gradients together",
            "Return a loss of zero that depends on the parameters: 0.0 * loss",
        )

    def _weigh_again(self, window: _Window) -> None:
        # The step returned None for these: the mean is over the terms of the others, which were weighed too lightly.
        factor = 1 / (1 - sum(window.left_out))
        for parameter in self._parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        assert window.loss is not None
        window.loss = window.loss * factor
        window.left_out.clear()

    def move(self, batch: Any) -> Any:
        if self.hooks.transfer is not None:
            batch = self.hooks.transfer(batch)
        elif self._to_device is not None:
            batch = self._to_device(batch)
        return self.precision.convert_batch(batch) if self._converts else batch

    def forward(self, step: Callable[[Any], Any], batch: Any) -> Any:
        parallel = self._parallel
        self._freed_gradients = False  # as in settle()
        if parallel is not None:
            parallel.begin_micro_batch(is_first=False, is_last=True)
        with self._context():
            return step(batch) if parallel is None else parallel.runner(step, batch)

    @property
    def allows_inference_mode(self) -> bool:
        """Whether :meth:`forward` may be called in ``torch.inference_mode``; else in ``no_grad``."""
        return self._parallel is None or self._parallel.allows_inference_mode

    @property
    def trace(self) -> int:
        """What should be the same on all ranks: see :class:`roomier.engine.parallel.Parallel`."""
        return 0 if self._parallel is None else self._parallel.trace

    def settle(self) -> None:
        """Free parameters that were gathered from other ranks. No update is pending in this engine."""
        self._freed_gradients = False  # an evaluation that follows can run a backward, which leaves gradients
        if self._parallel is not None:
            self._parallel.release()

    def trained_parameters_changed(self) -> None:
        """Some were frozen or unfrozen since the last step: every rank must call it."""
        if self._parallel is not None:
            self._parallel.trained_parameters_changed()

    def watch(self, context: AbstractContextManager[Any]) -> None:
        """Enter ``context`` around the next forward of training, one time."""
        if self.levers is not None:
            self.levers.forward_context.watches.append(context)

    def close(self) -> None:
        """Give the module its own forward back; called when the run is over, and no step follows."""
        if self._updates is not None:
            self._updates.close()
        if self.levers is not None:
            self.levers.undo()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if loss.is_complex() and not (args or kwargs):
            problem = "the loss is complex, and only a real one has a smallest value"
            raise TrainingError("loss", loss.detach(), problem, "Return loss.abs(), say")
        hooks = self.hooks
        for before in hooks.before_backward:
            before(loss)
        if self.scaler.is_on:
            loss = self.scaler.scale(loss)
        if self._updates is None:
            self._run_backward(loss, *args, **kwargs)
        else:
            self._updates.backward(partial(self._run_backward, loss, *args, **kwargs))
        for after in hooks.after_backward:
            after()

    def _run_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self._parallel is not None:
            self._parallel.begin_backward()
        with self._backward_context():
            self.hooks.backward(loss, *args, **kwargs)
        if self._parallel is not None:
            self._parallel.end_backward()

    def unscale(self, optimizer: Optimizer | None = None) -> None:
        """Bring gradients back to their size before anything reads them; a second call does nothing."""
        if not self.scaler.is_on:
            return
        for each in self.optimizers if optimizer is None else [optimizer]:
            if id(each) not in self._unscaled:
                self.scaler.unscale(each)
                self._unscaled.add(id(each))

    def clip(
        self, max_norm: float | None = None, algorithm: str | None = None, *, optimizer: Optimizer | None = None
    ) -> Tensor | None:
        if self._updates is not None:
            return self._updates.clipped(max_norm, algorithm)
        limit = self._batch_plan.gradient_clip_val if max_norm is None else max_norm
        if limit is None:
            return None
        self.unscale(optimizer)
        optimizers = self.optimizers if optimizer is None else [optimizer]
        parameters = [p for each in optimizers for group in each.param_groups for p in group["params"]]
        clipping = self._parallel or nn.utils
        if (algorithm or self._batch_plan.gradient_clip_algorithm) == "value":
            clipping.clip_grad_value_(parameters, limit)
            return None
        return clipping.clip_grad_norm_(parameters, limit)

    def step(self, optimizer: Optimizer | None = None, closure: Any = None) -> None:
        if self._updates is not None:
            self._updates.end_step(closure)
        for each in self.optimizers if optimizer is None else [optimizer]:
            self.scaler.step(each, closure)
            self._unscaled.discard(id(each))
        if self.levers is not None:
            self.levers.end_update()
        if self._parallel is not None:
            self._parallel.end_update()
        # An update forgets whose gradients are unscaled; one that was, to be clipped, is still to step.
        if self.scaler.is_on and not self._unscaled:
            self.scaler.update()
        if not self.hooks.keeps_gradients:
            self.free_gradients(optimizer)

    def leave_out_update(self) -> None:
        """Gradients that are there are not used; the loss scale is as before them."""
        state = self.scaler.state()
        self.scaler.update()  # otherwise it rejects other gradients
        self.scaler.load(state)
        self._unscaled.clear()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def free_gradients(self, optimizer: Optimizer | None = None) -> None:
        for each in self.optimizers if optimizer is None else [optimizer]:
            each.zero_grad()
        self._freed_gradients = True

    def _parameters(self) -> Iterator[Tensor]:
        return (each for optimizer in self.optimizers for group in optimizer.param_groups for each in group["params"])

    def weights(self) -> dict[str, Any]:
        self.settle()  # what a checkpoint holds are the parts, not what was gathered from them
        return self.module.state_dict()

    def state(self) -> dict[str, Any]:
        self.settle()
        names = parameter_names(self.module)
        return {
            "module": self.weights(),
            "optimizers": [optimizer_state(optimizer, names) for optimizer in self.optimizers],
            "scaler": self.scaler.state(),
            **({} if self._updates is None else self._updates.state()),
        }

    def check(self, state: Mapping[str, Any]) -> None:
        self.settle()
        if len(state["optimizers"]) != len(self.optimizers):
            raise CheckpointError(
                "optimizer",
                [type(optimizer).__name__ for optimizer in self.optimizers],
                f"the checkpoint has {len(state['optimizers'])} optimizers, this run {len(self.optimizers)}",
                "Configure the optimizers as in the run that was saved",
            )
        names = parameter_names(self.module)
        for index, (optimizer, saved) in enumerate(zip(self.optimizers, state["optimizers"], strict=True)):
            check_optimizer(optimizer, saved, names)
            check_values(optimizer, saved, names, f"optimizers[{index}]")

    def load(self, state: dict[str, Any]) -> None:
        self.settle()
        own = self.weights()
        self.module.load_state_dict({name: cut_like(own.get(name), each) for name, each in state["module"].items()})
        names = parameter_names(self.module)
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            load_optimizer(optimizer, saved, names)
        self.scaler.load(state["scaler"])
        if self._updates is not None:
            self._updates.load(state, self.device)

    def _weights(self, batches: Sequence[Any]) -> Sequence[float | Tensor] | None:
        """The share of each micro-batch in the terms of all; None where losses are added as they are."""
        if self._count_terms is None:
            return None
        counts = [_on_host(self._count_terms(batch)) for batch in batches]
        if not all(isinstance(count, (int, float, Tensor)) for count in counts):
            raise TrainingError(
                "num_loss_terms", counts, "these are no counts", "Return an integer or a 0-dim tensor for each batch"
            )
        total = self._over_ranks(sum(counts))
        if not isinstance(total, Tensor) and total <= 0:
            raise TrainingError(
                "num_loss_terms",
                counts,
                "no micro-batch of this step has a single term to average over",
                "Look at the targets: are all of them ignored?",
            )
        return [count / total for count in counts]

    def _over_ranks(self, count: Any) -> Any:
        if self.ranks.is_alone:
            return count
        total = self.ranks.sum(count if isinstance(count, Tensor) else torch.tensor(float(count), dtype=torch.float64))
        return total if isinstance(count, Tensor) else total.item()


class _Closure:
    """The loss and the gradients of the last micro-batch, as often as it is called; the others ran before."""

    def __init__(self, engine: EagerEngine, window: _Window, on_device: Any) -> None:
        self._engine = engine
        self._window = window
        self._on_device = on_device
        self._loss, self._left_out = window.loss, list(window.left_out)  # of the micro-batches before

    @torch.enable_grad()
    def __call__(self) -> Tensor | None:
        window = self._window
        window.loss, window.left_out = self._loss, list(self._left_out)
        self._engine._micro_batch(window, self._on_device)
        if window.left_out and window.loss is not None:  # now: an update may follow
            self._engine._weigh_again(window)
        return window.last_loss


def _on_host(count: Any) -> Any:
    """A count that is there without waiting, as a number: only of numbers can be seen that there is no term."""
    return count.item() if isinstance(count, Tensor) and count.is_cpu else count


def loss_of(output: Any) -> Tensor | None:
    """The loss in what a training step returned.

    Raises:
        TrainingError: it is not a scalar tensor that depends on the parameters.
    """
    if output is None:
        return None
    # The tensor is tried first: asking an abstract class costs more than all the rest here.
    loss = output if isinstance(output, Tensor) or not isinstance(output, Mapping) else output.get("loss")
    if not isinstance(loss, Tensor):
        raise TrainingError(
            "training_step",
            output,
            "returned a mapping without a tensor at 'loss'" if isinstance(output, Mapping) else "returned no tensor",
            "Return the loss as a 0-dim tensor, or {'loss': loss}",
        )
    if loss.numel() != 1:
        raise TrainingError(
            "training_step", tuple(loss.shape), "the loss is not a scalar", "Reduce it, e.g. return loss.mean()"
        )
    if not loss.requires_grad:
        raise TrainingError(
            "training_step",
            loss,
            "the loss does not depend on any parameter that requires a gradient",
            "Do not detach it, and leave some parameters unfrozen",
        )
    return loss
