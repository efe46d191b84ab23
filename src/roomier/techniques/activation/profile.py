"""Record of a step in which each block saves only its input: the memory in use at each moment, and the cost of saving
more activations.

[Note: one step determines the peak of every choice]
When a block is recomputed in the backward pass, it creates exactly the activations that it could have saved. The
increase in memory from the beginning to the end of this second forward pass is the cost of saving all activations, and
the peak of this pass is the memory that recomputation needs. Afterwards, memory is the same as if all activations had
been saved. One step is therefore sufficient to determine the peak of every choice. It runs with the choice that
requires the least memory. The cost of saving products is measured while operations run.
"""

from __future__ import annotations

import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from roomier.core import torch_fake, torch_private
from roomier.core.device.capability import capabilities_of
from roomier.core.device.streams import synchronize, timed_event
from roomier.core.tree import tensors
from roomier.core.wrapped_forward import WrappedForward
from roomier.techniques.activation.block_forward import BlockForward, Keep
from roomier.techniques.activation.copies import Offload
from roomier.techniques.activation.live_bytes import LiveBytes, is_strided, live_bytes_on
from roomier.techniques.activation.selective import ATTENTION, PRODUCTS, OnDevice, Products

StorageReference = weakref.ref[torch.UntypedStorage]
KEEPS = (Keep.INPUT, Keep.PRODUCTS, Keep.ALL)


@dataclass(eq=False)
class Call:
    """One call of a block, with its forward pass and its recomputation in the backward pass.

    All bytes are relative to a block that saves only its input.

    Attributes:
        block: index of the block that was called.
        kept_bytes: additional bytes for each value of Keep; None if the call was never recomputed because no gradient
            was required.
        idle_bytes: total size in bytes of the products that the backward pass does not need.
        start_level: bytes in use at the beginning of the first forward pass.
        rise_bytes: increase in memory from the beginning of the second forward pass to its peak, in bytes.
        output_bytes: size of the output in bytes.
        outputs: storages of the output that still exist.
        shared_bytes: size in bytes of the outputs that the block also saves, for each value of Keep.
        products_bytes: total size of all products in bytes.
        num_operations: number of operations of the first forward pass.
        product_spans: start and end times of each product in the second forward pass.
        spans: start and end times of the second forward pass.
        backward_spans: start and end times of the backward pass: from the end of the second forward pass to the
            beginning of the next block's second forward pass.
        moved_bytes: bytes that the call saves and that would be offloaded to host memory.
        own_moved_bytes: part of ``moved_bytes`` that the call itself created.
        unmoved_bytes: bytes that stay on the device even if all activations are saved and then offloaded.
    """

    block: int
    kept_bytes: dict[Keep, int] | None = None
    idle_bytes: int = 0
    start_level: int = 0
    rise_bytes: int = 0
    output_bytes: int = 0
    outputs: list[StorageReference] = field(default_factory=list)
    shared_bytes: dict[Keep, int] = field(default_factory=dict)
    products_bytes: int = 0
    num_operations: int = 0
    product_spans: list[tuple[Any, Any]] = field(default_factory=list)
    spans: list[tuple[Any, Any]] = field(default_factory=list)
    backward_spans: list[tuple[Any, Any]] = field(default_factory=list)
    moved_bytes: int = 0
    own_moved_bytes: int = 0
    unmoved_bytes: int = 0


@dataclass(frozen=True)
class Moment:
    """Interval of the step.

    Attributes:
        peak_bytes: peak of all memory on the device in the interval, while each block saves only its input.
        phase: phase of ``own``: ``"forward"``, ``"again"`` (recomputation) or ``"backward"``; ``"outside"`` if ``own``
            is None.
        own: block call to which the interval belongs; None outside of blocks.
        alive: calls that are between their forward and backward passes, except ``own``.
    """

    peak_bytes: int
    phase: str
    own: Call | None
    alive: tuple[Call, ...]


class Recorder:
    """Recorder of the step that runs between :meth:`start` and :meth:`stop`.

    Args:
        blocks: the :class:`BlockForward` of each block.
        device: device on which the step runs.
        live: measurement of the memory in use; None uses the measurement for ``device``.

    Attributes:
        calls: calls of blocks, in execution order.
        moments: intervals, in execution order.
        interception: time required to intercept an operation; zero on devices that run asynchronously to the host.
        live: measurement of the memory in use.
    """

    def __init__(self, blocks: Sequence[BlockForward], device: torch.device, live: LiveBytes | None = None) -> None:
        self.calls: list[Call] = []
        self.moments: list[Moment] = []
        self.interception = InterceptionTime()
        self._blocks = blocks
        self._device = device
        self.live: LiveBytes = live_bytes_on(device) if live is None else live
        self._alive: list[Call] = []
        self._own: Call | None = None
        # the latest second forward pass, and the time at which this pass ended
        self._last_second: tuple[Call, Any] | None = None
        self._phase = "outside"
        self._is_backward = False

    def start(self) -> None:
        """Start recording."""
        for index, block in enumerate(self._blocks):
            block.forward = _Observed(block, index, self)
        self.live.start()

    def stop(self) -> None:
        """Stop recording and restore the original ``forward`` of each block."""
        self.live.stop()
        self._cut("outside", None)
        for block in self._blocks:
            if isinstance(block.forward, _Observed):
                block.forward = block.forward.forward
        synchronize(self._device)
        if self._device.type == "cpu" and not torch_fake.makes_fake_tensors():
            self.interception = measured_interception()

    def note_update(self) -> None:
        """Record the memory of the update, if the allocator reports this memory. Call this method before the next
        step."""
        self._cut("outside", None)

    def run(self, index: int, observed: _Observed, args: Any, kwargs: Any) -> Any:
        """Run the first or the second forward pass of the block ``index``."""
        if not torch.is_grad_enabled():
            return observed.forward(*args, **kwargs)
        if not torch_private.is_in_backward():
            return self._first(index, observed, args, kwargs)
        calls = [call for call in self._alive if call.block == index]
        return self._second(calls[-1], observed, args, kwargs) if calls else observed.forward(*args, **kwargs)

    def _first(self, index: int, observed: _Observed, args: Any, kwargs: Any) -> Any:
        self._is_backward, self._last_second = False, None
        call = Call(index)
        self.calls.append(call)
        self._cut("forward", call)
        call.start_level = self.live.level()
        offload = self._blocks[index].offload
        watch = _Watch(self._device, self.live, notes_made=offload is not None)
        saved = _SavedStorages(watch, offload)
        with torch_private.intercept(watch), saved.seen():
            output = observed.forward(*args, **kwargs)
        call.moved_bytes, call.own_moved_bytes = saved.num_bytes, saved.made_bytes
        call.products_bytes, call.num_operations = watch.products_bytes, watch.num_operations
        outputs = [each.untyped_storage() for each in torch_private.iter_tensors(output)]
        call.outputs = [weakref.ref(each) for each in outputs]
        call.output_bytes = sum(each.nbytes() for each in outputs)
        call.shared_bytes[Keep.PRODUCTS] = sum(each.nbytes() for each in outputs if watch.made_in_product(each))
        self._cut("outside", None)
        self._alive.append(call)
        return output

    def _second(self, call: Call, observed: _Observed, args: Any, kwargs: Any) -> Any:
        if not self._is_backward:
            self._forget_short_lived_outputs()
        self._is_backward = True
        self._cut("again", call)
        self._alive.remove(call)
        start_level = self.live.level()
        watch = _Watch(self._device, self.live)
        start = watch.now()
        if self._last_second is not None:
            last, end = self._last_second
            last.backward_spans = [(end, start)]
        try:
            with torch_private.intercept(watch):
                return observed.forward(*args, **kwargs)
        except Exception as end:
            # torch.utils.checkpoint ends the second forward pass here, after all saved tensors were recomputed. Free
            # the locals.
            traceback.clear_frames(end.__traceback__)
            raise
        finally:
            self._last_second = call, watch.now()
            call.spans, call.product_spans = [(start, self._last_second[1])], watch.product_spans
            call.idle_bytes = call.products_bytes - watch.living_products_bytes()
            kept_bytes = {Keep.PRODUCTS: call.products_bytes, Keep.ALL: self.live.level() - start_level}
            call.unmoved_bytes = max(kept_bytes[Keep.ALL] - call.own_moved_bytes, 0)
            if watch.num_operations == call.num_operations and watch.last() is not None:
                # the second forward pass reached the last operation, so its output is saved
                call.shared_bytes[Keep.ALL] = call.output_bytes
            shared = call.shared_bytes if call.outputs else {}
            call.kept_bytes = {keep: kept_bytes.get(keep, 0) - shared.get(keep, 0) for keep in KEEPS}
            peak = self._cut("backward", call)
            call.rise_bytes = max(peak - start_level, 0)

    def _forget_short_lived_outputs(self) -> None:
        """Drop outputs that no later operation saved for backward. Call this method at the beginning of backward."""
        for call in self._alive:
            if any(output() is None for output in call.outputs):
                call.outputs = []

    def _cut(self, phase: str, own: Call | None) -> int:
        """End the current interval, and start an interval of ``phase`` for ``own``."""
        peak = self.live.take_peak()
        alive = tuple(call for call in self._alive if call is not self._own)
        self.moments.append(Moment(peak, self._phase, self._own, alive))
        self._phase, self._own = phase, own
        return peak


class _Observed(WrappedForward):
    """Wrapper for a forward pass that reports each call to the recorder."""

    def __init__(self, block: BlockForward, index: int, recorder: Recorder) -> None:
        super().__init__(block)  # type: ignore[arg-type]
        self._index = index
        self._recorder = recorder

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._recorder.run(self._index, self, args, kwargs)


class _Watch:
    """Interceptor that records the times and the sizes of products in one forward pass."""

    def __init__(self, device: torch.device, live: LiveBytes, *, notes_made: bool = False) -> None:
        self._notes_made = notes_made
        self.product_spans: list[tuple[Any, Any]] = []
        self._device = device
        self._has_events = capabilities_of(device).has_streams
        self._live = live
        self._products: list[StorageReference] = []
        self._made: dict[int, StorageReference] = {}
        self.products_bytes = 0
        self.num_operations = 0
        self.last: Callable[[], torch.UntypedStorage | None] = lambda: None  # result of the last operation

    def __call__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if any(map(torch_private.handles_dispatch, types)):
            return NotImplemented
        start = self.now()
        result = func(*args, **kwargs)
        self.num_operations += 1
        if self._notes_made:
            self._note_made(args, result)
        first = result[0] if isinstance(result, (tuple, list)) and result else result
        if isinstance(first, Tensor):
            self.last = weakref.ref(first.untyped_storage())
        if func in PRODUCTS or func in ATTENTION:
            self.product_spans.append((start, self.now()))
            for tensor in torch_private.iter_tensors(result):
                storage = tensor.untyped_storage()
                self._products.append(weakref.ref(storage))
                self.products_bytes += storage.nbytes()
        return result

    def _note_made(self, args: Any, result: Any) -> None:
        given = {id(tensor.untyped_storage()) for tensor in tensors(args) if is_strided(tensor)}
        for tensor in tensors(result):
            if is_strided(tensor) and id(storage := tensor.untyped_storage()) not in given:
                self._made[id(storage)] = weakref.ref(storage)

    def made(self, storage: torch.UntypedStorage) -> bool:
        """Return True if an operation created ``storage``. Requires ``notes_made``."""
        made = self._made.get(id(storage))
        return made is not None and made() is storage

    def made_in_product(self, storage: torch.UntypedStorage) -> bool:
        """Return True if ``storage`` is the result of a product."""
        return any(each() is storage for each in self._products)

    def living_products_bytes(self) -> int:
        """Return the total size in bytes of the products that are still in use."""
        return sum(storage.nbytes() for each in self._products if (storage := each()) is not None)

    def now(self) -> Any:
        """Return the current time for :func:`total_ns`, excluding the time spent on counting memory."""
        if not self._has_events:
            return time.perf_counter_ns() - self._live.own_ns
        return timed_event(self._device)


class _SavedStorages:
    """Tensors of one forward pass that autograd saves and that ``offload`` would move.

    Attributes:
        num_bytes: total size of all storages in bytes, each counted once.
        made_bytes: total size in bytes of the storages that the forward pass created.
    """

    def __init__(self, watch: _Watch, offload: Offload | None) -> None:
        self.num_bytes = 0
        self.made_bytes = 0
        self._watch = watch
        self._offload = offload
        self._known: dict[int, StorageReference] = {}

    def seen(self) -> AbstractContextManager[None]:
        return nullcontext() if self._offload is None else torch_private.seen_as_saved(self._see)

    def _see(self, tensor: Tensor) -> None:
        assert self._offload is not None
        if not self._offload.is_worth_moving(tensor):
            return
        storage = tensor.untyped_storage()
        known = self._known.get(id(storage))
        if known is not None and known() is storage:
            return
        self._known[id(storage)] = weakref.ref(storage)
        self.num_bytes += storage.nbytes()
        if self._watch.made(storage):
            self.made_bytes += storage.nbytes()


def total_ns(spans: Sequence[tuple[Any, Any]]) -> int:
    """Return the sum of the durations of ``spans`` in nanoseconds."""
    # ``elapsed_time`` returns milliseconds.
    return sum(end - start if isinstance(start, int) else int(start.elapsed_time(end) * 1e6) for start, end in spans)


@dataclass(frozen=True)
class InterceptionTime:
    """Additional host time of an operation when products are saved or reused.

    Attributes:
        operation_ns: additional time of an operation that is not a product, in nanoseconds.
        product_ns: additional time of a product, in nanoseconds.
    """

    operation_ns: int = 0
    product_ns: int = 0

    def total_ns(self, call: Call) -> int:
        """Return the additional time of all operations of ``call`` in nanoseconds."""
        num_products = len(call.product_spans)
        return self.operation_ns * (call.num_operations - num_products) + self.product_ns * num_products


def measured_interception() -> InterceptionTime:
    """Measure the additional time of intercepted operations on the CPU, where host time adds to the step time."""
    small, weight = torch.zeros(2, 2, 8, requires_grad=True), torch.zeros(8, 8)  # zeros require no random numbers
    return InterceptionTime(_longer_ns(lambda: torch.neg(small)), _longer_ns(lambda: F.linear(small, weight)))


def _longer_ns(operate: Callable[[], Tensor], num_operations: int = 40, num_turns: int = 5) -> int:
    def run_ns() -> int:
        start_ns = time.perf_counter_ns()
        for _ in range(num_operations):
            operate()
        return time.perf_counter_ns() - start_ns

    plain_ns, seen_ns = [], []
    with torch.enable_grad():
        for _ in range(num_turns):
            plain_ns.append(run_ns())
            with Products(OnDevice).recorded():
                seen_ns.append(run_ns())
    return max(min(seen_ns) - min(plain_ns), 0) // num_operations
