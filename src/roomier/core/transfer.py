"""Transfer of batches to the device, concurrent with computation."""

from typing import Any

import torch
from torch import Tensor

from roomier.core.tree import map_tensors, moved, moves_itself, to_device


class BatchMover:
    """Callable that moves batches to ``device``. On CUDA, the transfer uses a separate stream.

    The host runs ahead of a CUDA device and requests the next batch while kernels of the current batch are queued. On
    the stream of these kernels, the copy of the next batch would wait for the kernels. On a separate stream, the copy
    from pinned memory runs concurrently. The loaders pin memory for this purpose. No additional batch is read ahead.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __call__(self, batch: Any) -> Any:
        if self._stream is None:
            return to_device(batch, self.device)
        computing = torch.cuda.current_stream(self.device)

        def move(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                copied = moved(leaf, self.device)
                copied.record_stream(computing)  # freed memory must not be reused while kernels still read the memory
                return copied
            with torch.cuda.stream(computing):  # record_stream cannot be called for tensors inside an unknown object
                return moved(leaf, self.device)

        with torch.cuda.stream(self._stream):
            on_device = map_tensors(move, batch, moves_itself)
        computing.wait_stream(self._stream)
        return on_device
