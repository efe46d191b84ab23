"""What blocks keep for their backward waits in host memory.

[Note: two blocks at a time]
Each call of a block is a visit. Tensors saved in it are copied out beside the computation, and let go when the block
after the next begins: until then nothing waits for the copies. In backward a visit's tensors are awaited, and those of
the visit before it are asked for, which come while it computes. So the device holds those of two visits at most. All
memory on the device is of the computing stream, which waits for the copies before any of it is freed: no
``record_stream``, which would hold memory for as long as the host runs ahead.

A storage is moved whole and once, however many views of it are saved, in however many blocks (a mask, say). What stays:
parameters and what autocast made of them, which live on anyway, and what is small.
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

MIN_BYTES = 2**20  # less is not worth a copy of its own
_MEASURED_BYTES, _NUM_MEASURED = 2**26, 5


@dataclass(frozen=True)
class CopyTimes:
    """How long a byte takes between the device and the host, with nothing else on its way.

    Attributes:
        out_ns, back_ns: of a byte; below 1.
    """

    out_ns: float
    back_ns: float


class Copies:
    """Copies to the host and back, one after the other: what a device without streams does.

    Attributes:
        saves: whether a copy is in another memory than the device's.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.saves = device.type != "cpu"

    def times(self) -> CopyTimes:
        """Measured now, with 64 MiB: the best of some, of which the first also pins memory."""
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
        """The time when all that was asked of the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter_ns()

    def to_host(self, tensor: Tensor) -> Tensor:
        return tensor.to("cpu", copy=True)

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, copy=True)

    def mark(self) -> Any:
        """This place in the order of the copies."""
        return None

    def wait(self, mark: Any) -> None:
        """What is computed from here on waits for the copies before ``mark``."""


class StreamCopies(Copies):
    """Copies beside the computation, through pinned memory."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def to_host(self, tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._copy(tensor, host)
        return host

    def to_device(self, tensor: Tensor) -> Tensor:
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        self._copy(tensor, made)
        return made

    def _copy(self, source: Tensor, target: Tensor) -> None:
        # After what is computed so far: that makes the source, or may still use the memory of the target.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def mark(self) -> Any:
        return self._stream.record_event()

    def wait(self, mark: Any) -> None:
        torch.cuda.current_stream(self.device).wait_event(mark)


class Parcel:
    """One storage that was saved, as bytes."""

    def __init__(self, tensor: Tensor, copies: Copies) -> None:
        self._copies = copies
        self._storage = weakref.ref(tensor.untyped_storage())
        self._version = torch_private.version_of(tensor)
        self._was_written = False
        self._seen: Tensor | None = None  # tells of writes until the copy is sure to be made
        self._here: Tensor | None = None
        self._host = copies.to_host(self.stay(tensor))

    def stay(self, tensor: Tensor) -> Tensor:
        """Its bytes, where ``tensor`` still has them on the device."""
        if self._here is None:
            self._seen, self._here = torch_private.detached(tensor), _bytes_of(tensor)
        return self._here

    def is_of(self, tensor: Tensor) -> bool:
        """Whether it holds what ``tensor`` looks into, as it is now."""
        return self._storage() is tensor.untyped_storage() and self._version == torch_private.version_of(tensor)

    def leave(self) -> None:
        """Free its memory on the device; its copies are awaited."""
        self._was_written = self._is_written()
        self._seen = self._here = None

    def come_back(self) -> None:
        """Ask for it on the device, where it is not there."""
        if self._here is None:
            self._here = self._copies.to_device(self._host)

    def look(self) -> Tensor | None:
        """Its bytes on the device; None where something else was written there before it left."""
        return None if self._is_written() else self._here

    def _is_written(self) -> bool:
        now = self._version if self._seen is None else torch_private.version_of(self._seen)
        return self._was_written or now != self._version


class Visit:
    """One call of a block.

    Attributes:
        before: the call before it.
        parcels: what was saved; it lives as long as a graph needs it.
    """

    def __init__(self, before: Visit | None) -> None:
        self.before: Callable[[], Visit | None] = (lambda: None) if before is None else weakref.ref(before)
        self.parcels: list[weakref.ref[Parcel]] = []
        self.mark: Any = None  # of its last copy
        self._is_awaited = False
        self._held: list[Parcel] = []  # while copies of them may be under way

    def add(self, parcel: Parcel) -> None:
        self.parcels.append(weakref.ref(parcel))
        self._held.append(parcel)

    def living(self) -> list[Parcel]:
        return [parcel for each in self.parcels if (parcel := each()) is not None]

    def come_back(self, copies: Copies) -> None:
        self._held = self.living()
        for parcel in self._held:
            parcel.come_back()
        self.mark, self._is_awaited = copies.mark(), True

    def arrive(self, copies: Copies) -> None:
        """From here on each parcel is freed as soon as the graph has used it."""
        if self._is_awaited:
            copies.wait(self.mark)
        self._is_awaited, self._held = False, []

    def leave(self, copies: Copies, staying: Sequence[Visit]) -> None:
        copies.wait(self.mark)
        needed = {id(parcel) for visit in staying for parcel in visit.living()}
        for parcel in self.living():
            if id(parcel) not in needed:
                parcel.leave()
        self._is_awaited, self._held = False, []


@dataclass(frozen=True)
class Slip:
    """What a graph has in the place of a saved tensor: where it is, and what view of it it was."""

    offload: Offload
    visit: Visit
    parcel: Parcel
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def get(self) -> Tensor | None:
        """The tensor, on the device; None where it was written to since."""
        self.offload.arrive(self.visit)
        held = self.parcel.look()
        if held is None:
            return None
        made = torch.empty(0, dtype=self.dtype, device=held.device)
        return made.set_(held.untyped_storage(), self.offset, self.size, self.stride)


class Offload:
    """Moves what is saved in the blocks of one network.

    Args:
        device: where they compute.
        min_bytes: smaller storages stay there.
    """

    def __init__(self, device: torch.device, min_bytes: int = MIN_BYTES, copies: Copies | None = None) -> None:
        self.device = device
        self._min_bytes = min_bytes
        self._copies = copies or (StreamCopies if device.type == "cuda" else Copies)(device)
        self._present: list[Visit] = []  # whose parcels may be on the device
        self._current: Visit | None = None
        self._known: WeakValueDictionary[int, Parcel] = WeakValueDictionary()

    @property
    def saves(self) -> bool:
        """Whether what is moved leaves the device's memory."""
        return self._copies.saves

    def copy_times(self) -> CopyTimes:
        """Measured now."""
        return self._copies.times()

    def __reduce__(self) -> Any:
        return Offload, (self.device, self._min_bytes)  # a copy of the network moves its own

    @contextmanager
    def visit(self) -> Iterator[Callable[[Tensor], Slip | None]]:
        """A block is called inside: what autograd saves there is moved. Gives what moves a tensor that is saved in
        another way; None for one that stays."""
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
            visit.mark = self._copies.mark()

    def arrive(self, visit: Visit) -> None:
        """The backward of ``visit`` begins, or goes on."""
        if self._current is visit:
            return
        self._current = visit
        before = visit.before()
        staying = [visit] if before is None else [before, visit]
        self._stay(staying)
        for each in (visit, before):
            if each is not None and each not in self._present:
                each.come_back(self._copies)
        self._present = staying
        visit.arrive(self._copies)

    def _stay(self, staying: list[Visit]) -> None:
        for each in self._present:
            if each not in staying:
                each.leave(self._copies, staying)
        self._present = [each for each in staying if each in self._present]

    def _moved(self, tensor: Tensor, visit: Visit) -> Slip | None:
        if not self.is_worth_moving(tensor):
            return None
        storage = tensor.untyped_storage()
        parcel = self._known.get(id(storage))
        if parcel is None or not parcel.is_of(tensor):
            parcel = self._known[id(storage)] = Parcel(tensor, self._copies)
        else:
            parcel.stay(tensor)
        visit.add(parcel)
        offset, stride = int(tensor.storage_offset()), tensor.stride()
        return Slip(self, visit, parcel, tensor.dtype, tensor.size(), stride, offset)

    def is_worth_moving(self, tensor: Tensor) -> bool:
        """Whether it moves when a block saves it."""
        return (
            type(tensor) is Tensor
            and tensor.device.type == self.device.type
            and tensor.layout is torch.strided
            and tensor.untyped_storage().nbytes() >= self._min_bytes
            and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
            and not is_weight(tensor)
        )


def is_weight(tensor: Tensor) -> bool:
    """Whether it is a parameter, or what autocast made of one, or a view of these."""
    whole = torch_private.viewed(tensor)
    if isinstance(whole, nn.Parameter):
        return True
    made_by = whole.grad_fn
    if made_by is None or made_by.name() != "ToCopyBackward0":
        return False
    return isinstance(getattr(made_by.next_functions[0][0], "variable", None), nn.Parameter)


def _bytes_of(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _unpacked(packed: Tensor | Slip) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    tensor = packed.get()
    if tensor is None:  # as torch says it
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of shape {tuple(packed.size)} that a block saved"
        )
    return tensor
