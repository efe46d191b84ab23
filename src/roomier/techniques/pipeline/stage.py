"""Execution of a training step on the stages of a pipeline.

A stage runs the step of the user with the full micro-batch. Skipped events before the stage return the values that the
stage received, and NaN in place of all other outputs. After the last event of the stage, a :class:`StageDone` leaves
the step. It is not an ``Exception``, so that the user's code does not catch it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

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


@dataclass(eq=False)
class _StageRun:
    """State of a micro-batch in the forward pass of a stage.

    Attributes:
        number: number of the next event.
        values: values that the stage received or computed for the next stages.
    """

    number: int
    values: dict[Value, Tensor]


@dataclass(eq=False)
class PipelineStage:
    """Consecutive events that one rank runs.

    Attributes:
        trace: the events of the step.
        first, last: numbers of the first event of the stage, and of the first event after it.
        device: device of this rank.
        received: values that the stage receives from the stage before it.
        sent: values that the stage sends to the stage after it.
        replays: wrappers of the modules that are called again for skipped events, by name.
    """

    trace: Trace
    first: int
    last: int
    device: torch.device
    received: list[Value] = field(init=False)
    sent: list[Value] = field(init=False)
    replays: dict[str, Replay] = field(default_factory=dict)
    _run: _StageRun | None = None

    def __post_init__(self) -> None:
        self.received = self.trace.carried(self.first)
        self.sent = self.trace.carried(self.last)

    @property
    def is_last(self) -> bool:
        """True if the stage computes the result of the step."""
        return self.last == len(self.trace.events)

    def forward(self, step: Callable[[], Any], received: Sequence[Tensor]) -> Any:
        """Run the events of this stage for one micro-batch.

        Args:
            step: function that runs the step.
            received: a tensor for each value in :attr:`received`.

        Returns:
            The result of the step if :attr:`is_last`; otherwise a tensor for each value in :attr:`sent`.

        Raises:
            TrainingError: the step called other units than the traced step.
        """
        self._run = run = _StageRun(0, dict(zip(self.received, received, strict=True)))
        try:
            result = step()
        except StageDone:
            return [run.values[value] for value in self.sent]
        except StageError as error:
            raise error.error from None
        finally:
            self._run = None
        if run.number != len(self.trace.events):
            raise self._changed("the end of the step", run.number)
        return result

    def call(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an event, or return the values of a skipped event."""
        run = self._run
        if run is None:  # an evaluation, or a block that is recomputed in backward
            return forward(*args, **kwargs)
        number, events = run.number, self.trace.events
        if number >= len(events) or events[number].unit != name:
            raise StageError(self._changed(name, number))
        run.number += 1
        if number < self.first:
            return self._skipped(run, number)
        self._run = None  # a unit can call other units
        replays = [self.replays[each] for each in dict.fromkeys(events[number].replayed)]
        try:
            with ExitStack() as stack:
                for replay in replays:
                    stack.enter_context(replay.recording())
                output = forward(*args, **kwargs)
        finally:
            self._run = run
        leaves = torch_private.split_leaves((output, [each for replay in replays for each in replay.outputs]))[0]
        for value in self.sent:
            if value[0] == number:
                leaf = leaves[value[1]]
                spec = self.trace.spec(value)
                if not isinstance(leaf, Tensor) or (tuple(leaf.shape), leaf.dtype) != (spec.shape, spec.dtype):
                    raise StageError(self._changed(f"another output of {name}", number))
                run.values[value] = leaf.clone() if value in self.trace.written else leaf
        return output

    def _skipped(self, run: _StageRun, number: int) -> Any:
        event = self.trace.events[number]
        leaves = []
        for index, leaf in enumerate(event.leaves):
            value, is_written = (number, index), (number, index) in self.trace.written
            if not isinstance(leaf, Spec):
                leaves.append(leaf)
            elif value in run.values:
                leaves.append(run.values[value].clone() if is_written else run.values[value])
            else:
                leaves.append(_poison(leaf, self.device, is_written))
        output, of_modules = torch_private.join_leaves(leaves, event.form)
        for name, each in zip(event.replayed, of_modules, strict=True):
            self.replays[name].again(each)
        return output

    def leave(self) -> None:
        """Leave the step if its last event on this stage has run."""
        if self._run is not None and self._run.number == self.last and not self.is_last:
            raise StageDone

    def _changed(self, name: str, number: int) -> TrainingError:
        events = self.trace.events
        expected = events[number].unit if number < len(events) else "the end of the step"
        return TrainingError(
            "training_step",
            name,
            f"the first batch ran {expected} at this place, and a pipeline requires the same order in each step",
            "Make the order of the modules independent of the values in a batch",
        )


def parameters_of_stage(network: nn.Module, units: Mapping[str, nn.Module], stage: PipelineStage) -> set[str]:
    """Return the names of the parameters that ``stage`` reads. Shared weights and weights that glue reads can belong to
    several stages. Unused parameters belong to the last stage."""
    trace = stage.trace
    names: dict[nn.Parameter, str] = {each: name for name, each in network.named_parameters()}
    of_units = {name: {names[each] for each in unit.parameters()} for name, unit in units.items()}
    read = {name for event in trace.events for name in of_units[event.unit]} | trace.weights.keys()
    own = {name for event in trace.events[stage.first : stage.last] for name in of_units[event.unit]}
    own |= {name for name, number in trace.weights.items() if number < stage.last or stage.is_last}
    return own | (set(names.values()) - read if stage.is_last else set())


def _poison(spec: Spec, device: torch.device, is_written: bool) -> Tensor:
    value = float("nan") if spec.dtype.is_floating_point or spec.dtype.is_complex else 0
    filled = torch.full((), value, dtype=spec.dtype, device=device).expand(spec.shape)
    return filled.clone() if is_written else filled


def install_stage(network: nn.Module, units: Mapping[str, nn.Module], stage: PipelineStage) -> None:
    """Make each call of a unit of ``network`` an event of ``stage``."""
    replayed = {name for event in stage.trace.events for name in event.replayed}
    for name in replayed:
        stage.replays[name] = Replay(module := network.get_submodule(name))
        install(module, stage.replays[name])
    for name, unit in units.items():
        install(unit, UnitForward(unit, name, stage))
        unit.register_forward_hook(lambda *_: stage.leave())
