"""The region of a model: the blocks that run on a slice of the sequence.

[Note: regions]
Two dry forward passes with sequences of different lengths determine the region. A dimension that has the length of the
sequence in both passes is a sequence dimension. A block belongs to the region if it calls
``scaled_dot_product_attention`` along the sequence. Consecutive blocks form a chain if an output of one is an argument
of the next. The arguments with one sequence dimension are sliced, except arguments that reach ``attn_mask`` and the
outputs of earlier blocks in the chain, which are slices already. The outputs of the last block of a chain are
gathered.

A later layer, such as the final norm, continues a chain if no other code reads the output of the chain. Its own outputs
are then gathered, so its activations are divided too. It must not draw random numbers, which each rank would draw for
other tokens, and its output must not be larger than its input, which would enlarge the gather.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from torch import Tensor

from roomier.core.errors import PlanError, first_few
from roomier.core.torch_private import memory_of
from roomier.techniques.context.dry_pass import DryPass, RecordedCall

FIELD = "context_parallel_size"
Place = tuple[int, int]
"""Index of a tensor among the leaves of arguments or outputs, and its sequence dimension."""


@dataclass(frozen=True)
class _Pair:
    """A call of a block or a later layer in the first dry pass, and the same call in the second dry pass, with the
    lengths of the sequences."""

    one: RecordedCall
    two: RecordedCall
    length: int
    other_length: int

    def dims(self, one: Any, two: Any) -> tuple[int, ...]:
        """Return the sequence dimensions of a leaf in the two passes."""
        if not isinstance(one, Tensor):
            return ()
        if not isinstance(two, Tensor) or one.dim() != two.dim():  # for example, a mask that a shorter batch omits
            return tuple(dim for dim, each in enumerate(one.shape) if each == self.length)
        sizes = zip(one.shape, two.shape, strict=True)
        return tuple(dim for dim, each in enumerate(sizes) if each == (self.length, self.other_length))

    @property
    def dims_of_leaves(self) -> list[tuple[int, ...]]:
        """Sequence dimensions of each argument."""
        return [self.dims(a, b) for a, b in zip(self.one.leaves, self.two.leaves, strict=True)]

    @property
    def dims_of_outputs(self) -> list[tuple[int, ...]]:
        """Sequence dimensions of each output."""
        return [self.dims(a, b) for a, b in zip(self.one.outputs, self.two.outputs, strict=True)]


@dataclass(frozen=True)
class RegionBlock:
    """A block, or a later layer, that runs on a slice of the sequence.

    Attributes:
        name: qualified name of the module.
        has_attention: False for a later layer.
        num_leaves: number of leaves in the arguments of the module.
        sliced: arguments to slice.
        is_first: True if the block is the first of a chain.
        gathered: outputs to gather; empty if the module is not the last of a chain.
    """

    name: str
    has_attention: bool
    num_leaves: int
    sliced: tuple[Place, ...]
    is_first: bool
    gathered: tuple[Place, ...]


@dataclass(frozen=True, eq=False)
class CheckedCall:
    """Call in a dry pass, from which the check of a block or a later layer creates arguments.

    Attributes:
        name: qualified name of the module.
        is_block: False for a later layer.
        leaves: leaves of the arguments.
        form: structure of the containers that hold the leaves.
        dims: sequence dimensions of each leaf.
        sliced: arguments that are slices, including the outputs of earlier blocks.
        outputs: outputs with one sequence dimension.
    """

    name: str
    is_block: bool
    leaves: Sequence[Any]
    form: Any
    dims: Sequence[tuple[int, ...]]
    sliced: tuple[Place, ...]
    outputs: tuple[Place, ...]

    @property
    def inputs(self) -> list[Place]:
        """The floating-point arguments that are slices."""
        return [place for place in self.sliced if self.leaves[place[0]].is_floating_point()]


@dataclass(frozen=True)
class SequenceRegion:
    """The blocks and later layers that run on a slice of the sequence; see [Note: regions].

    Attributes:
        blocks: the blocks and later layers.
        logits_bytes: bytes of the logits of a micro-batch and their gradients; 0 if no output layer is known.
    """

    blocks: tuple[RegionBlock, ...]
    logits_bytes: int = 0

    def as_data(self) -> list[Any]:
        """Return the region as plain values that can be sent to other ranks."""
        return [self.logits_bytes, *(astuple(block) for block in self.blocks)]

    @classmethod
    def from_data(cls, data: Sequence[Any]) -> SequenceRegion:
        """Return the region that :meth:`as_data` converted."""
        logits_bytes, *blocks = data
        return cls(tuple(RegionBlock(*values) for values in blocks), logits_bytes)


def rejected(size: int, problem: str, action: str) -> PlanError:
    """Return the error for a model or a batch that does not support the context size ``size``."""
    return PlanError(FIELD, size, problem, f"{action}, or use context_parallel_size=1")


def check_length(length: int, size: int, num_ranks: int) -> None:
    """Check that each rank receives at least two tokens, because many models treat a single token as generation.

    Raises:
        PlanError: the sequence is too short.
    """
    if length < 2 * size:
        problem = f"requires at least {2 * size} tokens, two for each rank, but the sequence has {length}"
        fitting = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0 and 2 * n <= length]
        action = f"Use context_parallel_size={max(fitting, default=1)} or longer sequences"
        raise PlanError(FIELD, size, problem, action)


def find_region(
    one: DryPass, two: DryPass, size: int, num_ranks: int, excluded: Collection[str] = ()
) -> tuple[SequenceRegion, list[CheckedCall]]:
    """Return the region of a model, given two dry passes with sequences of different lengths; and a call of each block
    and later layer in the region.

    Args:
        size: number of ranks that share a sequence.
        num_ranks: number of all ranks.
        excluded: names of later layers that do not belong to the region.

    Raises:
        PlanError: the model cannot run on slices of the sequence.
    """
    ones, twos = ([call for call in each.calls if call.is_block] for each in (one, two))
    if [call.name for call in ones] != [call.name for call in twos]:
        problem = "is not supported, because two forward passes, with sequences of different lengths, run other blocks"
        raise rejected(size, problem, "Run the same blocks in each batch, without layerdrop")
    pairs = [_Pair(a, b, a.length, b.length) for a, b in zip(ones, twos, strict=True) if a.attention]
    if not pairs:
        problem = "requires blocks (layers that repeat) that call torch's scaled_dot_product_attention, but none does"
        called = first_few(list(dict.fromkeys(call.name for call in ones))) if ones else "no block is called"
        action = (
            "Call it, for a Hugging Face model with attn_implementation='sdpa' if the model supports it, or define "
        )
        action += "model_blocks()"
        raise rejected(size, f"{problem} ({called})", action)
    for each in pairs:
        _check_attention(each.one, each.two, size, num_ranks)
    pairs = _with_later_layers(one, two, pairs, excluded)
    joined = [n > 0 and bool(_inherited(each.one, [pairs[n - 1]])) for n, each in enumerate(pairs)]
    while True:
        blocks = list(_blocks(one, pairs, joined))
        conflict = _called_differently(blocks)
        if conflict is None:
            break
        if later := [each.one.name for each in pairs if not each.one.is_block]:
            return find_region(one, two, size, num_ranks, {*excluded, *later})
        alone = {n for n, block in enumerate(blocks) if block.name == conflict}
        if not any(joined[n] for n in alone | {n + 1 for n in alone if n + 1 < len(pairs)}):
            action = "Call each block with the same arguments"
            raise rejected(size, f"is not supported, because {conflict} is called in two ways", action)
        joined = [each and n not in alone and n - 1 not in alone for n, each in enumerate(joined)]
    for each, block in zip(pairs, blocks, strict=True):
        _check_sliced(each.one, block, size)
    _check_escapes(one, pairs, blocks, size)
    return SequenceRegion(tuple({block.name: block for block in blocks}.values())), [_example(each) for each in pairs]


def _with_later_layers(one: DryPass, two: DryPass, pairs: Sequence[_Pair], excluded: Collection[str]) -> list[_Pair]:
    """Return ``pairs`` and the calls of later layers that continue a chain."""
    if [call.name for call in one.calls] != [call.name for call in two.calls]:
        return list(pairs)
    of_blocks, found = {each.one.number: each for each in pairs}, list[_Pair]()
    for a, b in zip(one.calls, two.calls, strict=True):
        if a.number in of_blocks:
            found.append(of_blocks[a.number])
        elif found and not a.is_block and a.name not in excluded:
            later = replace(found[-1], one=a, two=b)
            if _continues(one, later, found):
                found.append(later)
    num_calls = Counter(call.name for call in one.calls)
    num_found = Counter(each.one.name for each in found)
    used_elsewhere = {each.one.name for each in found if num_found[each.one.name] < num_calls[each.one.name]}
    if used_elsewhere - {*excluded} and any(not each.one.is_block for each in found):
        return _with_later_layers(one, two, pairs, {*excluded, *used_elsewhere})
    return found


def _continues(record: DryPass, later: _Pair, earlier: Sequence[_Pair]) -> bool:
    """Return whether a later layer can run on a slice, and is the only code that reads the output of ``earlier``."""
    call, inside = later.one, {each.one.number for each in earlier}
    is_alike = len(call.leaves) == len(later.two.leaves) and len(call.outputs) == len(later.two.outputs)
    if call.attention or call.is_random or call.modified or not is_alike:
        return False

    def read(call: RecordedCall, dims: Sequence[tuple[int, ...]]) -> list[tuple[Tensor, tuple[int, ...]]]:
        pairs = zip(call.outputs, dims, strict=True)
        return [(each, found) for each, found in pairs if isinstance(each, Tensor) and record.is_read(each)]

    def is_only_reader(tensor: Tensor) -> bool:
        key = memory_of(tensor)
        return key not in record.returned and record.readers[key] - inside == {call.number}

    inherited, inputs = _inherited(call, earlier), read(earlier[-1].one, earlier[-1].dims_of_outputs)
    outputs = read(call, later.dims_of_outputs)
    known = {memory_of(each) for each, _ in outputs}
    others = [each for index, each in enumerate(call.leaves) if isinstance(each, Tensor) and index not in inherited]
    escaping = {key for key in record.readers if record.created[key].call == call.number} - known
    return (
        bool(inputs and outputs)
        and all(len(dims) == 1 for _, dims in (*inputs, *outputs))
        and all(len(dims) < 2 for dims in later.dims_of_leaves)
        and all(is_only_reader(each) for each, _ in inputs)
        and {id(each) for each, _ in inputs} <= {id(call.leaves[index]) for index in inherited}
        and sum(each.numel() for each, _ in outputs) <= sum(each.numel() for each, _ in inputs)
        and not escaping
        and not any(record.created_in(each) in inside for each in others)
    )


def _example(pair: _Pair) -> CheckedCall:
    one = pair.one
    sliced = tuple(place for place in _places(pair.dims_of_leaves) if place[0] not in one.masks)
    outputs = tuple(_places(pair.dims_of_outputs))
    return CheckedCall(one.name, one.is_block, one.leaves, one.form, pair.dims_of_leaves, sliced, outputs)


def _places(dims: Sequence[tuple[int, ...]]) -> Iterator[Place]:
    """Yield the tensors with one sequence dimension."""
    return ((index, each[0]) for index, each in enumerate(dims) if len(each) == 1)


def _inherited(call: RecordedCall, earlier: Sequence[_Pair]) -> set[int]:
    """Return the indices of the arguments of ``call`` that are outputs of the calls in ``earlier``."""
    outputs = {id(leaf) for each in earlier for leaf in each.one.outputs if isinstance(leaf, Tensor)}
    return {index for index, leaf in enumerate(call.leaves) if id(leaf) in outputs}


def _blocks(one: DryPass, pairs: Sequence[_Pair], joined: Sequence[bool]) -> Iterator[RegionBlock]:
    start = 0
    for n, pair in enumerate(pairs):
        start, call = start if joined[n] else n, pair.one
        whole = call.masks | _inherited(call, pairs[start:n])
        sliced = tuple(place for place in _places(pair.dims_of_leaves) if place[0] not in whole)
        is_last = n + 1 == len(pairs) or not joined[n + 1]
        gathered = tuple(place for place in _places(pair.dims_of_outputs) if one.is_read(call.outputs[place[0]]))
        yield RegionBlock(call.name, call.is_block, len(call.leaves), sliced, n == start, gathered if is_last else ())


def _called_differently(blocks: Sequence[RegionBlock]) -> str | None:
    known: dict[str, RegionBlock] = {}
    return next((block.name for block in blocks if known.setdefault(block.name, block) != block), None)


def _check_attention(one: RecordedCall, two: RecordedCall, size: int, num_ranks: int) -> None:
    if one.length == two.length or len(one.leaves) != len(two.leaves) or len(one.outputs) != len(two.outputs):
        problem = f"is not supported, because the length of the sequence in {one.name} does not follow dimension 1 of "
        raise rejected(size, f"{problem}the batch", "Pass batches of shape (samples, tokens)")
    for query, key in one.attention:
        if len(query) != 4:
            action = "Pass queries, keys and values of shape (samples, heads, tokens, width)"
            raise rejected(
                size, f"is not supported, because the queries in {one.name} have {len(query)} dimensions", action
            )
        if one.is_crossed or query[2] != one.length or key[2] != one.length:
            problem = (
                f"is not supported, because {one.name} computes cross-attention ({query[2]} queries, {key[2]} keys)"
            )
            raise rejected(size, problem, "Train this model on shorter sequences")
        if query[1] % size:
            fitting = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0 and query[1] % n == 0]
            nearest = min(fitting, key=lambda n: (abs(math.log(n / size)), n))
            problem = f"must divide the number of attention heads ({query[1]} in {one.name})"
            raise PlanError(FIELD, size, problem, f"Use context_parallel_size={nearest}")
    check_length(one.length, size, num_ranks)


def _check_sliced(call: RecordedCall, block: RegionBlock, size: int) -> None:
    """Check that the first block of a chain receives a hidden state, and does not modify it, because a slice is a
    copy."""
    if block.is_first and not block.sliced:
        problem = f"is not supported, because no argument of {call.name} is a tensor with one dimension for the tokens"
        raise rejected(size, problem, "Pass the hidden state as a tensor, or in a tuple, list or dict")
    if any(memory_of(call.leaves[index]) in call.modified for index, _ in block.sliced):
        problem = f"is not supported, because {call.name} modifies its argument in place"
        raise rejected(size, problem, "Write x = x + y instead of x += y")


def _check_escapes(one: DryPass, pairs: Sequence[_Pair], blocks: Sequence[RegionBlock], size: int) -> None:
    """Reject tensors that are created in the region and read outside of it, except gathered outputs."""
    inside = {each.one.number for each in pairs}
    gathered = {
        memory_of(each.one.outputs[n]) for each, block in zip(pairs, blocks, strict=True) for n, _ in block.gathered
    }
    names = [
        created.module
        for key, created in one.created.items()
        if created.call in inside and key not in gathered and one.readers.get(key, set()) - inside
    ]
    if names:
        problem = (
            f"is not supported, because tensors of {first_few(list(dict.fromkeys(names)))} are read outside of the "
            "blocks, where each rank would read only its slice"
        )
        action = "Remove the code that reads them, such as output_router_logits, output_hidden_states or a skip "
        action += "connection between blocks"
        raise rejected(size, problem, action)
    written = [name for number, name in one.written if number in inside]
    if written:
        problem = f"is not supported, because {first_few(list(dict.fromkeys(written)))} writes to its buffers"
        raise rejected(size, problem, "Freeze these buffers, for example with eval()")
