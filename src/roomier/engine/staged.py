"""Engine of a pipeline: each rank runs its stages of every micro-batch, in the order of a schedule.

[Note: last stage]
The last stage runs the backward pass of a micro-batch directly after its forward pass, as an engine without a pipeline
does. Its code therefore is that of :class:`EagerEngine`, and it never stores more than one graph.

[Note: channels]
Two ranks can send values and gradients to each other in both directions. gloo and NCCL match the sends of one rank with
the receives of another rank in their order, and NCCL can delay a send until its receive has started. Forward and
backward passes therefore use different process groups, and so do even and odd stages if a rank has several stages. In
each group, two ranks send in one direction only, and both run the micro-batches in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from roomier.techniques.pipeline.schedule import SCHEDULES, Action
from roomier.techniques.pipeline.stage import StagePlan
from roomier.techniques.pipeline.trace import Trace, Value

TraceOf = Callable[[str, Any], Trace]
"""Function that traces the step with a given name for a batch. It returns the same object for equal batches."""
_Send = tuple[dist.Work, Tensor]


class StagedEngine(EagerEngine):
    """Engine that runs the stages of one rank of a pipeline. See :class:`EagerEngine` for the arguments.

    Attributes:
        trace_of: function that traces a step before its first run. The caller sets it before the first step.
        earlier_pass: returns the context of a forward pass for a stage that is not the last stage of this rank.
            Arguments: the stage, the step, the batch on the device, and its index in the window (None in an
            evaluation). None means no context.
    """

    trace_of: TraceOf
    earlier_pass: Callable[[int, Any, Any, int | None], AbstractContextManager[Any]] | None = None

    def __init__(self, facts: Facts, optimizers: Sequence[Optimizer], **techniques: Any) -> None:
        super().__init__(facts, optimizers, **techniques)
        assert facts.pipeline is not None
        assert self.levers.stage is not None
        assert isinstance(self._parallel, Stages)
        self._pipeline, self._stage, self._stages = facts.pipeline, self.levers.stage, self._parallel
        mesh, pipeline = facts.ranks.mesh, facts.pipeline
        self._own = range(mesh.stage_index, pipeline.num_stages, mesh.stage)  # numbers of the stages of this rank
        self._last = pipeline.num_stages - 1
        self._column = mesh.along(STAGE)[::-1]
        self._channels = facts.ranks.channels(2 if len(self._own) == 1 else 4)
        self._state = StageState(self.module, self.module.__dict__[OWNERS], facts.ranks, mesh.stage_index)
        self._plans: dict[tuple[Trace, int], StagePlan] = {}  # by trace and stage
        self._batches: dict[int, Any] = {}  # on the device, until the last stage of this rank runs, by index
        self._graphs: dict[tuple[int, int], _Graph] = {}  # until the backward pass, by stage and index
        self._sends: list[_Send] = []  # of gradients and evaluations

    def forward_backward(self, step: Step, batches: Sequence[Any]) -> Tensor | None:
        window = self._begin_window(self._staged(step, self._own[-1]), batches)
        if len(self._own) > 1:
            window.size = 0  # the last backward pass is not that of the last stage
        schedule = SCHEDULES[self._pipeline.schedule]
        actions = schedule(self._own[0], len(self._column), len(self._own), len(batches))
        try:
            for action in actions:
                if not action.is_forward:
                    self._run_backward_of(action, is_last=action is actions[-1])
                elif not self._run_forward_of(window, step, action, batches):
                    return self._end_window(window)
            self._wait_for_sends(self._sends)
        except BaseException as error:
            direction = "forward" if action.is_forward else "backward"
            stage = f"stage {action.stage + 1} of {self._pipeline.num_stages}"
            error.add_note(f"the error occurred in the {direction} pass of micro-batch {action.index} on {stage}")
            self._graphs.clear()
            self._batches.clear()
            self._abandon_window()
            raise
        self._stages.reduce()
        loss = self._end_window(window)
        return loss if self._own[-1] == self._last else torch.zeros((), device=self.device)

    def _staged(self, step: Step, stage: int) -> Step:
        """Return a function that runs ``stage`` of ``step``."""

        def run(batch: Any, index: int) -> Any:
            plan = self._plan_of("training_step", batch, stage)  # traced before
            received = self._receive_values(plan, stage)
            result = self._stage.forward(plan, partial(step, batch, index), received)
            self._graphs[stage, index] = _Graph(plan, received, () if plan.is_last else result)
            return result

        return run

    def _run_forward_of(self, window: Window, step: Step, action: Action, batches: Sequence[Any]) -> bool:
        """Run the forward pass of a micro-batch. Return False if a hook skips the step."""
        stage, index = action.stage, action.index
        on_device = self._start_pass(action, batches)
        if self.hooks.is_skipping():
            if index or len(self._own) > 1:
                problem = "skips a step after other stages have started it, which a pipeline does not support"
                advice = "Return -1 only for the first micro-batch of a step, or use accumulate_grad_batches=1"
                raise TrainingError("on_train_batch_start", -1, problem, advice)
            return False
        self._plan_of("training_step", on_device, stage)  # outside of the contexts of a forward pass
        if stage == self._last:
            self._micro_batch(window, index, on_device)
            return True
        for begin_micro_batch in self._moments.begin_micro_batch:
            begin_micro_batch(is_first=index == 0 and self.hooks.zero_grad is None, is_last=False)
        run, runner = self._staged(step, stage), self._parallel.runner
        with self._pass_of(stage, step, on_device, index), self._context():
            run(on_device, index) if runner is None else runner(run, on_device, index)
        if self.hooks.zero_grad is not None and index == 0 and stage == self._own[-1]:
            for optimizer in self.optimizers:
                self.hooks.zero_grad(optimizer)
        graph = self._graphs[stage, index]
        self._send(graph.outputs, action, graph.sends)
        return True

    def _start_pass(self, action: Action, batches: Sequence[Any]) -> Any:
        """Return a micro-batch on the device. The hooks run before its pass on the last stage of this rank."""
        index, is_last = action.index, action.stage == self._own[-1]
        if is_last and index:
            self.hooks.batch_end(index - 1)
        if index not in self._batches:
            self._batches[index] = self.move(batches[index])
        if not is_last:
            return self._batches[index]
        on_device = self._batches.pop(index)
        self.hooks.batch_start(on_device, index)
        return on_device

    def _pass_of(
        self, stage: int, step: Callable[..., Any], batch: Any, index: int | None = None
    ) -> AbstractContextManager[Any]:
        """Return the context of a forward pass. A rank runs a step once for each of its stages, but only the pass of
        its last stage counts."""
        if self.earlier_pass is None or stage == self._own[-1]:
            return nullcontext()
        return self.earlier_pass(stage, step, batch, index)

    @property
    def has_earlier_passes(self) -> bool:
        """True if this rank has several stages, and therefore runs each step several times."""
        return len(self._own) > 1

    def _run_backward_of(self, action: Action, *, is_last: bool) -> None:
        graph, counts = self._graphs.pop((action.stage, action.index)), action.stage == self._own[-1]
        if action.stage != self._last:
            outputs = [each for value, each in zip(graph.plan.sent, graph.outputs, strict=True) if graph.trains(value)]
            sender = Action(False, action.stage + 1, action.index)
            gradients = self._receive(sender, [(each.shape, each.dtype) for each in outputs])
            self._wait_for_sends(graph.sends)  # complete, because the next stage has used the outputs
            for before in self.hooks.before_backward if counts else ():
                before(torch.zeros((), device=self.device))  # this stage has no loss
            self._stages.set_last(is_last=is_last)
            for begin_backward in self._moments.begin_backward:
                begin_backward()
            with self._backward_context():
                torch.autograd.backward(outputs, gradients)
            for end_backward in self._moments.end_backward:
                end_backward()
            for after in self.hooks.after_backward if counts else ():
                after()
        if action.stage:
            self._send(graph.gradients(), action, self._sends)
            self._wait_for_sends(self._sends, self._pipeline.num_stages * len(graph.received))

    def forward(self, step: Callable[[Any], Any], batch: Any) -> Any:
        for stage in self._own:
            plan = self._plan_of(self.hooks.step_name, batch, stage)
            received = self._receive_values(plan, stage)
            run = partial(self._run_stage, plan, step, received)
            with self._pass_of(stage, step, batch):
                result = super().forward(run, batch)
            if stage == self._last:
                return result
            self._send(result, Action(True, stage, 0), self._sends)
            self._wait_for_sends(self._sends, self._pipeline.num_stages)
        return None

    def _run_stage(self, plan: StagePlan, step: Callable[[Any], Any], received: Sequence[Tensor], batch: Any) -> Any:
        return self._stage.forward(plan, partial(step, batch), received)

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

    def _plan_of(self, name: str, batch: Any, stage: int) -> StagePlan:
        trace = self.trace_of(name, batch)
        if (trace, stage) not in self._plans:
            self._plans[trace, stage] = plan = self._pipeline.plan_of(trace, stage)
            self._stage.check(plan)
        return self._plans[trace, stage]

    def _receive_values(self, plan: StagePlan, stage: int) -> list[Tensor]:
        if stage == 0:
            return []
        specs = [plan.trace.spec(value) for value in plan.received]
        received = self._receive(Action(True, stage - 1, 0), [(spec.shape, spec.dtype) for spec in specs])
        for value, each in zip(plan.received, received, strict=True):
            each.requires_grad_(torch.is_grad_enabled() and value in plan.trace.with_gradients)
        return received

    def _receive(self, sender: Action, kinds: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[Tensor]:
        """Return the tensors that the action ``sender`` sends to this rank."""
        rank = self._column[sender.stage % len(self._column)]
        received = [torch.empty(tuple(shape), dtype=dtype, device=self.device) for shape, dtype in kinds]
        try:
            for each in filter(Tensor.numel, received):
                dist.recv(_as_bytes(each), rank, group=self._channel_of(sender))
        except RuntimeError as error:
            if is_of_lost_peer(error) and (cause := announced()):
                raise cause from error
            raise
        return received

    def _send(self, values: Sequence[Tensor], action: Action, sends: list[_Send]) -> None:
        """Send the results of ``action`` to the stage that uses them."""
        receiver = action.stage + (1 if action.is_forward else -1)
        rank = self._column[receiver % len(self._column)]
        for each in filter(Tensor.numel, values):
            sent = _as_bytes(each.detach().contiguous())
            work = dist.isend(sent, rank, group=self._channel_of(action))
            assert work is not None
            sends.append((work, sent))  # the memory must not be freed before it is sent

    def _channel_of(self, sender: Action) -> dist.ProcessGroup:
        """Return the process group of the messages of ``sender``. See [Note: channels]."""
        return self._channels[(2 * sender.stage + sender.is_forward) % len(self._channels)]

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
