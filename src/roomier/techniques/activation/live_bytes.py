"""Total size in bytes of the tensors on a device, at each moment of a step.

If the allocator of the device reports memory statistics, the numbers come from the allocator. Otherwise, the storages
that operations use are counted, each from the operation that returns it until Python frees it. A storage that first
appears as an argument already existed, so it is counted from the start of the measurement. ``fully_shard`` frees and
allocates storages by resizing them, so storage sizes are checked before each operation.
"""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from roomier.core import torch_fake, torch_private
from roomier.core.device import memory
from roomier.core.device.capability import capabilities_of
from roomier.core.tree import tensors


class LiveBytes:
    """Base class for measuring the memory in use between :meth:`start` and :meth:`stop`. The results exclude
    :attr:`base_bytes`.

    Attributes:
        base_bytes: bytes that were allocated before the start, to be added to each level and peak. Final after
            :meth:`stop`.
        own_ns: time spent on counting so far, in nanoseconds.
    """

    base_bytes = 0
    own_ns = 0

    def start(self) -> None:
        """Start the measurement."""

    def stop(self) -> None:
        """End the measurement."""

    def note(self, tensor: Tensor) -> None:
        """Count ``tensor``, even if no operation uses it."""

    def level(self) -> int:
        """Return the number of bytes that are in use now."""
        raise NotImplementedError

    def take_peak(self) -> int:
        """Return the peak number of bytes in use since the previous call."""
        raise NotImplementedError


def live_bytes_on(device: torch.device) -> LiveBytes:
    """Return the implementation of :class:`LiveBytes` for ``device``."""
    return AllocatorBytes(device) if capabilities_of(device).has_memory_statistics else CountedBytes(device)


class AllocatorBytes(LiveBytes):
    """Measurement by the allocator of the device. The measurement resets the peak statistics of the allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> None:
        memory.reset_peaks(self._device)

    def level(self) -> int:
        return memory.allocated_bytes(self._device)

    def take_peak(self) -> int:
        peak = memory.peak_allocated_bytes(self._device)
        memory.reset_peaks(self._device)
        return peak


class CountedBytes(LiveBytes):
    """Measurement that counts the storages that operations in this thread use."""

    def __init__(self, device: torch.device) -> None:
        self._device_type = device.type
        self._interception = torch_private.intercept(self._on_operation)
        self._storages: dict[int, _Counted] = {}
        self._resized: dict[int, _Counted] = {}
        self._level = 0
        self._peak = 0

    def start(self) -> None:
        self._interception.__enter__()

    def stop(self) -> None:
        self._interception.__exit__(None, None, None)
        self._storages.clear()
        self._resized.clear()

    def note(self, tensor: Tensor) -> None:
        if torch_private.handles_dispatch(type(tensor)):
            from torch.distributed.tensor import DTensor

            if not isinstance(tensor, DTensor):
                return
            with torch.no_grad():
                tensor = tensor.to_local()
        self._see(tensor, was_there=True)

    def level(self) -> int:
        self._note_sizes()
        return self._level

    def take_peak(self) -> int:
        self._note_sizes()
        peak, self._peak = self._peak, self._level
        return peak

    def _on_operation(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if any(map(torch_private.handles_dispatch, types)):
            return NotImplemented  # the subclass runs operations on its inner tensors, which are counted
        start_ns = time.perf_counter_ns()
        self._note_sizes()
        for tensor in tensors((args, kwargs)):
            self._see(tensor, was_there=True, is_resized=func.namespace == "fsdp")
        run_ns = time.perf_counter_ns()
        result = func(*args, **kwargs)
        end_ns = time.perf_counter_ns()
        for tensor in tensors(result):
            self._see(tensor)
        self.own_ns += run_ns - start_ns + time.perf_counter_ns() - end_ns
        return result

    def _see(self, tensor: Tensor, *, was_there: bool = False, is_resized: bool = False) -> None:
        if torch_fake.device_type_of(tensor) != self._device_type or not is_strided(tensor):
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        known = self._storages.get(key)
        if known is None:
            known = self._storages[key] = _Counted(weakref.ref(storage, lambda _: self._end(key)), storage.nbytes())
            if was_there:
                self.base_bytes += known.num_bytes
            else:
                self._add(known.num_bytes)
        elif known.num_bytes != storage.nbytes():
            self._note_size(known)
        if is_resized:
            self._resized[key] = known

    def _end(self, key: int) -> None:
        self._resized.pop(key, None)
        gone = self._storages.pop(key, None)
        if gone is not None:
            self._add(-gone.num_bytes)

    def _note_sizes(self) -> None:
        for known in list(self._resized.values()):
            self._note_size(known)

    def _note_size(self, known: _Counted) -> None:
        storage = known.reference()
        if storage is not None and (num_bytes := storage.nbytes()) != known.num_bytes:
            self._add(num_bytes - known.num_bytes)
            known.num_bytes = num_bytes

    def _add(self, num_bytes: int) -> None:
        self._level += num_bytes
        self._peak = max(self._peak, self._level)


@dataclass(slots=True, eq=False)
class _Counted:
    reference: weakref.ref[torch.UntypedStorage]
    num_bytes: int


def is_strided(tensor: Tensor) -> bool:
    """Return True if ``tensor`` is a strided view of one storage."""
    return tensor.layout is torch.strided and not torch_private.handles_dispatch(type(tensor))
