"""Record of the events of a training step, and of the values that they exchange.

[Note: events of a pipeline]
A call of a unit is an *event*; all other code of the step is *glue*. Every stage runs the glue of the full step, but
only its own events. For each output of an event, the trace records which later events consume it, directly or through
glue. A boundary between two stages carries the outputs of earlier events that later events consume. Outputs that reach
the result of the step, or that Python reads as a number, are consumed at the end, so every later stage receives them.

The glue runs on the values of a real batch, but the parameters are zeros without memory, and the units run on fake
tensors. A value that Python reads can therefore differ from the value during training. If it changes which units are
called, the stage detects the difference.

Provenance is recorded per memory: views share the sources of their base, and an operation that writes to memory adds
sources to it.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from roomier.core import torch_fake, torch_private
from roomier.core.errors import TrainingError
from roomier.core.wrapped_forward import WrappedForward, install

Value = tuple[int, int]
"""Number of an event, and index of a tensor among the leaves of its output."""
END = sys.maxsize
"""Number that stands for the end of the step in place of an event."""
Fake = Callable[[], AbstractContextManager[Any]]
_DEPENDS_ON_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@dataclass(frozen=True)
class Spec:
    """Description of a tensor that a stage sends or replaces."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Spec:
        """Return the description of ``tensor``."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)

    @property
    def num_bytes(self) -> int:
        """Size of the elements in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Event:
    """A call of a unit.

    Attributes:
        unit: name of the unit.
        form: structure of the output.
        leaves: leaves of the output; a :class:`Spec` in place of each tensor.
        replayed: names of the modules inside the unit that are called again when the event is skipped, so that their
            hooks receive the outputs. The output of the event is a tuple: the output of the unit, and their outputs.
    """

    unit: str
    form: Any
    leaves: tuple[Any, ...]
    replayed: tuple[str, ...] = ()


@dataclass(eq=False)
class Trace:
    """Events of a step; see [Note: events of a pipeline].

    Attributes:
        events: the events in the order of the calls.
        uses: for each output of an event, the numbers of the events that consume it. ``END`` stands for the end of
            the step.
        weights: parameters that glue reads, and the number of events before the first read.
        written: outputs that glue modifies in place.
        joined: events at which no stage can begin, because ``torch.utils.checkpoint`` recomputes them together with the
            event before.
        random: names of the modules inside of units that draw random numbers. The name of glue is empty.
    """

    events: list[Event] = field(default_factory=list)
    uses: dict[Value, set[int]] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)
    written: set[Value] = field(default_factory=set)
    joined: set[int] = field(default_factory=set)
    random: set[str] = field(default_factory=set)

    def carried(self, boundary: int) -> list[Value]:
        """Return the values that the boundary before the event ``boundary`` carries."""
        return sorted(value for value, events in self.uses.items() if value[0] < boundary <= max(events))

    @cached_property
    def with_gradients(self) -> frozenset[Value]:
        """The values through which gradients reach an event: the result of the step depends on them."""
        found: set[Value] = set()
        for value in sorted(self.uses, reverse=True):
            if self.spec(value).requires_grad and any(
                event == END or any((event, index) in found for index in range(len(self.events[event].leaves)))
                for event in self.uses[value]
            ):
                found.add(value)
        return frozenset(found)

    def spec(self, value: Value) -> Spec:
        """Return the shape and dtype of ``value``."""
        spec: Spec = self.events[value[0]].leaves[value[1]]
        return spec


def trace_step(
    network: nn.Module,
    units: Mapping[str, nn.Module],
    run: Callable[[], Any],
    fake: Fake = torch_fake.fake_tensors,
) -> Trace:
    """Record the step that ``run`` executes.

    Args:
        network: copy of a model; see :func:`parameters_without_values`.
        units: the units of ``network``.
        run: function that runs the training step and returns its result.
        fake: context in which a unit runs on fake tensors.

    Raises:
        TrainingError: a unit passes tensors to other code in a way that stages cannot reproduce.
    """
    real: set[type[nn.Module]] = set()  # classes of units whose operations depend on values
    replayed: set[type[nn.Module]] = set()  # classes of modules in units whose hooks read their outputs
    while True:
        recorder = _StepRecorder(network, units, fake, real, replayed)
        try:
            with recorder.installed():
                result = run()
            # Code that runs after the step can read tensors in attributes, for example to log them.
            stored = [each for module in network.modules() for each in vars(module).values() if not _is_registry(each)]
            recorder.consume((result, stored), END)
            return recorder.trace
        except _ValuesRequired as found:
            real.add(type(found.unit))
        except _Escaped as found:
            kind = type(network.get_submodule(found.name))
            if kind in replayed or found.name in units:
                problem = f"reads a tensor that {found.name} stores, which only the stage of this module computes"
                action = f"Return the tensor from {found.name}"
                raise TrainingError("training_step", found.reader, problem, action) from None
            replayed.add(kind)
        # The interrupted event may have changed a cache, so the step starts again.


def parameters_without_values(network: nn.Module) -> dict[int, nn.Parameter]:
    """Return, for the id of each parameter, a parameter of zeros on the CPU that has the same shape and no memory.
    ``copy.deepcopy`` accepts the result as its memo."""

    def zeros(tensor: Tensor) -> nn.Parameter:
        expanded = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
        return nn.Parameter(expanded, requires_grad=tensor.requires_grad)

    return {id(each): zeros(each) for each in network.parameters()}


class _Zeros(torch.autograd.Function):
    """Zeros with a gradient function, so that code may modify them in place."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, spec: Spec) -> Tensor:
        return _zeros(replace(spec, requires_grad=False))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("a trace has no backward pass")


class _ValuesRequired(BaseException):
    """An operation in ``unit`` depends on values."""

    def __init__(self, unit: nn.Module) -> None:
        super().__init__(unit)
        self.unit = unit


class _Escaped(BaseException):
    """``reader`` reads a tensor that the module ``name`` created in an event, and that is not an output of the unit."""

    def __init__(self, name: str, reader: str) -> None:
        super().__init__(name, reader)
        self.name, self.reader = name, reader


class Replay(WrappedForward):
    """Wrapper for a module inside of a unit, whose hooks also read its outputs if the unit is skipped.

    Attributes:
        module: the module.
        outputs: outputs of the module in the current event.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.module = module
        self.outputs: list[Any] = []
        self._given: tuple[Any, ...] = ()
        self._is_recording = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._given:
            return self._given[0]
        output = self.forward(*args, **kwargs)
        if self._is_recording:
            self.outputs.append(output)
        return output

    @contextmanager
    def recording(self, *, withholds: bool = False) -> Iterator[None]:
        """Run an event. If ``withholds``, the hooks of the module do not run."""
        self.outputs.clear()
        self._is_recording = True
        hooks = self.module._forward_hooks
        if withholds:
            self.module._forward_hooks = OrderedDict()
        try:
            yield
        finally:
            self._is_recording = False
            self.module._forward_hooks = hooks

    def again(self, output: Any) -> None:
        """Call the module, including its hooks, with the result ``output``."""
        self._given = (output,)
        try:
            self.module()
        finally:
            self._given = ()


class UnitForward(WrappedForward):
    """Wrapper for the ``forward`` method of a unit, which makes each call an event.

    Args:
        module: the unit.
        name: name of the unit.
        call: function that returns the output of a call, given the name, the original method, and the arguments.
    """

    def __init__(self, module: nn.Module, name: str, call: Callable[..., Any]) -> None:
        super().__init__(module)
        self._name, self._call = name, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._name, self.forward, args, kwargs)


class _StepRecorder:
    def __init__(
        self,
        network: nn.Module,
        units: Mapping[str, nn.Module],
        fake: Fake,
        real: set[type[nn.Module]],
        replayed: set[type[nn.Module]],
    ) -> None:
        self.trace = Trace()
        inner = {part for unit in units.values() for part in unit.modules() if part is not unit}
        self._replays = {
            name: Replay(module)
            for name, module in network.named_modules()
            if module in inner and type(module) in replayed
        }
        self._fake, self._real = fake, real
        self._units = units
        self._names = {module: name or type(module).__name__ for name, module in network.named_modules()}
        self._weights = {_memory(each): name for name, each in network.named_parameters()}
        self._buffers = {_memory(each) for each in network.buffers()}  # a unit can change them in place
        self._sources: dict[int, frozenset[Value]] = {}  # by memory
        self._inner: dict[int, tuple[int, str]] = {}  # memory that an event created: its number, and the module
        self._arguments: set[int] = set()  # memory of the arguments of the current event
        self._is_inside = False
        self._checkpoint: FrameType | None = None  # the checkpoint that runs the last event
        self._kept: list[Tensor] = []  # memory is not reused while these tensors exist
        self._running: list[str] = []  # names of the modules that run inside of the current event

    @contextmanager
    def installed(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name, unit in self._units.items():
                install(unit, forward := UnitForward(unit, name, self.call))
                stack.callback(setattr, unit, "forward", forward.forward)
                for part in unit.modules():
                    stack.callback(part.register_forward_pre_hook(self._enter).remove)
                    stack.callback(part.register_forward_hook(self._leave).remove)
            for replay in self._replays.values():
                install(replay.module, replay)
                stack.callback(setattr, replay.module, "forward", replay.forward)
            stack.enter_context(torch_private.intercept(self._on_operation))
            stack.enter_context(torch_private.replace_functions(self._reads()))
            yield

    def consume(self, tree: Any, consumer: int) -> None:
        """Record that ``consumer`` reads the tensors in ``tree``."""
        for tensor in _tensors(tree):
            self._check_escape(tensor)
            for value in self._sources_of(tensor):
                self.trace.uses.setdefault(value, set()).add(consumer)

    def call(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an event on fake tensors, and return zeros in place of its outputs."""
        if self._is_inside:  # a unit that another unit calls
            return forward(*args, **kwargs)
        if _running_frame(torch.utils.checkpoint.CheckpointFunction.forward):
            problem = (
                f"calls {name} inside of a reentrant checkpoint, which a stage cannot leave without losing gradients"
            )
            raise TrainingError("use_reentrant", True, problem, "Pass use_reentrant=False to torch.utils.checkpoint")
        number = len(self.trace.events)
        checkpoint, self._checkpoint = self._checkpoint, _running_frame(torch.utils.checkpoint.checkpoint)
        if checkpoint is not None and checkpoint is self._checkpoint:
            self.trace.joined.add(number)
        leaves, form = torch_private.split_leaves((args, kwargs))
        self.consume((args, kwargs), number)
        for each in _tensors((args, kwargs)):
            self._read_weight(each)
        self._is_inside = True
        unit = self._units[name]
        try:
            if type(unit) in self._real:
                output, originals = self._run(forward, leaves, form, torch.clone)
            else:
                with self._fake():
                    output, originals = self._run(forward, leaves, form, _alike)
        except RuntimeError as error:
            if not torch_fake.requires_values(error):
                raise
            if type(unit) in self._real:  # it has stored a fake tensor
                problem = f"calls {name}, which stores or converts tensors in its first call, so it cannot be traced"
                action = "Create and convert these tensors before fit, or use pipeline_parallel_size=1"
                raise TrainingError("training_step", name, problem, action) from error
            raise _ValuesRequired(unit) from error
        finally:
            self._is_inside = False
        replayed = [each for each, replay in self._replays.items() for _ in replay.outputs]
        of_modules = [each for replay in self._replays.values() for each in replay.outputs]
        output, of_modules = self._outputs(name, (output, of_modules), originals, replayed)
        for each, made in zip(replayed, of_modules, strict=True):
            self._replays[each].again(made)
        return output

    def _run(
        self, forward: Callable[..., Any], leaves: list[Any], form: Any, convert: Callable[[Tensor], Tensor]
    ) -> tuple[Any, dict[int, Tensor]]:
        """Return the output of an event on converted arguments, and the argument for each memory of a converted one."""
        made = [convert(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        originals = {_memory(a): b for a, b in zip(made, leaves, strict=True) if isinstance(a, Tensor)}
        self._arguments = set(originals)
        args, kwargs = torch_private.join_leaves(made, form)
        self._kept += _tensors(made)
        with ExitStack() as stack:
            for replay in self._replays.values():
                stack.enter_context(replay.recording(withholds=True))
                replay.module.register_forward_hook(self._leave)
            stack.enter_context(torch_private.intercept(self._on_inner_operation))
            return forward(*args, **kwargs), originals

    def _outputs(self, name: str, output: Any, originals: Mapping[int, Tensor], replayed: Sequence[str]) -> Any:
        number = len(self.trace.events)
        leaves, form = torch_private.split_leaves(output)
        specs = [Spec.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.trace.events.append(Event(name, form, tuple(specs), tuple(replayed)))
        made: list[Any] = []
        for index, (leaf, spec) in enumerate(zip(leaves, specs, strict=True)):
            if isinstance(spec, Spec):
                memory = _memory(leaf)
                self._inner.pop(memory, None)
                same = originals.get(memory)
                tensor = _zeros(spec) if same is None else same
                self._kept.append(tensor)
                self._sources[_memory(tensor)] = self._sources_of(tensor) | {(number, index)}
                made.append(tensor)
            else:
                made.append(leaf)
        return torch_private.join_leaves(made, form)

    def _sources_of(self, tensor: Tensor) -> frozenset[Value]:
        return self._sources.get(_memory(tensor), frozenset())

    def _check_escape(self, tensor: Tensor) -> None:
        if (found := self._inner.get(_memory(tensor))) is not None:
            raise _Escaped(found[1], "the step")

    def _read_weight(self, tensor: Tensor) -> None:
        if (weight := self._weights.get(_memory(tensor))) is not None:
            self.trace.weights.setdefault(weight, len(self.trace.events))

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._running.append(self._names[module])

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()

    def _on_inner_operation(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        number = len(self.trace.events)
        if torch_private.draws(func, args, kwargs):
            self.trace.random.add(self._running[-1])
        for each in _tensors((args, kwargs)):
            found = self._inner.get(_memory(each))
            if found is not None and found[0] != number:
                raise _Escaped(found[1], self._running[-1])
        output = func(*args, **kwargs)
        for each in _tensors(output):
            memory = _memory(each)
            if not (memory in self._inner or memory in self._arguments or memory in self._buffers):
                self._inner[memory] = number, self._running[-1]
                self._kept.append(each)
        return output

    def _on_operation(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if self._is_inside:  # an operation of the fake mode
            return func(*args, **kwargs)
        if torch_private.draws(func, args, kwargs):
            self.trace.random.add("")
        read = list(_tensors((args, kwargs)))
        for each in read:
            self._check_escape(each)
            self._read_weight(each)
        if _DEPENDS_ON_VALUES.intersection(func.tags):
            self.consume(read, END)
        output = func(*args, **kwargs)
        sources = frozenset[Value]().union(*map(self._sources_of, read))
        changed = list(_tensors(output))
        if torch_private.writes_to_arguments(func):
            changed += read[:1]
            self.trace.written |= {value for each in read[:1] for value in self._sources_of(each)}
        for each in changed:
            self._kept.append(each)
            self._sources[_memory(each)] = self._sources_of(each) | sources
        return output

    def _reads(self) -> dict[Any, Callable[..., Any]]:
        """Return replacements for the functions that read values without an operation."""

        def reading(function: Callable[..., Any]) -> Callable[..., Any]:
            def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
                self.consume(tensor, END)
                return function(tensor, *args, **kwargs)

            return read

        return {function: reading(function) for function in (Tensor.tolist, Tensor.numpy, Tensor.__array__)}


_memory, _tensors = torch_private.memory_of, torch_private.iter_tensors


def _is_registry(value: object) -> bool:
    """Return whether ``value`` stores parameters, buffers, modules or hooks of a module."""
    return isinstance(value, dict) and any(isinstance(each, (nn.Module, nn.Parameter)) for each in value.values())


def _running_frame(function: Callable[..., Any]) -> FrameType | None:
    """Return the innermost call of ``function`` that is running."""
    frame: FrameType | None = sys._getframe()
    code = inspect.unwrap(function).__code__
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


def _zeros(spec: Spec) -> Tensor:
    made: Tensor
    if spec.requires_grad:
        made = _Zeros.apply(torch.zeros((), requires_grad=True), spec)  # type: ignore[no-untyped-call]
        return made
    made = torch.zeros(spec.shape, dtype=spec.dtype)
    if made.stride() == spec.stride:
        return made
    num_elements = 1 + sum((size - 1) * stride for size, stride in zip(spec.shape, spec.stride, strict=True))
    base = torch.zeros(max(1, num_elements), dtype=spec.dtype)
    # Not a view, because autograd rejects changes in place of a view that a custom function returns.
    return torch.empty(0, dtype=spec.dtype).set_(base.untyped_storage(), 0, spec.shape, spec.stride)


def _alike(tensor: Tensor) -> Tensor:
    return _zeros(Spec.of(tensor))
