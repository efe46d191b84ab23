"""Detection of the blocks that can run on slices of the sequence, by forward and backward passes on fake tensors."""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Collection, Iterator, Set
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from roomier.api.hooks import step_of
from roomier.api.module import Module
from roomier.core.errors import RoomierError
from roomier.core.mesh import Mesh
from roomier.core.ranks import Ranks
from roomier.core.tree import map_tensors, tensors
from roomier.engine.facts import Facts, facts_of
from roomier.plan import Plan
from roomier.planner.fake.fake_world import fake_world
from roomier.planner.fake.shapes import shapes_of, shapes_of_batch
from roomier.planner.fake.user_code import reason_of
from roomier.planner.workload import Workload
from roomier.techniques.context.dry_pass import DryPass, dry_pass
from roomier.techniques.context.region import FIELD, CheckedCall, SequenceRegion, check_length, find_region, rejected
from roomier.techniques.loss.chunked import find_output_layer
from roomier.techniques.precision.policy import precision_of


def find_context_region(
    module: Module, batch: Any, plan: Plan, excluded: Collection[str] = ()
) -> tuple[SequenceRegion, list[CheckedCall]]:
    """Return the region of ``module`` and one recorded call of each of its blocks and later layers.

    Args:
        excluded: names of later layers that do not run on slices.

    Raises:
        RoomierError: the model or the batch does not support slices of the sequence.
    """
    workload = Workload.of(module, batch)
    plan = replace(plan, parallel=replace(plan.parallel, accelerator="cpu"))  # fake tensors are on the CPU
    with fake_world(Mesh(), is_pairwise=True):
        copied = shapes_of(workload.module, precision_of(plan.precision.mode, torch.device("cpu")).weight_dtype)
        return context_region_of_shapes(copied, workload.batch, plan, excluded)


def facts_with_region(plan: Plan, module: Module, batch: Any, ranks: Ranks) -> Facts:
    """Return the properties of ``module``, a copy without values, including its region if ``plan`` has a context size.
    Call this function inside :func:`fake_world`."""
    facts = facts_of(plan, module, ranks)
    if plan.parallel.context_parallel_size == 1:
        return facts
    return replace(facts, region=context_region_of_shapes(module, batch, plan)[0])


def context_region_of_shapes(
    module: Module, batch: Any, plan: Plan, excluded: Collection[str] = ()
) -> tuple[SequenceRegion, list[CheckedCall]]:
    """Return the region of ``module``, a copy without values. Call this function inside :func:`fake_world`."""
    parallel = plan.parallel
    size, length = parallel.context_parallel_size, _length_of(batch, parallel.context_parallel_size)
    check_length(length, size, parallel.num_ranks)
    try:
        one, logits_bytes = _dry_pass(module, batch, plan)
    except Exception as error:
        if caller := _caller_of_flex_attention(error):
            problem = f"does not support flex_attention, which {caller} calls"
            action = "Use attn_implementation='sdpa' for a Hugging Face model, or scaled_dot_product_attention"
            raise rejected(size, problem, action) from error
        problem = f"requires a dry run of the training step, in which tensors have no values, but it {reason_of(error)}"
        action = "Make the step depend only on shapes, or use context_parallel_size=1"
        raise RoomierError(FIELD, size, problem, action) from error  # a copy with fewer blocks can also fail
    shorter = length - max(1, length // 4)
    try:
        two, _ = _dry_pass(module, map_tensors(lambda each: _shortened(each, length, shorter), batch), plan)
    except Exception as error:
        problem = f"requires a model for sequences of any length, but a batch of length {shorter} {reason_of(error)}"
        raise rejected(size, problem, "Use a model without a fixed length") from error
    region, examples = find_region(one, two, size, parallel.num_ranks, excluded)
    return replace(region, logits_bytes=logits_bytes), examples


def _dry_pass(module: Module, batch: Any, plan: Plan) -> tuple[DryPass, int]:
    """Return the record of a forward pass, and the bytes of its logits; see :class:`SequenceRegion`."""
    facts = facts_of(plan, module, Ranks())
    step, precision = step_of(module, "training_step"), facts.precision
    layers: list[nn.Module] = []
    with suppress(RoomierError):  # no layer, or several
        layers = [find_output_layer(facts.network, facts.blocks)]
    num_bytes = [0]

    def measure(layer: nn.Module, args: Any, logits: Tensor) -> None:
        # The logits and their gradients are at least float32. 16-bit logits exist in addition.
        size = logits.itemsize
        num_bytes[0] += logits.numel() * (8 + size if size < 4 else 2 * size)

    def run() -> Any:
        given = shapes_of_batch(batch)
        if precision.weight_dtype:
            given = precision.convert_batch(given)
        with precision.forward_context()():
            return step(given, 0)

    others = list(_outermost_without(facts.network, {*facts.blocks, *layers}))
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(layer.register_forward_hook(measure))
        return dry_pass(facts.network, facts.blocks, others, run), num_bytes[0]


def _outermost_without(module: nn.Module, inner: Set[nn.Module]) -> Iterator[nn.Module]:
    """Yield the outermost layers in ``module`` that contain no module of ``inner``."""
    for child in module.children():
        has_forward = not isinstance(child, (nn.ModuleList, nn.ModuleDict))
        if has_forward and inner.isdisjoint(child.modules()):
            yield child
        elif child not in inner:
            yield from _outermost_without(child, inner)


def _caller_of_flex_attention(error: BaseException) -> str | None:
    """Return the class of the module that called flex_attention, if ``error`` was raised there.

    The passes run on the CPU, where flex_attention has no backward pass.
    """
    flex: Any = sys.modules.get("torch.nn.attention.flex_attention")
    caller = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        caller = type(each).__name__ if isinstance(each := frame.f_locals.get("self"), nn.Module) else caller
        if flex is not None and frame.f_code.co_filename == flex.__file__:
            return caller
    return None


def _length_of(batch: Any, size: int) -> int:
    """Return the most frequent size of dimension 1 among the tensors in ``batch``."""
    counts = Counter(each.shape[1] for each in tensors(batch) if each.dim() > 1)
    if not counts:
        problem = "requires batches of shape (samples, tokens), but no tensor of the batch has two dimensions"
        raise rejected(size, problem, "Pass batches of sequences")
    return counts.most_common(1)[0][0]


def _shortened(tensor: Tensor, length: int, shorter: int) -> Tensor:
    """Return ``tensor`` with dimension 1, and later dimensions of equal size, shortened to ``shorter``.

    Tokens in the middle are removed, because masks depend on the padding at both ends.
    """
    head = shorter // 2
    tail = shorter - head
    if tensor.dim() > 1 and tensor.shape[1] == length:
        for dim, size in enumerate(tensor.shape):
            if dim and size == length:
                tensor = torch.cat([tensor.narrow(dim, 0, head), tensor.narrow(dim, length - tail, tail)], dim)
    return tensor
