"""Engine of a pipeline: each rank runs one stage of every micro-batch, in the order of a schedule.

[Note: last stage]
The last stage runs the backward pass of a micro-batch directly after its forward pass, as an engine without a pipeline
does. Its code therefore is that of :class:`EagerEngine`, and it never stores more than one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from roomier.api.engine import Step
from roomier.core.errors import TrainingError
from roomier.core.mesh import STAGE
from roomier.core.ranks import announced
from roomier.engine.eager import EagerEngine, Window
from roomier.engine.facts import OWNERS, Facts
from roomier.engine.stage_state import StageState
from roomier.launch.failure import is_of_lost_peer
from roomier.techniques.parallel.stages import Stages
from roomier.techniques.pipeline.schedule import SCHEDULES
from roomier.techniques.pipeline.stage import StagePlan
from roomier.techniques.pipeline.trace import Trace, Value

TraceOf = Callable[[str, Any], Trace]
"""Function that traces the step with a given name for a batch. It returns the same object for equal batches."""
_Send = tuple[dist.Work, Tensor]


class StagedEngine(EagerEngine):
    """Engine that runs one stage of a pipeline. See :class:`EagerEngine` for the arguments.

    Attributes:
        trace_of: function that traces a step before its first run. The caller sets it before the first step.
    """

    trace_of: TraceOf

    def __init__(self, facts: Facts, optimizers: Sequence[Optimizer], **techniques: Any) -> None:
        super().__init__(facts, optimizers, **techniques)
        assert facts.pipeline is not None
        assert self.levers.stage is not None
        assert isinstance(self._parallel, Stages)
        self._pipeline, self._stage, self._stages = facts.pipeline, self.levers.stage, self._parallel
        mesh = facts.ranks.mesh
        self._number, column = mesh.stage_index, mesh.along(STAGE)[::-1]
        self._previous = column[self._number - 1] if self._number else None
        self._next = column[self._number + 1] if self._number + 1 < mesh.stage else None
        self._state = StageState(self.module, self.module.__dict__[OWNERS], facts.ranks, self._number)
        self._plans: dict[Trace, StagePlan] = {}
        self._graphs: dict[int, _Graph] = {}  # of the micro-batches whose backward pass has not run, by index
        self._sends: list[_Send] = []  # of gradients and evaluations

    def forward_backward(self, step: Step, batches: Sequence[Any]) -> Tensor | None:
        window = self._begin_window(self._staged(step), batches)
        actions = SCHEDULES[self._pipeline.schedule](self._number, self._pipeline.num_stages, 1, len(batches))
        try:
            for action in actions:
                if not action.is_forward:
                    self._run_backward_of(action.index, is_last=action.index == len(batches) - 1)
                elif not self._run_forward_of(window, action.index, batches[action.index]):
                    return self._end_window(window)
            self._wait_for_sends(self._sends)
        except BaseException as error:
            direction = "forward" if action.is_forward else "backward"
            stage = f"stage {self._number + 1} of {self._pipeline.num_stages}"
            error.add_note(f"the error occurred in the {direction} pass of micro-batch {action.index} on {stage}")
            self._graphs.clear()
            self._abandon_window()
            raise
        self._stages.reduce()
        loss = self._end_window(window)
        return torch.zeros((), device=self.device) if self._next is not None else loss

    def _staged(self, step: Step) -> Step:
        """Return a function that runs this stage of ``step``."""

        def run(batch: Any, index: int) -> Any:
            plan = self._plan_of("training_step", batch)  # traced before
            received = self._receive_values(plan)
            result = self._stage.forward(plan, partial(step, batch, index), received)
            self._graphs[index] = _Graph(plan, received, () if plan.is_last else result)
            return result

        return run

    def _run_forward_of(self, window: Window, index: int, batch: Any) -> bool:
        """Run the forward pass of a micro-batch. Return False if a hook skips the step."""
        on_device = self._start_micro_batch(index, batch)
        if self.hooks.is_skipping():
            if index:
                problem = "skips a step after other stages have started it, which a pipeline does not support"
                action = "Return -1 only for the first micro-batch of a step, or use accumulate_grad_batches=1"
                raise TrainingError("on_train_batch_start", -1, problem, action)
            return False
        self._plan_of("training_step", on_device)  # outside of the contexts of a forward pass
        if self._next is None:
            self._micro_batch(window, index, on_device)
            return True
        for begin_micro_batch in self._moments.begin_micro_batch:
            begin_micro_batch(is_first=index == 0 and self.hooks.zero_grad is None, is_last=False)
        runner = self._parallel.runner
        with self._context():
            window.step(on_device, index) if runner is None else runner(window.step, on_device, index)
        if self.hooks.zero_grad is not None and index == 0:
            for optimizer in self.optimizers:
                self.hooks.zero_grad(optimizer)
        graph = self._graphs[index]
        self._send(graph.outputs, self._next, graph.sends)
        return True

    def _run_backward_of(self, index: int, *, is_last: bool) -> None:
        graph = self._graphs.pop(index)
        if self._next is not None:
            outputs = [each for value, each in zip(graph.plan.sent, graph.outputs, strict=True) if graph.trains(value)]
            gradients = self._receive(self._next, [(each.shape, each.dtype) for each in outputs])
            self._wait_for_sends(graph.sends)  # complete, because the next stage has used the outputs
            for before in self.hooks.before_backward:
                before(torch.zeros((), device=self.device))  # this stage has no loss
            self._stages.set_last(is_last=is_last)
            for begin_backward in self._moments.begin_backward:
                begin_backward()
            with self._backward_context():
                torch.autograd.backward(outputs, gradients)
            for end_backward in self._moments.end_backward:
                end_backward()
            for after in self.hooks.after_backward:
                after()
        if self._previous is not None:
            self._send(graph.gradients(), self._previous, self._sends)
            self._wait_for_sends(self._sends, self._pipeline.num_stages * len(graph.received))

    def forward(self, step: Callable[[Any], Any], batch: Any) -> Any:
        plan = self._plan_of(self.hooks.step_name, batch)
        received = self._receive_values(plan)
        result = super().forward(lambda each: self._stage.forward(plan, partial(step, each), received), batch)
        if self._next is None:
            return result
        self._send(result, self._next, self._sends)
        self._wait_for_sends(self._sends, self._pipeline.num_stages)
        return None

    def weights(self) -> dict[str, Any]:
        self._state.share_buffers()
        return self._state.full_weights(super().weights())

    def state(self) -> dict[str, Any]:
        state = super().state()
        return {**state, "optimizers": [self._state.full_optimizer(each) for each in state["optimizers"]]}

    def places(self, stored: Sequence[Mapping[str, Any]], **kinds: Any) -> list[dict[str, Any]]:
        return [self._state.own_places(each, kinds["unneeded"]) for each in super().places(stored, **kinds)]

    def load(self, state: dict[str, Any]) -> None:
        super().load({**state, "optimizers": [self._state.own_optimizer(each) for each in state["optimizers"]]})

    def load_weights(self, weights: Mapping[str, Any]) -> None:
        self.module.load_state_dict(self._state.own_weights(weights))

    def _plan_of(self, name: str, batch: Any) -> StagePlan:
        trace = self.trace_of(name, batch)
        if trace not in self._plans:
            self._plans[trace] = plan = self._pipeline.plan_of(trace, self._number)
            self._stage.check(plan)
        return self._plans[trace]

    def _receive_values(self, plan: StagePlan) -> list[Tensor]:
        if self._previous is None:
            return []
        specs = [plan.trace.spec(value) for value in plan.received]
        received = self._receive(self._previous, [(spec.shape, spec.dtype) for spec in specs])
        for value, each in zip(plan.received, received, strict=True):
            each.requires_grad_(torch.is_grad_enabled() and value in plan.trace.with_gradients)
        return received

    def _receive(self, rank: int, kinds: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[Tensor]:
        received = [torch.empty(tuple(shape), dtype=dtype, device=self.device) for shape, dtype in kinds]
        try:
            for each in filter(Tensor.numel, received):
                dist.recv(_as_bytes(each), rank)
        except RuntimeError as error:
            if is_of_lost_peer(error) and (cause := announced()):
                raise cause from error
            raise
        return received

    def _send(self, values: Sequence[Tensor], rank: int, sends: list[_Send]) -> None:
        for each in filter(Tensor.numel, values):
            sent = _as_bytes(each.detach().contiguous())
            work = dist.isend(sent, rank)
            assert work is not None
            sends.append((work, sent))  # the memory must not be freed before it is sent

    def _wait_for_sends(self, sends: list[_Send], num_left: int = 0) -> None:
        while len(sends) > num_left:
            sends.pop(0)[0].wait()


class _Graph:
    """Tensors of a micro-batch between its forward and backward pass on one stage."""

    def __init__(self, plan: StagePlan, received: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        self.plan, self.received, self.outputs = plan, received, outputs
        self.sends: list[_Send] = []

    def trains(self, value: Value) -> bool:
        """Return whether a gradient is sent for ``value``."""
        return value in self.plan.trace.with_gradients

    def gradients(self) -> list[Tensor]:
        """Return the gradient of each received value that has one."""
        trained = [each for value, each in zip(self.plan.received, self.received, strict=True) if self.trains(value)]
        return [torch.zeros_like(each) if each.grad is None else each.grad for each in trained]


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as bytes, because gloo does not send all dtypes."""
    return tensor.view(-1).view(torch.uint8)
