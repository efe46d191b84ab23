"""Optimizer updates during the backward pass: each parameter is updated when its gradient is complete, and then the
gradient is freed.

Only the gradients of one block are in memory at any time, instead of the gradients of the full model. The optimizer's
own step computes the update, with its groups restricted to some of the parameters, so the update of a parameter must
depend on this parameter only, as in all optimizers of ``torch.optim`` except LBFGS. An optimizer that counts its calls
in a parameter group would count the update of each block as a step; the first update detects such an optimizer and
raises an error.

[Note: weights that change during backward]
Each weight is written while the backward pass runs. Its gradient is complete after all operations that used the weight
have run their backward passes, so no later operation reads it. The exception is an operation that used the detached
weight, for which autograd detects the write and raises an error. With activation recomputation, a block is recomputed
before the first of its operations with saved tensors runs its backward pass, and its weights are updated after all
their gradients are complete.

[Note: clipping by norm]
The clipping factor depends on all gradients. ``"exact"`` therefore runs two backward passes for one forward pass: the
first computes the norm of each gradient and frees the gradient, and the second scales the gradients and updates the
parameters. Each of them recomputes checkpointed blocks, from the same random state. Both produce the same gradients if
all kernels sum in a fixed order. The norm is bit-identical to the norm of ``torch.nn.utils.clip_grad_norm_``.
``"stale_norm"`` runs one backward pass and clips by the norm of the previous step. The first step of a run has no
previous norm, so it is exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle

from roomier.core import torch_private
from roomier.core.errors import PlanError, TrainingError
from roomier.core.sharded import local_part
from roomier.engine.narrowed import Homes, check_no_step_hooks, homes_of, step_only
from roomier.engine.updates import Change, ChangeAll, Updates, clipping, weakly
from roomier.plan import BatchPlan
from roomier.techniques.parallel.parallel import Parallel

FIELD = "optimizer.step_in_backward"


class StepInBackward(Updates):
    """Updates during backward.

    Args:
        network: the model, which provides the names of parameters for errors.
        optimizers: the optimizers of the parameters of ``network``.
        blocks: the blocks of ``network``. The parameters of a block are updated together.
        way: ``"exact"`` or ``"stale_norm"``; see [Note: clipping by norm].
        batch_plan: settings for clipping.
        parallel: wrapper that distributes the network across ranks.

    Attributes:
        norm: norm of the gradients of the last step, before clipping (0-dim). None if no norm is computed.
        may_be_stale: whether gradients are clipped by the norm of the previous step.

    Raises:
        PlanError: the update of a parameter by one of the optimizers depends on other parameters.
    """

    acts = True

    def __init__(
        self,
        network: nn.Module,
        optimizers: Sequence[Optimizer],
        blocks: Sequence[nn.Module],
        *,
        way: str,
        batch_plan: BatchPlan,
        parallel: Parallel,
    ) -> None:
        super().__init__(parallel)
        for optimizer in optimizers:
            if isinstance(optimizer, LBFGS):
                problem = "is not supported with LBFGS, whose update of a parameter depends on all gradients"
                raise PlanError(FIELD, way, problem, "Use another optimizer, or set step_in_backward=False")
            check_no_step_hooks(optimizer, "set step_in_backward=False")
        self.norm: Tensor | None = None
        self.may_be_stale = way == "stale_norm"
        self._network = network
        self._optimizers = list(optimizers)
        self._late = dict.fromkeys(parallel.late_parameters)
        without_block = {*self._late, *parallel.root_parameters}
        self._limit, self._algorithm = batch_plan.gradient_clip_val, batch_plan.gradient_clip_algorithm
        self._change: Change | None = None  # changes each complete gradient before its norm is measured
        self._clip: ChangeAll | None = None  # clips the gradients in this step
        self._block_of: dict[Tensor, int] = {
            parameter: number
            for number, block in enumerate(blocks)
            for parameter in block.parameters()
            if parameter not in without_block
        }
        self._num_in_block: Counter[int | None] = Counter()
        self._handles: dict[Tensor, RemovableHandle] = {}
        self._home: Homes = {}
        self._norms: dict[Tensor, Tensor] = {}
        self._pending: list[Tensor] = []
        self._updated: set[Tensor] = set()
        self._receive: Callable[[Tensor], None] | None = None  # called when a gradient is complete; None between steps
        self._is_step_open = False
        self._watch_parameters()

    def begin_step(self, optimizers: Sequence[Optimizer], batches: Sequence[Any]) -> None:
        """Prepare the forward pass of a step. Parameters may have been unfrozen or added to an optimizer since the last
        step.

        Raises:
            TrainingError: the step has several micro-batches.
        """
        if len(batches) != 1:
            problem = "are not supported, because each update runs before the gradients of the next micro-batch exist"
            action = "Pass one micro-batch per step, or set step_in_backward=False"
            raise TrainingError("batches", f"{len(batches)} micro-batches", problem, action)
        self._watch_parameters()

    def _watch_parameters(self) -> None:
        self._home = homes_of(self._optimizers)
        for parameter in self._handles.keys() - self._home.keys():  # removed from its optimizer
            self._handles.pop(parameter).remove()
            self._num_in_block[self._block_of.get(parameter)] -= 1
        for parameter in self._home:
            if parameter.requires_grad and parameter not in self._handles:
                handle = parameter.register_post_accumulate_grad_hook(weakly(self.take))  # type: ignore[no-untyped-call]
                self._handles[parameter] = handle
                self._num_in_block[self._block_of.get(parameter)] += 1

    def backward(self, run: Callable[..., None], change: Change | None) -> None:
        """Compute the gradients and the updates of one step.

        Args:
            run: function that runs backward and accepts the ``retain_graph`` argument.
            change: function that changes each complete gradient. With two backward passes, it runs in both.

        Raises:
            TrainingError: this is the second backward pass of the step, or a parameter already has a gradient.
        """
        self._check_begins_step()
        self._is_step_open, self._change, limit = True, change, self._limit
        if limit is None or self._algorithm == "value":
            self._clip = None if limit is None else clipping(limit, None)
            self._run(run, self._collect)
        elif self.may_be_stale and self.norm is not None:
            self._clip = clipping(limit, self.norm)
            self._run(run, self._measure_and_collect)
            self.norm = self._total_norm()
        else:
            self._run(lambda: run(retain_graph=True), self._measure)
            self.norm = self._total_norm()
            self._clip = clipping(limit, self.norm)
            self._run(run, self._collect)

    def end_step(self, closure: object = None) -> None:
        """Allow the next backward pass.

        Raises:
            TrainingError: ``closure`` is not None, because a closure would compute gradients after the update.
        """
        if closure is not None:
            problem = "is not supported, because the parameters were updated in the previous backward pass"
            action = "Call engine.step() without a closure, or set step_in_backward=False"
            raise TrainingError("closure", closure, problem, action)
        self._is_step_open = False

    def change(self, parameters: Iterable[Tensor], change: Change) -> None:
        """This method is a no-op, because :meth:`backward` changed the gradients."""

    def clip(self, parameters: Sequence[Tensor], limit: float, algorithm: str) -> Tensor | None:
        """Return :attr:`norm`. The gradients were clipped during the backward pass, according to the Plan.

        Raises:
            TrainingError: the Plan has a different limit or algorithm.
        """
        if (limit, algorithm) == (self._limit, self._algorithm):
            return self.norm
        problem = "the gradients were already used and freed, because each parameter was updated during backward"
        action = "Set gradient_clip_val, which clips during backward, or set step_in_backward=False"
        raise TrainingError("clip", limit, problem, action)

    def state(self) -> dict[str, Any]:
        """Return the state that the next step requires in addition to weights and optimizer states."""
        return {"stale_norm": self.norm} if self.may_be_stale else {}

    def load(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Restore the result of :meth:`state`. Without a stored norm, the next step is exact."""
        norm: Tensor | None = state.get("stale_norm")
        self.norm = None if norm is None else norm.to(device)

    def close(self) -> None:
        """Remove the hooks of the parameters."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self._num_in_block.clear()

    def take(self, parameter: Tensor) -> None:
        """Process the complete gradient of ``parameter``."""
        if self._receive is not None and parameter not in self._late:
            self._finish(parameter, self._receive)

    def _finish(self, parameter: Tensor, receive: Callable[[Tensor], None]) -> None:
        if self._change is not None:
            self._change(parameter, _own_gradient(parameter))
        receive(parameter)

    def _run(self, run: Callable[[], None], receive: Callable[[Tensor], None]) -> None:
        self._pending, self._updated = [], set()
        self._receive = receive
        try:
            run()
            for parameter in self._late:
                if parameter in self._home and parameter.grad is not None:
                    self._finish(parameter, receive)
            self._update()
        finally:
            self._receive = None

    def _measure(self, parameter: Tensor) -> None:
        self._take_norm(parameter)
        parameter.grad = None

    def _measure_and_collect(self, parameter: Tensor) -> None:
        self._take_norm(parameter)
        self._collect(parameter)

    def _take_norm(self, parameter: Tensor) -> None:
        if parameter in self._norms:
            raise self._came_in_parts(parameter)
        (self._norms[parameter],) = torch_private.norms_of([_own_gradient(parameter)])

    def _collect(self, parameter: Tensor) -> None:
        """Collect the parameters of a block, and update them together. The update runs when the last gradient of the
        block, or the first gradient of another block, is complete."""
        if parameter in self._updated:
            raise self._came_in_parts(parameter)
        block = self._block_of.get(parameter)
        if self._pending and self._block_of.get(self._pending[0]) != block:
            self._update()
        self._pending.append(parameter)
        self._updated.add(parameter)
        if block is None or len(self._pending) == self._num_in_block[block]:
            self._update()

    def _update(self) -> None:
        parameters, self._pending = self._pending, []
        if self._clip is not None:
            self._clip([_own_gradient(each) for each in parameters])
        step_only(self._home, parameters)
        for each in parameters:
            each.grad = None

    def _total_norm(self) -> Tensor:
        norms, self._norms = self._norms, {}
        return self._parallel.join_norms(
            {each: norms[each] for each in self._home if each in norms}
        )  # in torch's order

    def _check_begins_step(self) -> None:
        if self._is_step_open:
            problem = (
                "a second backward pass ran before engine.step(), but the first pass has already updated parameters"
            )
            action = "Call engine.step() after each backward pass, and call backward once for the sum of several losses"
            raise TrainingError("backward", None, problem, action)
        for optimizer in self._optimizers:
            check_no_step_hooks(optimizer, "set step_in_backward=False")
        kept = next((each for each in self._home if each.grad is not None), None)
        if kept is not None:
            problem = "already has a gradient before the backward pass"
            action = "Do not run backward in training_step, or set step_in_backward=False"
            raise TrainingError("gradient", self._name_of(kept), problem, action)

    def _came_in_parts(self, parameter: Tensor) -> TrainingError:
        problem = "received its gradient in more than one part, but is updated only once"
        action = "If the model uses torch.utils.checkpoint, pass use_reentrant=False"
        return TrainingError("gradient", self._name_of(parameter), problem, action)

    def _name_of(self, parameter: Tensor) -> str | None:
        return next((name for name, each in self._network.named_parameters() if each is parameter), None)


def _own_gradient(parameter: Tensor) -> Tensor:
    """Return the gradient of a parameter, or this rank's shard of the gradient."""
    assert parameter.grad is not None
    return local_part(parameter.grad)
