"""Record of a forward pass: calls of blocks and of later layers, and the tensors that they exchange with other code.

Later layers are called after the first block, such as a final norm. They are outermost: no layer contains a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from roomier.core import torch_private
from roomier.core.torch_private import iter_tensors, memory_of
from roomier.techniques.context.attention import Attention, replaced_attention

OUTSIDE = -1
"""Number of the call in place of a block's call, for code outside of all blocks."""


@dataclass(eq=False)
class RecordedCall:
    """One call of a block or of a later layer.

    Attributes:
        number: number of the call in the forward pass.
        is_block: False for a later layer.
        name: qualified name of the module.
        leaves: leaves of the arguments.
        form: structure of the containers that hold the leaves.
        outputs: leaves of the outputs.
        attention: shapes of the queries and keys of each call of attention.
        is_crossed: True if the keys of a call of attention come from other arguments than its queries.
        masks: indices of the arguments that reach ``attn_mask``.
        modified: memory that the block modifies in place and that it did not create.
        is_random: True if the call draws random numbers.
    """

    number: int
    is_block: bool
    name: str
    leaves: list[Any]
    form: Any
    outputs: list[Any] = field(default_factory=list)
    attention: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    is_crossed: bool = False
    masks: set[int] = field(default_factory=set)
    modified: set[int] = field(default_factory=set)
    is_random: bool = False

    @property
    def length(self) -> int:
        """Number of queries in the first call of attention."""
        return self.attention[0][0][-2] if self.attention else 0


@dataclass(frozen=True)
class Created:
    """The call in which a tensor was created, and the module that ran."""

    call: int
    module: str


@dataclass
class DryPass:
    """A forward pass with its calls of blocks. Memory is identified by a key, which views share.

    Attributes:
        calls: the calls in the order of execution.
        created: the memory that each call created.
        readers: for each memory in ``created``, the numbers of other calls that read it; OUTSIDE for other code.
        returned: the memory of the results of the step.
        written: call and module of each write to memory that is neither created nor an argument of a call.
    """

    calls: list[RecordedCall] = field(default_factory=list)
    created: dict[int, Created] = field(default_factory=dict)
    readers: dict[int, set[int]] = field(default_factory=dict)
    returned: set[int] = field(default_factory=set)
    written: list[tuple[int, str]] = field(default_factory=list)
    _kept: list[Tensor] = field(default_factory=list)  # keys remain unique while the tensors exist

    def is_read(self, tensor: Tensor) -> bool:
        """Return whether code other than the call that created ``tensor`` reads it."""
        return memory_of(tensor) in self.readers or memory_of(tensor) in self.returned

    def created_in(self, tensor: Tensor) -> int:
        """Return the number of the call that created ``tensor``; OUTSIDE for other code."""
        created = self.created.get(memory_of(tensor))
        return OUTSIDE if created is None else created.call


def dry_pass(
    network: nn.Module, blocks: Sequence[nn.Module], others: Sequence[nn.Module], run: Callable[[], Any]
) -> DryPass:
    """Record the forward pass that ``run`` executes. Fake tensors are sufficient.

    Args:
        network: the model.
        blocks: the blocks of ``network``.
        others: outermost layers outside of the blocks, whose calls after the first block are recorded too.
        run: function that runs the step without backward, and returns its results.
    """
    recorder = _PassRecorder(network, blocks, others)
    with (
        recorder.installed(),
        replaced_attention(recorder.on_attention),
        torch_private.intercept(recorder.on_operation),
    ):
        result = run()
    recorder.record.returned = set(map(memory_of, iter_tensors(result)))
    return recorder.record


class _PassRecorder:
    def __init__(self, network: nn.Module, blocks: Sequence[nn.Module], others: Sequence[nn.Module]) -> None:
        self.record = DryPass()
        self._names = {module: name or type(module).__name__ for name, module in network.named_modules()}
        self._is_block = {**dict.fromkeys(others, False), **dict.fromkeys(blocks, True)}
        self._call: RecordedCall | None = None
        self._running: list[str] = []  # names of the modules that run, inside the current call
        self._origins: dict[int, frozenset[int]] = {}  # arguments of the current call from which memory was computed
        self._modified: set[int] = set()  # arguments that the current call modified in place

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Install hooks on the blocks, the other layers, and their submodules."""
        with ExitStack() as stack:
            for outer in self._is_block:
                for part in outer.modules():
                    stack.callback(part.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
                    stack.callback(part.register_forward_hook(self._leave).remove)
            yield

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        is_block = self._is_block.get(module)
        if self._call is None and (is_block or (is_block is False and self.record.calls)):
            leaves, form = torch_private.split_leaves((args, kwargs))
            self._call = RecordedCall(len(self.record.calls), is_block, self._names[module], leaves, form)
            self.record.calls.append(self._call)
            self._origins, self._modified = {}, set()
            for index, leaf in enumerate(leaves):
                if isinstance(leaf, Tensor):
                    key = memory_of(leaf)
                    self._origins[key] = self._origins.get(key, frozenset()) | {index}
        if self._call is not None:
            self._running.append(self._names[module])

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._call is None:
            return
        self._running.pop()
        if not self._running:
            self._call.outputs = torch_private.split_leaves(output)[0]
            for key in self._modified:  # the module returns an argument that it modified
                self.record.created[key] = Created(self._call.number, self._call.name)
            self._call = None

    def on_attention(
        self,
        attention: Attention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Record a call of attention."""
        if self._call is not None:
            self._call.attention.append((tuple(query.shape), tuple(key.shape)))
            sources = self._origins_of(key)
            self._call.is_crossed |= bool(sources) and sources.isdisjoint(self._origins_of(query))
            if isinstance(attn_mask, Tensor):
                self._call.masks |= self._origins_of(attn_mask)
        return attention(query, key, value, attn_mask, *args, **kwargs)

    def _origins_of(self, tensor: Tensor) -> frozenset[int]:
        return self._origins.get(memory_of(tensor), frozenset())

    def on_operation(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Record the memory that an operation reads, writes and creates."""
        record, call = self.record, self._call
        is_view = torch_private.is_view_operation(func)
        read = [*map(memory_of, iter_tensors((args, kwargs)))]
        number = OUTSIDE if call is None else call.number
        if not is_view and func.namespace != "prim":
            for key in read:
                if key in record.created and record.created[key].call != number:
                    record.readers.setdefault(key, set()).add(number)
        output = func(*args, **kwargs)
        if call is None:
            return output
        call.is_random |= torch_private.draws(func)
        if torch_private.writes_to_arguments(func) and read:
            created = record.created.get(read[0])
            if created is None or created.call != number:
                call.modified.add(read[0])
            if created is None and read[0] in self._origins:
                self._modified.add(read[0])
            elif created is None:
                record.written.append((number, self._running[-1]))
        origins = frozenset[int]().union(*(self._origins.get(key, frozenset()) for key in read))
        for each in iter_tensors(output):
            key = memory_of(each)
            self._origins[key] = self._origins.get(key, frozenset()) | origins
            if key not in read and key not in record.created:
                record.created[key] = Created(number, self._running[-1])
                record._kept.append(each)
        return output
