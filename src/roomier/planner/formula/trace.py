"""What a forward keeps and a backward needs beside the model states: seen once, it serves every strategy.

[Note: what a trace leaves to the strategies]
One process takes one micro-batch through the model in a fake world, with the levers of the plan that work inside the
forward, and without an optimizer. Each :class:`Passage` says how far tensors rise above where they were when it began.
What the strategies divide is then added by formula. Two things inside a forward do depend on them: where matrices are
gathered in 16 bits, autocast makes no copies of them and their gradients come in 16 bits; and what is a view becomes a
tensor of its own behind a unit. So there is one trace for models that are whole, and one for models that are cut.

[Note: gradients that wait]
A gradient is *complete* when it is added to that of the parameter. Until then it is pending: DDP copies it into a
bucket and frees it, and further micro-batches add it to what is there. In models that are cut, gradients of 16 bits
stay pending: further micro-batches add them to what is there in 32 bits only when the backward of their unit is over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from roomier.api.module import Module
from roomier.api.step_arguments import num_step_arguments
from roomier.core.tree import map_tensors, tensors
from roomier.core.world import World
from roomier.engine.build import build
from roomier.engine.eager import EagerEngine
from roomier.memory.kinds import Kind
from roomier.memory.tracker import MemoryTracker, Snapshot, tracking
from roomier.optim.configured import Configured
from roomier.parallel.shard import parts_of, units_of, without_views
from roomier.plan import BatchPlan, OptimizerPlan, ParallelPlan, Plan
from roomier.planner.dry_runs.places import named_places, telling_places
from roomier.planner.dry_runs.work import Part, Work, WorkCounter
from roomier.planner.fake.fake_world import fake_world
from roomier.planner.fake.shapes import shapes_of, shapes_of_batch
from roomier.planner.workload import Workload
from roomier.precision.policy import precision_of


class Rise(NamedTuple):
    """Bytes above where they were.

    Attributes:
        activation: what the forward keeps, batches among it.
        temporary: all else that is no model state.
        gradient: of whole parameters.
        pending: of these, what is not complete; see [Note: gradients that wait].
    """

    activation: int = 0
    temporary: int = 0
    gradient: int = 0
    pending: int = 0

    def plus(self, other: Rise) -> Rise:
        return Rise(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def minus(self, other: Rise) -> Rise:
        return Rise(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Passage:
    """A part of the model that runs, once.

    Attributes:
        phase: ``"forward"`` or ``"backward"``.
        place: the part; empty for what lies between parts.
        moments: above where it began, of each change; the last is its end.
        needs_inner: in a backward, the norms and embeddings in the part are needed from here on; see
            :attr:`roomier.memory.weights.Unit.is_inner`.
    """

    phase: str
    place: str
    moments: tuple[Rise, ...]
    needs_inner: bool = True

    @cached_property
    def highest(self) -> Rise:
        """Where all of it is largest."""
        return self.highest_by(1, 0)

    @cached_property
    def highest_reduced(self) -> Rise:
        """Where it is largest, if what is complete is gone."""
        return self.highest_by(0, 1)

    @cached_property
    def highest_moved(self) -> Rise:
        """Where it is largest, if each gradient that is complete makes an earlier one go."""
        return self.highest_by(-1, 2)

    def highest_by(self, gradient_weight: float, pending_weight: float) -> Rise:
        return max(
            (Rise(), *self.moments),
            key=lambda each: (
                each.activation + each.temporary + gradient_weight * each.gradient + pending_weight * each.pending
            ),
        )

    @property
    def end(self) -> Rise:
        return self.moments[-1]

    def between(self, other: Passage, share: float) -> Passage:
        """On the line from this (0) to ``other`` (1), or beyond.

        Where both went through the same moments the line is drawn for each of them, so that the largest may be another
        one; else for the largest and the last alone.
        """

        def number_between(mine: int, theirs: int) -> int:
            return round(mine + (theirs - mine) * share)

        def rise_between(mine: Rise, theirs: Rise) -> Rise:
            return Rise(*map(number_between, mine, theirs))

        return replace(self, moments=tuple(map(rise_between, *_alike(self, other))))


class Visit(NamedTuple):
    """A passage with its levels above that between two steps: where it begins, where it is highest, where it ends.

    Attributes:
        highest, highest_reduced, highest_moved: see :class:`Passage`.
    """

    passage: Passage
    begin: Rise
    highest: Rise
    highest_reduced: Rise
    highest_moved: Rise
    end: Rise

    @classmethod
    def of(cls, passage: Passage, begin: Rise) -> Visit:
        rises = (passage.highest, passage.highest_reduced, passage.highest_moved, passage.end)
        return cls(passage, begin, *map(begin.plus, rises))


@dataclass(frozen=True)
class Trace:
    """One micro-batch; see [Note: what a trace leaves to the strategies].

    Attributes:
        batch_size: samples of it.
        batch_bytes: of the batch itself.
        passages: in their order.
        work: of the micro-batch, by phase and part of the model.
    """

    batch_size: int
    batch_bytes: int
    passages: tuple[Passage, ...]
    work: Mapping[Part, Work] = field(default_factory=dict)

    @cached_property
    def visits(self) -> tuple[Visit, ...]:
        """The passages with their levels above that between two steps."""
        return tuple(map(Visit.of, self.passages, self.levels))

    @cached_property
    def levels(self) -> list[Rise]:
        """Where each passage begins, above the level between two steps; and where the last ends."""
        begin = Rise(activation=self.batch_bytes)
        return list(accumulate((each.end for each in self.passages), Rise.plus, initial=begin))

    def at(self, batch_size: int, other: Trace) -> Trace:
        """For another number of samples: on the line through this and ``other``, which is of another number.

        Bytes and work are affine in it.
        """
        share = (batch_size - self.batch_size) / (other.batch_size - self.batch_size)
        return replace(self.between(other, share), batch_size=batch_size)

    def between(self, other: Trace, share: float) -> Trace:
        """On the line from this (0) to ``other`` (1), which went through the same passages."""
        passages = [mine.between(theirs, share) for mine, theirs in zip(self.passages, other.passages, strict=True)]
        batch_bytes = round(self.batch_bytes + (other.batch_bytes - self.batch_bytes) * share)
        work = {
            part: self.work.get(part, Work()) * (1 - share) + other.work.get(part, Work()) * share
            for part in {**self.work, **other.work}
        }
        return Trace(self.batch_size, batch_bytes, tuple(passages), work)

    def is_like(self, other: Trace) -> bool:
        """Whether both went through the same passages."""
        mine, theirs = ([(each.phase, each.place) for each in trace.passages] for trace in (self, other))
        return mine == theirs

    def kept_bytes(self, places: Collection[str]) -> dict[str, int]:
        """What the forward of each of ``places`` leaves for its backward, in the order in which they run."""
        kept: dict[str, int] = {}
        for each in self.passages:
            if each.phase == "forward" and each.place in places:
                kept[each.place] = kept.get(each.place, 0) + each.end.activation
        return kept


def _alike(mine: Passage, theirs: Passage) -> tuple[Sequence[Rise], Sequence[Rise]]:
    if len(mine.moments) == len(theirs.moments):
        return mine.moments, theirs.moments
    return [mine.highest, mine.highest_reduced, mine.end], [theirs.highest, theirs.highest_reduced, theirs.end]


def take_trace(workload: Workload, plan: Plan, *, is_cut: bool, like: str = "cpu") -> Trace:
    """Take a micro-batch of ``workload`` through its model, with what of ``plan`` works inside a forward.

    Args:
        is_cut: the model will be cut among ranks.
        like: ``"cpu"`` or ``"cuda"``, see :func:`roomier.planner.fake.fake_world.fake_world`.

    Raises:
        RoomierError: what ``build`` refuses.
    """
    plan = replace(
        plan,
        parallel=ParallelPlan(accelerator="cpu"),
        batch=BatchPlan(),
        optimizer=OptimizerPlan(),
    )
    device = torch.device("cpu")
    precision = precision_of(plan.precision.mode, device)
    with fake_world(World(0, 1, 0, 0, 1), is_pairwise=True, like=like) as ranks:
        module = shapes_of(workload.module, precision.weight_dtype)
        engine, _ = build(plan, module, lambda _: Configured([]), EagerEngine, ranks)
        inner = _as_if_cut(engine, precision.autocast_dtype) if is_cut else []
        batch = shapes_of_batch(workload.batch)
        batch_bytes = sum(each.untyped_storage().nbytes() for each in tensors(batch))
        passages, work = _tracked(engine, module, batch, inner, is_cut=is_cut)
    return Trace(workload.batch_size, batch_bytes, tuple(passages), work)


def _as_if_cut(engine: EagerEngine, compute_dtype: torch.dtype | None) -> list[nn.Module]:
    """Weights in the dtype in which they would be gathered, and no views behind units.

    Returns:
        Of each unit in two parts, the modules of the part that is not multiplied with.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    inner: list[nn.Module] = []
    network = engine.module
    for unit in units_of(network, engine.blocks):
        unit.register_forward_pre_hook(_pass_inputs, with_kwargs=True)
        for modules, dtype in parts_of(unit, compute_dtype):
            if modules != [unit]:
                inner += modules
            for module in modules:
                if all(not hasattr(each, "_roomier_part") for each in (module,)):
                    module.register_forward_hook(without_views)
                for each in module.parameters():
                    if each not in made:
                        cast = (
                            each
                            if dtype is None
                            else nn.Parameter(torch.empty_like(each, dtype=dtype), each.requires_grad)
                        )
                        made[each] = cast
    for module in network.modules():
        for name, parameter in module._parameters.items():
            if parameter in made:
                module._parameters[name] = made[parameter]
    return inner


class _Passed(torch.autograd.Function):
    """What ``fully_shard`` passes the inputs of a unit through, to learn when their gradients are there: an input that
    a unit returns as it is becomes a view by it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def _pass_inputs(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    def passed(tensor: Tensor) -> Tensor:
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return tensor
        return _Passed.apply(tensor)  # type: ignore[no-any-return,no-untyped-call]

    return map_tensors(passed, args), map_tensors(passed, kwargs)


class _Place(str):
    """A place, with what is known at the time when it is told.

    Attributes:
        complete_bytes: of gradients.
        needs_inner: see :class:`Passage`.
    """

    __slots__ = ("complete_bytes", "needs_inner")
    complete_bytes: int
    needs_inner: bool

    def __new__(cls, name: str, complete_bytes: int, needs_inner: bool) -> _Place:
        made = super().__new__(cls, name)
        made.complete_bytes, made.needs_inner = complete_bytes, needs_inner
        return made


def _tracked(
    engine: EagerEngine, module: Module, batch: Any, inner: Sequence[nn.Module], *, is_cut: bool
) -> tuple[list[Passage], Mapping[Part, Work]]:
    takes_index = num_step_arguments(module, "training_step", 2) > 1
    counter = WorkCounter()

    def training_step(given: Any) -> Any:
        return module.training_step(given, 0) if takes_index else module.training_step(given)

    batches = [batch]
    del batch
    with tracking(engine) as tracker, ExitStack() as stack:
        stack.enter_context(_telling_with_complete(tracker, engine, inner, is_cut=is_cut))
        stack.enter_context(counter.counting(lambda: (tracker.phase, str(tracker.place))))
        tracker.enter("forward")
        engine.forward_backward(lambda batch, _: training_step(batch), batches)
        passages = list(_passages(tracker.moments()))
    engine.close()
    return passages, dict(counter.by_part)


@contextmanager
def _telling_with_complete(
    tracker: MemoryTracker, engine: EagerEngine, inner: Sequence[nn.Module], *, is_cut: bool
) -> Iterator[None]:
    complete_bytes = 0

    def tell(name: str, needs_inner: bool = not inner) -> None:
        tracker.place = _Place(name, complete_bytes, needs_inner)

    def complete(parameter: Tensor) -> None:
        nonlocal complete_bytes
        assert parameter.grad is not None
        if is_cut and parameter.grad.itemsize < 4:
            return
        complete_bytes += parameter.grad.untyped_storage().nbytes()
        tracker.place = _Place(tracker.place, complete_bytes, getattr(tracker.place, "needs_inner", True))

    def watch(module: nn.Module, args: Any, output: Any) -> None:
        for each in tensors(output):
            if each.requires_grad and torch.is_grad_enabled():
                each.register_hook(lambda gradient: tell(tracker.place, True))  # type: ignore[no-untyped-call]

    tell("")
    trained = [each for each in engine.module.parameters() if each.requires_grad]
    handles = [each.register_post_accumulate_grad_hook(complete) for each in trained]  # type: ignore[no-untyped-call]
    handles += [each.register_forward_hook(watch) for each in inner]
    try:
        with telling_places(named_places(engine.module, engine.blocks), tell):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _passages(moments: Iterator[Snapshot]) -> Iterator[Passage]:
    begin = _rise(next(moments))
    phase = "forward"
    for (told, place, needs_inner), group in groupby(moments, _whereabouts):
        phase = told if phase == "forward" else phase  # what ends behind the backward belongs to it
        levels = [_rise(each) for each in group]
        yield Passage(phase, place, tuple(each.minus(begin) for each in levels), needs_inner)
        begin = levels[-1]


def _whereabouts(moment: Snapshot) -> tuple[str, str, bool]:
    return moment.phase, str(moment.place), getattr(moment.place, "needs_inner", True)


def _rise(moment: Snapshot) -> Rise:
    num_bytes = moment.num_bytes
    return Rise(
        num_bytes[Kind.ACTIVATION],
        num_bytes[Kind.TEMPORARY] + num_bytes[Kind.GATHERED] + num_bytes[Kind.COMMUNICATION],
        num_bytes[Kind.GRADIENT],
        max(0, num_bytes[Kind.GRADIENT] - getattr(moment.place, "complete_bytes", 0)),
    )
