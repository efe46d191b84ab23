"""Execution of a training step on the stages of a pipeline.

A stage runs the step of the user with the full micro-batch. Skipped events before the stage return the values that the
stage received, and NaN in place of all other outputs. After the last event of the stage, a :class:`StageDone` leaves
the step. It is not an ``Exception``, so that the user's code does not catch it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from roomier.core import torch_private
from roomier.core.errors import TrainingError
from roomier.core.wrapped_forward import install
from roomier.techniques.pipeline.trace import Replay, Spec, Trace, UnitForward, Value


class StageDone(BaseException):
    """Leaves the step after the last event of a stage."""


class StageError(BaseException):
    """Carries an error out of the user's code, which could catch an ``Exception``."""

    def __init__(self, error: TrainingError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, eq=False)
class StagePlan:
    """The events of a traced step that one stage runs.

    Attributes:
        trace: the events of the step.
        first, last: numbers of the first event of the stage, and of the first event after it.
    """

    trace: Trace
    first: int
    last: int

    @cached_property
    def received(self) -> list[Value]:
        """Values that the stage receives from the stage before it."""
        return self.trace.carried(self.first)

    @cached_property
    def sent(self) -> list[Value]:
        """Values that the stage sends to the stage after it."""
        return self.trace.carried(self.last)

    @property
    def is_last(self) -> bool:
        """True if the stage computes the result of the step."""
        return self.last == len(self.trace.events)


@dataclass(eq=False)
class _StageRun:
    """State of a micro-batch in the forward pass of a stage.

    Attributes:
        plan: the events of the step.
        number: number of the next event.
        values: values that the stage received or computed for the next stages.
    """

    plan: StagePlan
    number: int
    values: dict[Value, Tensor]


class PipelineStage:
    """Part of a network that one rank runs. Each call of a unit is an event of the running step.

    Args:
        network: the network.
        units: the units of ``network``, whose ``forward`` methods are replaced.
        device: device of this rank.
    """

    def __init__(self, network: nn.Module, units: Mapping[str, nn.Module], device: torch.device) -> None:
        self._network, self._units, self._device = network, units, device
        self._replays: dict[str, Replay] = {}  # modules that are called again for skipped events, by name
        self._run: _StageRun | None = None
        self._hooks: list[RemovableHandle] = []
        for name, unit in units.items():
            install(unit, UnitForward(unit, name, self.call))

    def __deepcopy__(self, memo: object) -> PipelineStage:
        return self  # the wrappers that refer to it are removed from copies of the network

    def close(self) -> None:
        """Remove the hooks of the units. ``unwrap`` restores the ``forward`` methods."""
        for hook in self._hooks:
            hook.remove()

    def check(self, plan: StagePlan) -> None:
        """Check that this stage stores the parameters that ``plan`` uses.

        Raises:
            TrainingError: the step with the first batch did not use a parameter on this stage.
        """
        used = [
            self._network.get_parameter(name)
            for name, number in plan.trace.weights.items()
            if number < plan.last or plan.is_last
        ]
        for event in plan.trace.events[plan.first : plan.last]:
            used += self._units[event.unit].parameters()
        if absent := {each for each in used if each.is_meta}:
            name = next(name for name, each in self._network.named_parameters() if each in absent)
            problem = "is used on another stage than with the first batch, so this stage does not store it"
            action = "Call the same modules in the same order in each step, without random depth"
            raise TrainingError("training_step", name, problem, action)

    def forward(self, plan: StagePlan, step: Callable[[], Any], received: Sequence[Tensor]) -> Any:
        """Run the events of this stage for one micro-batch.

        Args:
            plan: the events of the step.
            step: function that runs the step.
            received: a tensor for each value that the plan receives.

        Returns:
            The result of the step on the last stage; otherwise a tensor for each value that the plan sends.

        Raises:
            TrainingError: the step called other units than the traced step.
        """
        if not self._hooks:  # not before, because the hooks of fully_shard must run before a hook that leaves the step
            self._hooks = [each.register_forward_hook(lambda *_: self._leave()) for each in self._units.values()]
        for name in {each for event in plan.trace.events for each in event.replayed} - self._replays.keys():
            self._replays[name] = Replay(module := self._network.get_submodule(name))
            install(module, self._replays[name])
        self._run = run = _StageRun(plan, 0, dict(zip(plan.received, received, strict=True)))
        try:
            result = step()
        except StageDone:
            return [run.values[value] for value in plan.sent]
        except StageError as error:
            raise error.error from None
        finally:
            self._run = None
        if run.number != len(plan.trace.events):
            raise _changed(plan, "the end of the step", run.number)
        return result

    def call(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an event, or return the values of a skipped event."""
        run = self._run
        if run is None:  # an evaluation, or a block that is recomputed in backward
            return forward(*args, **kwargs)
        plan, number, events = run.plan, run.number, run.plan.trace.events
        if number >= len(events) or events[number].unit != name:
            raise StageError(_changed(plan, name, number))
        run.number += 1
        if number < plan.first:
            return self._skipped(run, number)
        self._run = None  # a unit can call other units
        replays = [self._replays[each] for each in dict.fromkeys(events[number].replayed)]
        try:
            with ExitStack() as stack:
                for replay in replays:
                    stack.enter_context(replay.recording())
                output = forward(*args, **kwargs)
        finally:
            self._run = run
        made = (output, [each for replay in replays for each in replay.outputs])
        leaves, form = torch_private.split_leaves(made)
        for value in plan.sent:
            if value[0] == number:
                leaf = leaves[value[1]]
                spec = plan.trace.spec(value)
                if not isinstance(leaf, Tensor) or (tuple(leaf.shape), leaf.dtype) != (spec.shape, spec.dtype):
                    raise StageError(_changed(plan, f"another output of {name}", number))
                if torch_private.is_view(leaf):  # fully_shard adds a hook to the output, which must be the sent tensor
                    leaf = leaves[value[1]] = leaf.clone()
                    output = torch_private.join_leaves(leaves, form)[0]
                run.values[value] = leaf.clone() if value in plan.trace.written else leaf
        return output

    def _skipped(self, run: _StageRun, number: int) -> Any:
        event, written = run.plan.trace.events[number], run.plan.trace.written
        leaves = []
        for index, leaf in enumerate(event.leaves):
            value, is_written = (number, index), (number, index) in written
            if not isinstance(leaf, Spec):
                leaves.append(leaf)
            elif value in run.values:
                leaves.append(run.values[value].clone() if is_written else run.values[value])
            else:
                leaves.append(_poison(leaf, self._device, is_written))
        output, of_modules = torch_private.join_leaves(leaves, event.form)
        for name, each in zip(event.replayed, of_modules, strict=True):
            self._replays[name].again(each)
        return output

    def _leave(self) -> None:
        """Leave the step if its last event on this stage has run."""
        if self._run is not None and self._run.number == self._run.plan.last and not self._run.plan.is_last:
            raise StageDone


def _changed(plan: StagePlan, name: str, number: int) -> TrainingError:
    events = plan.trace.events
    expected = events[number].unit if number < len(events) else "the end of the step"
    return TrainingError(
        "training_step",
        name,
        f"the first batch ran {expected} at this place, and a pipeline requires the same order in each step",
        "Make the order of the modules independent of the values in a batch",
    )


def _poison(spec: Spec, device: torch.device, is_written: bool) -> Tensor:
    value = float("nan") if spec.dtype.is_floating_point or spec.dtype.is_complex else 0
    filled = torch.full((), value, dtype=spec.dtype, device=device).expand(spec.shape)
    return filled.clone() if is_written else filled
