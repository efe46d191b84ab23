"""Move the tensors that blocks save for the backward pass to host memory or disk.

[Note: two blocks at a time]
Each call of a block is a visit. The tensors that are saved during a visit are copied to the host while computation
continues. When the second visit after this visit begins, the computation waits for the copies, and the device memory of
the tensors is freed. In the backward pass, the computation waits for the tensors of a visit, and the tensors of the
preceding visit are then copied to the device while computation continues. The tensors of at most two visits are
therefore on the device at a time.

The tensors of the last two visits are still on the device when the backward pass begins. The computation waits for the
copies of these tensors, too, because the backward pass frees their memory. All device memory belongs to the compute
stream, which waits for the copies before memory is freed. ``record_stream`` is not used, because the memory would
remain allocated while the host runs ahead of the device.

A storage is moved completely and only once, even if several blocks save views of it (for example of a mask). Parameters
and tensors that autocast created from them stay on the device, because they remain allocated anyway, so offloading them
would not free memory. Small tensors stay on the device as well.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from roomier.core import torch_private
from roomier.core.device.capability import capabilities_of
from roomier.core.device.streams import computing_stream, synchronize

MIN_BYTES = 2**20  # a smaller tensor does not justify a separate copy
_MEASURED_BYTES, _NUM_MEASURED = 2**26, 5


@dataclass(frozen=True)
class CopyTimes:
    """Time per byte of copies between device and host, measured without other traffic.

    Attributes:
        out_ns: time of a copy from device to host, in nanoseconds per byte.
        back_ns: time of a copy from host to device, in nanoseconds per byte.
    """

    out_ns: float
    back_ns: float


class Copies:
    """Synchronous copies to the host and back, for devices without streams or without pinned memory.

    Args:
        device: device that holds the original tensors.

    Attributes:
        device: device that holds the original tensors.
        saves: True if the copies are not in the memory of the device.
        place: place of the copies as a phrase for messages, such as ``"in host memory"``.
    """

    place = "in host memory"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.saves = device.type != "cpu"

    def times(self) -> CopyTimes:
        """Measure the time per byte with copies of 64 MiB. The fastest of several copies counts, because the first copy
        also pins memory."""
        source = torch.zeros(_MEASURED_BYTES, dtype=torch.uint8, device=self.device)
        out_ns, back_ns = [], []
        for _ in range(_NUM_MEASURED):
            start_ns = self._finished_ns()
            host = self.to_host(source)
            middle_ns = self._finished_ns()
            self.to_device(host)
            out_ns.append(middle_ns - start_ns)
            back_ns.append(self._finished_ns() - middle_ns)
        return CopyTimes(min(out_ns) / _MEASURED_BYTES, min(back_ns) / _MEASURED_BYTES)

    def _finished_ns(self) -> int:
        """Return the time in nanoseconds at which all submitted work of the device has completed."""
        synchronize(self.device)
        return time.perf_counter_ns()

    def to_host(self, tensor: Tensor) -> Any:
        """Return a copy of ``tensor`` in host memory."""
        return tensor.to("cpu", copy=True)

    def to_device(self, copy: Any) -> Tensor:
        """Return a copy on the device of the tensor that was passed to :meth:`to_host`."""
        return copy.to(self.device, copy=True)  # type: ignore[no-any-return]

    def start(self) -> Any:
        """Return a marker for the current position in the order of the computation."""
        return None

    def finish(self, host: Tensor, made: Tensor, start: Any) -> Any:
        """Copy ``host`` to ``made``, which was allocated at ``start``. This method can run in any thread.

        Returns:
            A marker like the result of :meth:`mark`.
        """
        made.copy_(host)

    def mark(self) -> Any:
        """Return a marker for the current position in the order of the copies."""
        return None

    def wait(self, mark: Any) -> None:
        """Make subsequent computation wait for the copies before ``mark``."""

    def wait_to_free(self, mark: Any) -> None:
        """Make subsequent computation wait for the copies before ``mark``, so that it can reuse the memory of the
        copied tensors."""
        self.wait(mark)

    def close(self) -> None:
        """Free the memory or disk space of all copies."""


class StreamCopies(Copies):
    """Copies through pinned memory that overlap with computation."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = torch.Stream(device)

    def to_host(self, tensor: Tensor) -> Any:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._copy(tensor, host, self.start())
        return host

    def to_device(self, copy: Any) -> Tensor:
        made = torch.empty(copy.shape, dtype=copy.dtype, device=self.device)
        self._copy(copy, made, self.start())
        return made

    def start(self) -> Any:
        return computing_stream(self.device).record_event()

    def finish(self, host: Tensor, made: Tensor, start: Any) -> Any:
        self._copy(host, made, start)
        return self.mark()

    def _copy(self, source: Tensor, target: Tensor, start: Any) -> None:
        # Wait for the preceding computation, which may write the source or still use the memory of the target.
        self._stream.wait_event(start)
        with self._stream:
            target.copy_(source, non_blocking=True)

    def mark(self) -> Any:
        return self._stream.record_event()

    def wait(self, mark: Any) -> None:
        computing_stream(self.device).wait_event(mark)


def copies_on(device: torch.device) -> Copies:
    """Return copies that overlap with computation if ``device`` supports such copies; otherwise blocking copies."""
    return StreamCopies(device) if capabilities_of(device).copies_asynchronously else Copies(device)


class Parcel:
    """One saved storage, as bytes.

    Args:
        tensor: tensor whose storage is saved.
        copies: copies to the host and back.
    """

    def __init__(self, tensor: Tensor, copies: Copies) -> None:
        self._copies = copies
        self._storage = weakref.ref(tensor.untyped_storage())
        self._version = torch_private.version_of(tensor)
        self._was_written = False
        self._seen: Tensor | None = None  # used to detect in-place writes until the copy is complete
        self._here: Tensor | None = None
        self._host = copies.to_host(self.stay(tensor))

    def stay(self, tensor: Tensor) -> Tensor:
        """Keep the storage of ``tensor`` on the device, and return it as a tensor of bytes."""
        if self._here is None:
            self._seen = torch_private.detached(tensor)
            empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            self._here = empty.set_(tensor.untyped_storage())
        return self._here

    def is_of(self, tensor: Tensor) -> bool:
        """Return True if this parcel contains the current content of the storage of ``tensor``."""
        return self._storage() is tensor.untyped_storage() and self._version == torch_private.version_of(tensor)

    def leave(self) -> None:
        """Free the memory on the device. The caller must first make the computation wait for the copies."""
        self._was_written = self._is_written()
        self._seen = self._here = None

    def come_back(self) -> None:
        """Start copying the bytes to the device if they are not on the device."""
        if self._here is None:
            self._here = self._copies.to_device(self._host)

    def look(self) -> Tensor | None:
        """Return the bytes on the device; None if the storage was modified before it was moved from the device."""
        return None if self._is_written() else self._here

    def _is_written(self) -> bool:
        now = self._version if self._seen is None else torch_private.version_of(self._seen)
        return self._was_written or now != self._version


class Visit:
    """One call of a block.

    Args:
        before: previous call of a block; None for the first call.

    Attributes:
        before: function that returns the previous call; None if that call no longer exists.
        parcels: weak references to the saved storages, which exist until no graph needs them.
    """

    def __init__(self, before: Visit | None) -> None:
        self.before: Callable[[], Visit | None] = (lambda: None) if before is None else weakref.ref(before)
        self.parcels: list[weakref.ref[Parcel]] = []
        self._mark: Any = None  # marker of the last copy, until the computation waits for this copy
        self._held: list[Parcel] = []  # saved storages, referenced until their copies are complete
        self._came_back = False

    def add(self, parcel: Parcel) -> None:
        """Add a saved storage."""
        self.parcels.append(weakref.ref(parcel))
        self._held.append(parcel)

    def living(self) -> list[Parcel]:
        """Return the saved storages that a graph still needs."""
        return [parcel for each in self.parcels if (parcel := each()) is not None]

    def end(self, copies: Copies) -> None:
        """End the forward pass of the block. The copies to the host have already started."""
        self._mark = copies.mark()

    def come_back(self, copies: Copies) -> None:
        """Start copying the saved storages to the device."""
        self._came_back = True
        self._held = self.living()
        for parcel in self._held:
            parcel.come_back()
        self._mark = copies.mark()

    def arrive(self, copies: Copies) -> None:
        """Make computation wait for the copies in both directions. From then on, only the graph holds the storages."""
        if self._mark is not None and self._came_back:
            copies.wait(self._mark)
        elif self._mark is not None:
            copies.wait_to_free(self._mark)
        self._mark, self._held = None, []

    def leave(self, copies: Copies, staying: Sequence[Visit]) -> None:
        """Free the device memory of the saved storages, except for storages that the visits in ``staying`` need."""
        if self._mark is not None:
            copies.wait(self._mark)
        self._mark, self._held = None, []
        needed = {id(parcel) for visit in staying for parcel in visit.living()}
        for parcel in self.living():
            if id(parcel) not in needed:
                parcel.leave()


@dataclass(frozen=True)
class Slip:
    """Object that replaces a saved tensor in a graph. It refers to the saved storage and describes the tensor's view of
    the storage.

    Attributes:
        offload: the :class:`Offload` that moved the storage.
        visit: call of a block that saved the tensor.
        parcel: the saved storage.
        dtype: dtype of the tensor.
        size: shape of the tensor.
        stride: strides of the tensor in elements.
        offset: offset of the tensor in its storage, in elements.
    """

    offload: Offload
    visit: Visit
    parcel: Parcel
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def get(self) -> Tensor | None:
        """Return the tensor on the device; None if it was modified in place after it was saved."""
        self.offload.arrive(self.visit)
        held = self.parcel.look()
        if held is None:
            return None
        made = torch.empty(0, dtype=self.dtype, device=held.device)
        return made.set_(held.untyped_storage(), self.offset, self.size, self.stride)


class Offload:
    """Object that offloads the tensors that the blocks of one network save, and copies them back for the backward pass.

    Args:
        device: device on which the blocks run.
        min_bytes: smallest size of a storage that is moved.
        copies: copies to the host and back; by default the result of :func:`copies_on`.

    Attributes:
        device: the argument ``device``.
        copies: the copies. After ``copies.close()``, graphs that need the saved storages can no longer be used.
    """

    def __init__(self, device: torch.device, min_bytes: int = MIN_BYTES, copies: Copies | None = None) -> None:
        self.device = device
        self._min_bytes = min_bytes
        self.copies = copies or copies_on(device)
        self._present: list[Visit] = []  # visits whose storages can be on the device
        self._current: Visit | None = None
        self._known: WeakValueDictionary[int, Parcel] = WeakValueDictionary()

    def __reduce__(self) -> Any:
        # A copied network offloads its activations separately, to host memory.
        return Offload, (self.device, self._min_bytes)

    @contextmanager
    def visit(self) -> Iterator[Callable[[Tensor], Slip | None]]:
        """Return a context manager for the forward pass of a block. In this context, tensors that autograd saves are
        moved.

        Entering the context returns a function that moves a tensor that autograd does not save itself. The function
        returns None for a tensor that stays on the device.
        """
        before = self._present[-1] if self._present else None
        self._stay([] if before is None else [before])
        visit = Visit(before)
        self._present.append(visit)
        self._current = None

        def move(tensor: Tensor) -> Slip | None:
            return self._moved(tensor, visit)

        try:
            with saved_tensors_hooks(lambda tensor: move(tensor) or tensor, _unpacked):
                yield move
        finally:
            visit.end(self.copies)

    def arrive(self, visit: Visit) -> None:
        """Make the tensors of ``visit`` available on the device when its backward pass begins or continues."""
        if self._current is visit:
            return
        self._current = visit
        before = visit.before()
        staying = [visit] if before is None else [before, visit]
        self._stay(staying)
        for each in (visit, before):
            if each is not None and each not in self._present:
                each.come_back(self.copies)
        self._present = staying
        visit.arrive(self.copies)

    def _stay(self, staying: list[Visit]) -> None:
        for each in self._present:
            if each not in staying:
                each.leave(self.copies, staying)
        self._present = [each for each in staying if each in self._present]

    def _moved(self, tensor: Tensor, visit: Visit) -> Slip | None:
        if not self.is_worth_moving(tensor):
            return None
        storage = tensor.untyped_storage()
        parcel = self._known.get(id(storage))
        if parcel is None or not parcel.is_of(tensor):
            parcel = self._known[id(storage)] = Parcel(tensor, self.copies)
        else:
            parcel.stay(tensor)
        visit.add(parcel)
        offset, stride = int(tensor.storage_offset()), tensor.stride()
        return Slip(self, visit, parcel, tensor.dtype, tensor.size(), stride, offset)

    def is_worth_moving(self, tensor: Tensor) -> bool:
        """Return True if ``tensor`` is moved when a block saves it."""
        return (
            type(tensor) is Tensor
            and tensor.device.type == self.device.type
            and tensor.layout is torch.strided
            and tensor.untyped_storage().nbytes() >= self._min_bytes
            and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
            and not is_weight(tensor)
        )


def is_weight(tensor: Tensor) -> bool:
    """Return True if ``tensor`` is a parameter, a tensor that autocast created from a parameter, or a view of such a
    tensor."""
    whole = torch_private.viewed(tensor)
    return isinstance(whole, nn.Parameter) or torch_private.cast_parameter(whole) is not None


def _unpacked(packed: Tensor | Slip) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    tensor = packed.get()
    if tensor is None:  # same message as in torch
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of shape {tuple(packed.size)} that a block saved"
        )
    return tensor
