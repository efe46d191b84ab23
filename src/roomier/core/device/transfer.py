"""Transfer of batches to the device, concurrently with computation."""

from typing import Any

import torch
from torch import Tensor

from roomier.core.device.capability import capabilities_of
from roomier.core.device.streams import computing_stream
from roomier.core.tree import map_tensors, moved, moves_itself, to_device


class BatchMover:
    """Callable that moves batches to ``device``. If the device has streams, the copies use a separate stream.

    The host runs ahead of the device and requests the next batch while kernels of the current batch are queued. On the
    stream of these kernels, the copy of the next batch would wait for the kernels. On a separate stream, the copy from
    pinned memory runs concurrently. The loaders pin memory for this purpose. This class loads no additional batches in
    advance.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.Stream(device) if capabilities_of(device).has_streams else None

    def __call__(self, batch: Any) -> Any:
        if self._stream is None:
            return to_device(batch, self.device)
        computing = computing_stream(self.device)

        def move(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                copied = moved(leaf, self.device)
                copied.record_stream(computing)  # the memory must not be reused while kernels still read it
                return copied
            with computing:  # record_stream cannot be called for tensors inside an object of unknown type
                return moved(leaf, self.device)

        with self._stream:
            on_device = map_tensors(move, batch, moves_itself)
        computing.wait_stream(self._stream)
        return on_device
