"""Lower-precision copies of parameters, which autocast creates and autograd saves.

Under autocast, the first operation that reads a parameter creates a copy in lower precision. Autocast's cache and the
graph keep this copy until backward. While a parameter is not on the device, the memory of its copy is freed. When the
parameter returns, the copy is recomputed. The tensor object of the copy remains, so the graph is unchanged.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from roomier.core import torch_private
from roomier.techniques.offload.regions import Place


@dataclass(frozen=True)
class _Cast:
    """A copy of a parameter.

    Attributes:
        parameter: parameter from which the copy was created.
        storage: weak reference to the storage of the copy.
        place: position of the copy within its storage.
        num_bytes: size of the storage.
    """

    parameter: nn.Parameter
    storage: weakref.ref[torch.UntypedStorage]
    place: Place
    num_bytes: int


class Casts:
    """The copies of the parameters of one region."""

    def __init__(self) -> None:
        self._casts: dict[int, _Cast] = {}

    def add(self, parameter: nn.Parameter, cast: Tensor) -> None:
        """Add ``cast``, a copy of ``parameter``. A copy that was added before is ignored."""
        storage = cast.untyped_storage()
        key = torch_private.memory_of(cast)
        known = self._casts.get(key)
        if known is None or known.storage() is not storage:
            first = int(cast.storage_offset()) * cast.itemsize
            place = Place(first, cast.dtype, cast.shape, cast.stride())
            self._casts[key] = _Cast(parameter, weakref.ref(storage), place, storage.nbytes())

    def leave(self) -> None:
        """Free the memory of the copies."""
        for storage, _ in self._living():
            storage.resize_(0)

    def arrive(self) -> None:
        """Recompute the copies. The parameters must be on the device."""
        for storage, cast in self._living():
            if not storage.nbytes():
                storage.resize_(cast.num_bytes)
                cast.place.within(storage).copy_(cast.parameter.detach())

    def _living(self) -> list[tuple[torch.UntypedStorage, _Cast]]:
        found = [(key, cast.storage(), cast) for key, cast in self._casts.items()]
        self._casts = {key: cast for key, storage, cast in found if storage is not None}
        return [(storage, cast) for _, storage, cast in found if storage is not None]


def cast_parameter(tensor: Tensor) -> nn.Parameter | None:
    """Return the parameter from which autocast created ``tensor``; None for other tensors. ``tensor`` must not be a
    view."""
    created_by = tensor.grad_fn
    if created_by is None or created_by.name() != "ToCopyBackward0":
        return None
    source = getattr(created_by.next_functions[0][0], "variable", None)
    return source if isinstance(source, nn.Parameter) else None
