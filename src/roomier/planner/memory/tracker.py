"""Measurement of the memory of a rank during a step, in bytes by kind.

[Note: how bytes are counted]
An active :class:`MemoryTracker` receives each operation that torch dispatches on this rank, including those of the
backward pass and of optimizers. It counts each storage once, regardless of the number of tensors that share it, until
Python destroys the storage. The storage of a result is counted from the operation that returns it, and the storage of
an argument that was not recorded before is counted from the start, because it already existed. Sizes are read before
each operation, because ``fully_shard`` frees and allocates storages by resizing. On a CPU, the memory of a tier is
counted from the start, so storages inside it are not counted separately.

The tracker records a timeline of sizes. The kind of a storage is often known only later, for example when a result
becomes a gradient, so kinds are assigned to storages, and sums by kind are computed at the end.

The tracker does not count memory that a kernel allocates and frees within one operation, buffers of a communication
library, or rounding by the allocator. If the allocator of the device reports its statistics, the tracker also records
its peak.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from roomier.api.engine import Engine
from roomier.core import torch_fake, torch_private
from roomier.core.device import memory
from roomier.core.device.capability import capabilities_of
from roomier.core.tree import tensors
from roomier.planner.memory.kinds import Kind, total_bytes
from roomier.techniques.tiers.buffers import memory_of_a_tier

_COMMUNICATION = ("c10d", "_c10d_functional")  # namespaces of communication operations
_PACKS_GRADIENTS = ("fsdp::chunk_cat", "aten::_chunk_cat")
# Kinds of a storage in increasing priority. A later kind replaces an earlier one.
_BY_STRENGTH = (
    *(Kind.TEMPORARY, Kind.ACTIVATION, Kind.COMMUNICATION, Kind.GRADIENT),
    *(Kind.OPTIMIZER_STATE, Kind.GATHERED, Kind.PARAMETER),
)
_STRENGTH = {kind: index for index, kind in enumerate(_BY_STRENGTH)}


@dataclass(frozen=True)
class Snapshot:
    """Memory at one moment of a step.

    Attributes:
        phase: phase of the step: ``"forward"``, ``"backward"``, ``"update"``, or another name given to ``enter``.
        num_bytes: bytes by kind.
        place: module that is running; empty if no module was set.
    """

    phase: str
    num_bytes: dict[Kind, int]
    place: str = ""

    def total(self, kinds: Iterable[Kind] = tuple(Kind)) -> int:
        """Return the total number of bytes of ``kinds``."""
        return total_bytes(self.num_bytes, kinds)


@dataclass(eq=False, slots=True)
class _Storage:
    reference: Callable[[], torch.UntypedStorage | None]
    num_bytes: int
    phase: str  # phase in which the storage was first seen
    kind: Kind = Kind.TEMPORARY
    is_counted: bool = True


@dataclass(frozen=True, slots=True)
class _Change:
    storage: _Storage
    num_bytes: int  # change of the size
    phase: str
    place: str


class MemoryTracker:
    """Context manager that measures the sizes of all tensors by kind while it is active. See
    [Note: how bytes are counted].

    Enter this context between two steps, run one step, call :meth:`restart`, and run the step to measure.

    Args:
        module: module whose parameters, gradients and buffers are distinguished from other tensors.
        optimizers: optimizers of the module's parameters.
        device: device whose storages are counted.
        kept: function that returns tensors outside the module that exist as long as the module, such as averages of its
            weights.

    Attributes:
        phase: current phase, set by :meth:`enter`.
        place: current module; set by the caller.
        allocator_peak_bytes: maximum number of bytes that the allocator allocated since :meth:`restart`; None if the
            allocator does not report it.
        reserved_peak_bytes: maximum number of bytes that the allocator reserved since :meth:`restart`; None if the
            allocator does not report it.

    Example:
        >>> with MemoryTracker(module, [optimizer], torch.device("cpu")) as tracker:
        ...     step()
        ...     tracker.restart()
        ...     step()
        >>> tracker.peak().total()
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        device: torch.device,
        kept: Callable[[], Iterable[Tensor]] = tuple,
    ) -> None:
        self.phase = "rest"
        self.place = ""
        self._interception = torch_private.intercept(self._on_operation)
        self._module = module
        self._not_gathered = [
            (each, name) for each in module.modules() for name, _ in each.named_parameters(recurse=False)
        ]
        self._optimizers = optimizers
        self._kept = kept
        self._device = device
        self._has_statistics = capabilities_of(device).has_memory_statistics
        self._is_sharded = any(isinstance(each, DTensor) for each in self._owned())
        self._owned_once: list[nn.Parameter] = []
        self._frees_gradients = False  # hooks free gradients during the backward pass
        self._storages: dict[int, _Storage] = {}
        self._resizing: dict[int, _Storage] = {}
        self._gathered: dict[int, nn.Parameter] = {}
        self._at_start: list[_Change] = []
        self._changes: list[_Change] = []
        self.allocator_peak_bytes: int | None = None
        self.reserved_peak_bytes: int | None = None

    def __enter__(self) -> MemoryTracker:
        self.resume()
        return self

    def __exit__(self, *error: Any) -> None:
        self.pause()
        self.close()

    def resume(self) -> None:
        """Start recording, or continue after :meth:`pause`."""
        self._note_roles()
        self._owned_once = list(dict.fromkeys(self._owned()))
        self._frees_gradients = any(torch_private.has_gradient_hooks(each) for each in self._owned_once)
        if self._has_statistics:
            memory.reset_peaks(self._device)
        self._interception.__enter__()

    def pause(self) -> None:
        """Pause recording until :meth:`resume`. Meanwhile, only deallocations of known storages are recorded."""
        self._interception.__exit__(None, None, None)
        self._note_sizes()
        self._note_roles()
        if self._has_statistics:
            device = self._device
            self.allocator_peak_bytes = max(memory.peak_allocated_bytes(device), self.allocator_peak_bytes or 0)
            self.reserved_peak_bytes = max(memory.peak_reserved_bytes(device), self.reserved_peak_bytes or 0)

    def close(self) -> None:
        """Stop recording permanently."""
        self._storages.clear()  # later deallocations are not recorded

    def restart(self) -> None:
        """Discard the timeline and start with the storages that exist now.

        Run one step before this call, so that the kind of each storage is known, including storages that are currently
        empty.
        """
        self._note_sizes()
        alive = list(self._storages.values())
        self._at_start = [_Change(each, each.num_bytes, "rest", "") for each in alive]
        self._changes = []
        for each in alive:
            each.phase = "rest"
        if self._has_statistics:
            memory.reset_peaks(self._device)
            self.allocator_peak_bytes = self.reserved_peak_bytes = None

    def enter(self, phase: str) -> None:
        """Start a phase. Storages that were created in ``"forward"`` and still exist after this phase count as
        activations."""
        self._note_sizes()
        self._note_roles()
        if self.phase == "forward" and phase != "forward":
            for storage in list(self._storages.values()):
                if storage.phase == "forward":
                    _strengthen(storage, Kind.ACTIVATION)
        self.phase = phase

    def peak(self, kinds: Iterable[Kind] = tuple(Kind)) -> Snapshot:
        """Return the snapshot with the largest total of ``kinds``."""
        kinds = tuple(kinds)
        moments = (Snapshot(each.phase, dict(each.num_bytes), each.place) for each in self.moments())
        return max(moments, key=lambda each: each.total(kinds))

    def now(self) -> Snapshot:
        """Return the last snapshot."""
        *_, last = self.moments()
        return last

    def moments(self) -> Iterator[Snapshot]:
        """Yield a snapshot of the start of the timeline, and one after each change. The snapshots share the dict
        ``num_bytes``, so a caller must copy this dict to preserve its values."""
        num_bytes = dict.fromkeys(Kind, 0)
        for change in self._at_start:
            num_bytes[change.storage.kind] += change.num_bytes
        yield Snapshot("rest", num_bytes)
        for change in self._changes:
            num_bytes[change.storage.kind] += change.num_bytes
            yield Snapshot(change.phase, num_bytes, change.place)

    def bytes_at_start(self) -> int:
        """Return the total size in bytes of the storages that existed at the start of the timeline."""
        return sum(change.num_bytes for change in self._at_start)

    def changes_since(self, index: int) -> list[int]:
        """Return all changes of the number of bytes in use, except the first ``index`` changes."""
        self._note_sizes()
        return [change.num_bytes for change in self._changes[index:]]

    def saved_bytes(self) -> dict[str, tuple[int, ...]]:
        """Return, for each module, the sizes of the tensors that it allocated in its forward pass and that were saved
        for backward."""
        found: dict[str, list[int]] = {}
        for each in self._changes:
            if each.phase == "forward" and each.num_bytes > 0 and each.storage.kind is Kind.ACTIVATION:
                found.setdefault(str(each.place), []).append(each.num_bytes)
        return {place: tuple(sizes) for place, sizes in found.items()}

    def _on_operation(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if types and any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # operations on the local tensors of a DTensor are dispatched separately
        self._note_sizes()
        if self._is_sharded:
            self._note_gathered()
        if self._frees_gradients:  # before the backward pass ends
            for parameter in self._owned_once:
                if parameter.grad is not None:
                    self._record(parameter.grad, Kind.GRADIENT)
        self._note_arguments(func, [*tensors(args), *tensors(kwargs)])
        result = func(*args, **kwargs)
        for tensor in tensors(result):
            self._record(tensor)
        return result

    def _note_arguments(self, func: Any, given: list[Tensor]) -> None:
        kind, packs = _meaning_of(func)
        for tensor in given:
            self._record(tensor, kind, existed=True)  # an argument that was not recorded before belongs to a batch
        if packs:
            for tensor in given[:-1]:  # the last tensor is the output buffer
                self._record(tensor, Kind.GRADIENT)

    def _record(self, tensor: Tensor, kind: Kind = Kind.TEMPORARY, *, existed: bool = False) -> None:
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        if torch_fake.device_type_of(tensor) != self._device.type or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        known = self._storages.get(id(storage))
        if known is None:
            known = self._begin(storage, existed)
        _strengthen(known, kind)
        if known.kind in (Kind.GATHERED, Kind.COMMUNICATION):
            self._resizing[id(storage)] = known
        elif known.num_bytes != storage.nbytes():
            self._note_size(known)

    def _begin(self, storage: torch.UntypedStorage, existed: bool) -> _Storage:
        may_be_in_tier = self._device.type == "cpu" and not torch_fake.makes_fake_tensors()
        buffer = memory_of_a_tier(_address_of(storage)) if may_be_in_tier else None
        if buffer is not None:
            self._begin_buffer(*buffer)
        key, num_bytes = id(storage), storage.nbytes() if buffer is None else 0
        reference = weakref.ref(storage, lambda _: self._end(key))
        known = _Storage(reference, num_bytes, "rest" if existed else self.phase, is_counted=buffer is None)
        if existed:
            known.kind = Kind.ACTIVATION
        self._storages[key] = known
        (self._at_start if existed else self._changes).append(_Change(known, num_bytes, self.phase, self.place))
        return known

    def _begin_buffer(self, address: int, num_bytes: int) -> None:
        key = -address  # negative, so that the key differs from every id()
        if key not in self._storages:
            buffer = _Storage(lambda: None, num_bytes, "rest", Kind.OPTIMIZER_STATE)
            self._storages[key] = buffer
            self._at_start.append(_Change(buffer, num_bytes, "rest", ""))

    def _end(self, key: int) -> None:
        self._resizing.pop(key, None)
        ended = self._storages.pop(key, None)
        if ended is not None:
            self._changes.append(_Change(ended, -ended.num_bytes, self.phase, self.place))

    def _note_sizes(self) -> None:
        for known in list(self._resizing.values()):
            self._note_size(known)

    def _note_size(self, known: _Storage) -> None:
        storage = known.reference() if known.is_counted else None
        if storage is not None and (num_bytes := storage.nbytes()) != known.num_bytes:
            self._changes.append(_Change(known, num_bytes - known.num_bytes, self.phase, self.place))
            known.num_bytes = num_bytes

    @torch.no_grad()
    def _note_gathered(self) -> None:
        # fully_shard creates the unsharded parameter once and refills its storage.
        found = [(each, name) for each, name in self._not_gathered if not isinstance(getattr(each, name), DTensor)]
        for each, name in found:
            parameter = getattr(each, name)
            if id(parameter) not in self._gathered:
                self._gathered[id(parameter)] = parameter  # this reference prevents the id from being reused
                self._record(parameter, Kind.GATHERED)
        if found:
            self._not_gathered = [each for each in self._not_gathered if each not in found]
        if not torch_private.is_in_backward():
            return  # gradients are created in the backward pass
        for parameter in self._gathered.values():
            if parameter.grad is not None:
                self._record(parameter.grad, Kind.GRADIENT)

    @torch.no_grad()
    def _note_roles(self) -> None:
        if self._is_sharded:
            self._note_gathered()
        for parameter in self._owned():
            if self._is_sharded and not isinstance(parameter, DTensor):
                continue
            self._record(parameter, Kind.PARAMETER, existed=True)
            if parameter.grad is not None:
                self._record(parameter.grad, Kind.GRADIENT, existed=True)
        for tensor in (*self._module.buffers(), *self._kept()):
            self._record(tensor, Kind.PARAMETER, existed=True)
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                for tensor in tensors(state):
                    self._record(tensor, Kind.OPTIMIZER_STATE, existed=True)

    def _owned(self) -> Iterator[nn.Parameter]:
        yield from self._module.parameters()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]


@contextmanager
def tracking(engine: Engine, kept: Sequence[Tensor] = ()) -> Iterator[MemoryTracker]:
    """Return a context that tracks the memory of ``engine``.

    ``forward_backward`` enters the phases ``"forward"`` and ``"backward"``. Before ``engine.step()``, the caller may
    enter the phase ``"update"``, but must then enter ``"forward"`` before the next step.

    Args:
        kept: tensors outside the module that exist as long as the module.
    """
    tracker = MemoryTracker(engine.module, engine.optimizers, engine.device, lambda: kept)
    hooks = engine.hooks
    before, after = hooks.before_backward, hooks.after_backward
    hooks.before_backward = (*before, lambda loss: tracker.enter("backward"))
    hooks.after_backward = (*after, lambda: tracker.enter("forward"))
    try:
        with tracker:
            tracker.enter("forward")
            yield tracker
    finally:
        hooks.before_backward, hooks.after_backward = before, after


def _address_of(storage: torch.UntypedStorage) -> int:
    """Return the address of ``storage``; 0 if it has no memory yet, because its tensor waits for a collective."""
    try:
        return storage.data_ptr()
    except RuntimeError:
        return 0


@cache
def _meaning_of(func: Any) -> tuple[Kind, bool]:
    """Return the kind of memory of an operation's arguments, and whether the operation packs gradients."""
    kind = Kind.COMMUNICATION if func.namespace in _COMMUNICATION else Kind.TEMPORARY
    return kind, func.name().startswith(_PACKS_GRADIENTS)


def _strengthen(storage: _Storage, kind: Kind) -> None:
    if _STRENGTH[kind] > _STRENGTH[storage.kind]:
        storage.kind = kind
