"""Each parameter is updated in the backward, when its gradient is complete, and the gradient is freed.

So the gradients of one block are there at a time, not those of the model. The update is that of the optimizer itself,
called with its groups narrowed to the parameters at hand: it must update each parameter by that parameter alone, as the
optimizers of ``torch.optim`` do, except LBFGS. One that counts its calls in a group, as some of other packages do,
would take each block for a step: the first update tells.

[Note: weights that change under a backward]
A weight is written to while the backward goes on. It is complete when all operations that used it have run their
backward, so none of them looks at it again. What used it detached is not waited for: autograd keeps count of writes and
raises an error. Under activation recompute, a block is computed again before the first of its operations that kept
something runs its backward, and its weights are updated when all of them have their gradients, or later.

[Note: clipping by norm]
The factor depends on all gradients. ``"exact"`` runs two backwards of one forward: the first takes the norm of each
gradient and frees it, the second scales and updates. No forward runs twice (blocks that are computed again are so in
each backward, from the same random state), so both give the same gradients wherever kernels add up in a fixed order.
The norm is that of ``torch.nn.utils.clip_grad_norm_``, to the bit. ``"stale_norm"`` runs one backward and clips by the
norm of the step before; the first step of a run has none, and is exact.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle

from roomier.core import torch_private
from roomier.core.errors import PlanError, TrainingError
from roomier.plan import BatchPlan

Groups = list[tuple[dict[str, Any], list[Tensor]]]
FIELD = "optimizer.step_in_backward"


class StepAfterBackward:
    """The default: the optimizers step after all gradients are complete, not during backward."""

    acts = False

    def begin_step(self, optimizers: Sequence[Optimizer], batches: Sequence[Any]) -> None: ...
    def backward(self, run: Callable[..., None]) -> None:
        run()

    def end_step(self, closure: object = None) -> None: ...
    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: Mapping[str, Any], device: torch.device) -> None: ...
    def close(self) -> None: ...


class StepInBackward:
    """The updates of an engine whose optimizers step in the backward.

    Args:
        network: names parameters in errors.
        blocks: the parameters of each are updated together.
        way: ``"exact"`` or ``"stale_norm"``; see [Note: clipping by norm].
        join_norms: the norm of a gradient, over all ranks, from the norm of each of its parts here, by parameter.
        late: parameters whose gradients are not complete until the backward is over.

    Attributes:
        norm: of the gradients of the last step, before they were clipped (0-dim); None where no norm is taken.

    Raises:
        PlanError: an optimizer cannot be called for some parameters at a time.
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
        join_norms: Callable[[Mapping[Tensor, Tensor]], Tensor],
        late: Iterable[Tensor] = (),
    ) -> None:
        for optimizer in optimizers:
            _check_optimizer(optimizer, way)
        self.norm: Tensor | None = None
        self.may_be_stale = way == "stale_norm"
        self._network = network
        self._optimizers = list(optimizers)
        self._join_norms = join_norms
        self._late = dict.fromkeys(late)
        limit = batch_plan.gradient_clip_val
        self._max_norm = limit if batch_plan.clips_norm else None
        self._max_value = None if batch_plan.clips_norm else limit
        self._factor: Tensor | None = None  # what gradients of this step are multiplied by
        self._block_of: dict[Tensor, int] = {
            parameter: number
            for number, block in enumerate(blocks)
            for parameter in block.parameters()
            if parameter not in self._late
        }
        self._num_in_block: Counter[int | None] = Counter()
        self._handles: dict[Tensor, RemovableHandle] = {}
        self._home: dict[Tensor, tuple[Optimizer, dict[str, Any]]] = {}
        self._norms: dict[Tensor, Tensor] = {}
        self._pending: list[Tensor] = []
        self._updated: set[Tensor] = set()
        self._receive: Callable[[Tensor], None] | None = None  # takes each complete gradient; None between steps
        self._is_step_open = False
        self._watch_parameters()

    def begin_step(self, optimizers: Sequence[Optimizer], batches: Sequence[Any]) -> None:
        """Prepare the forward of a step. Parameters may have been unfrozen or added to an optimizer since the last one.

        Raises:
            TrainingError: the step has several micro-batches.
        """
        if len(batches) != 1:
            problem = "an update in the backward of each cannot wait for the gradients of the next"
            action = "Give one micro-batch a step, or leave out step_in_backward"
            raise TrainingError("batches", f"{len(batches)} micro-batches", problem, action)
        self._watch_parameters()

    def _watch_parameters(self) -> None:
        self._home = {
            parameter: (optimizer, group)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        for parameter in self._handles.keys() - self._home.keys():  # taken from its optimizer
            self._handles.pop(parameter).remove()
            self._num_in_block[self._block_of.get(parameter)] -= 1
        for parameter in self._home:
            if parameter.requires_grad and parameter not in self._handles:
                hook = _Hook(weakref.ref(self))
                handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._handles[parameter] = handle
                self._num_in_block[self._block_of.get(parameter)] += 1

    def backward(self, run: Callable[..., None]) -> None:
        """Gradients and updates of one step.

        Args:
            run: runs the backward; takes ``retain_graph``.

        Raises:
            TrainingError: it is the second backward of a step, or there are gradients that it would be added to.
        """
        self._check_begins_step()
        self._is_step_open = True
        self._factor = None
        if self._max_norm is None:
            self._run(run, self._collect)
        elif self.may_be_stale and self.norm is not None:
            self._factor = _factor(self._max_norm, self.norm)
            self._run(run, self._measure_and_collect)
            self.norm = self._total_norm()
        else:
            self._run(lambda: run(retain_graph=True), self._measure)
            self.norm = self._total_norm()
            self._factor = _factor(self._max_norm, self.norm)
            self._run(run, self._collect)

    def end_step(self, closure: object = None) -> None:
        """The next backward is that of another step.

        Raises:
            TrainingError: the optimizer is to compute gradients by itself.
        """
        if closure is not None:
            action = "Call engine.step() without one, or leave out step_in_backward"
            raise TrainingError("closure", closure, "the update was made in the backward before it", action)
        self._is_step_open = False

    def clipped(self, max_norm: float | None, algorithm: str | None) -> Tensor | None:
        """:attr:`norm`, where gradients were clipped as the Plan says.

        Raises:
            TrainingError: another bound is asked for.
        """
        if max_norm is None and algorithm is None:
            return self.norm
        problem = "the gradients are used up and freed: each parameter was updated in the backward"
        action = "Set gradient_clip_val, by which they are clipped on their way, or leave out step_in_backward"
        raise TrainingError("clip", max_norm, problem, action)

    def state(self) -> dict[str, Any]:
        """What the next step depends on besides weights and optimizers."""
        return {"stale_norm": self.norm} if self.may_be_stale else {}

    def load(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Put back what :meth:`state` gave; a run without it begins with an exact step."""
        norm: Tensor | None = state.get("stale_norm")
        self.norm = None if norm is None else norm.to(device)

    def close(self) -> None:
        """Leave the parameters without hooks."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self._num_in_block.clear()

    def take(self, parameter: Tensor) -> None:
        """The gradient of ``parameter`` is complete."""
        if self._receive is not None and parameter not in self._late:
            self._receive(parameter)

    def _run(self, run: Callable[[], None], receive: Callable[[Tensor], None]) -> None:
        self._pending, self._updated = [], set()
        self._receive = receive
        try:
            run()
            for parameter in self._late:
                if parameter in self._home and parameter.grad is not None:
                    receive(parameter)
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
        self._norms[parameter] = torch_private.norm_of(_own_gradient(parameter))

    def _collect(self, parameter: Tensor) -> None:
        """Update the parameters of a block together, when all of them are complete or the turn of others has come."""
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
        if self._factor is not None:
            torch_private.scale_each([_own_gradient(each) for each in parameters], self._factor)
        elif self._max_value is not None:
            for each in parameters:
                _own_gradient(each).clamp_(-self._max_value, self._max_value)
        for optimizer, groups in self._groups_of(parameters).items():
            with _narrowed(optimizer, groups), _unchanged(optimizer):
                torch_private.step_without_hooks(optimizer)
        for each in parameters:
            each.grad = None

    def _groups_of(self, parameters: Iterable[Tensor]) -> dict[Optimizer, Groups]:
        found: dict[Optimizer, dict[int, tuple[dict[str, Any], list[Tensor]]]] = {}
        for parameter in parameters:
            optimizer, group = self._home[parameter]
            found.setdefault(optimizer, {}).setdefault(id(group), (group, []))[1].append(parameter)
        return {optimizer: list(groups.values()) for optimizer, groups in found.items()}

    def _total_norm(self) -> Tensor:
        norms, self._norms = self._norms, {}
        return self._join_norms({each: norms[each] for each in self._home if each in norms})  # in torch's order

    def _check_begins_step(self) -> None:
        if self._is_step_open:
            problem = "a second backward came before the step of the first was finished, whose update is made already"
            action = "Call engine.step() after each backward, and give the sum of several losses to one backward"
            raise TrainingError("backward", None, problem, action)
        for optimizer in self._optimizers:
            _check_hooks(optimizer)
        kept = next((each for each in self._home if each.grad is not None), None)
        if kept is not None:
            problem = "has a gradient before the backward, to which the new one would be added; it was to be freed"
            action = "Run no backward of your own in training_step, or leave out step_in_backward"
            raise TrainingError("gradient", self._name_of(kept), problem, action)

    def _came_in_parts(self, parameter: Tensor) -> TrainingError:
        problem = "its gradient came in more than one part, and it is updated once"
        action = "Where the model uses torch.utils.checkpoint, pass use_reentrant=False"
        return TrainingError("gradient", self._name_of(parameter), problem, action)

    def _name_of(self, parameter: Tensor) -> str | None:
        return next((name for name, each in self._network.named_parameters() if each is parameter), None)


class _Hook:
    """What a parameter holds: nothing that would keep an engine alive."""

    def __init__(self, steps: weakref.ref[StepInBackward]) -> None:
        self._steps = steps

    def __call__(self, parameter: Tensor) -> None:
        steps = self._steps()
        if steps is not None:
            steps.take(parameter)


@contextmanager
def _narrowed(optimizer: Optimizer, groups: Groups) -> Iterator[None]:
    """``optimizer`` with no parameters but those of ``groups``: it walks all it has, and an update of each block that
    did so would take quadratic time."""
    all_groups = optimizer.param_groups
    all_parameters = [group["params"] for group, _ in groups]
    optimizer.param_groups = [group for group, _ in groups]
    for group, parameters in groups:
        group["params"] = parameters
    try:
        yield
    finally:
        optimizer.param_groups = all_groups
        for (group, _), parameters in zip(groups, all_parameters, strict=True):
            group["params"] = parameters


@contextmanager
def _unchanged(optimizer: Optimizer) -> Iterator[None]:
    """Settings of groups stay as they are inside.

    Raises:
        TrainingError: ``optimizer`` changed a number among them, which is then not of one parameter alone.
    """
    before = [_numbers(group) for group in optimizer.param_groups]
    yield
    for group, earlier in zip(optimizer.param_groups, before, strict=True):
        now = _numbers(group)
        name = next((name for name in now if now[name] != earlier.get(name)), None)
        if name is not None:
            problem = f"changes {name!r} of a parameter group in each call, of which there is one for each block"
            action = "Use an optimizer that keeps its state by parameter, or leave out step_in_backward"
            raise TrainingError("optimizer", type(optimizer).__name__, problem, action)


def _numbers(group: Mapping[str, Any]) -> dict[str, float]:
    return {name: each for name, each in group.items() if isinstance(each, (int, float))}


def _factor(max_norm: float, norm: Tensor) -> Tensor:
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as in torch.nn.utils.clip_grad_norm_


def _own_gradient(parameter: Tensor) -> Tensor:
    """Of a parameter that is cut among ranks, the part of this one."""
    gradient = parameter.grad
    assert gradient is not None
    to_local = getattr(gradient, "to_local", None)
    own: Tensor = gradient if to_local is None else to_local()
    return own


def _check_optimizer(optimizer: Optimizer, way: str) -> None:
    if isinstance(optimizer, LBFGS):
        problem = "does not go with LBFGS, whose update of a parameter depends on all gradients"
        raise PlanError(FIELD, way, problem, "Use another optimizer, or step_in_backward=False")
    _check_hooks(optimizer)


def _check_hooks(optimizer: Optimizer) -> None:
    if torch_private.has_step_pre_hooks(optimizer):
        problem = "has a hook before its step (register_step_pre_hook), which would find no gradients"
        raise TrainingError("optimizer", type(optimizer).__name__, problem, "Remove it, or leave out step_in_backward")
