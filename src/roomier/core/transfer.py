"""Batches to the device, beside the computation."""

from typing import Any

import torch
from torch import Tensor

from roomier.core.tree import map_tensors, moved, moves_itself, to_device


class BatchMover:
    """Moves batches to ``device``; on CUDA on a stream of its own.

    The host runs ahead of a CUDA device: it asks for the next batch while the kernels of this one are still queued.
    On the stream of those kernels the copy would wait for them; on its own it runs beside them (from pinned memory,
    which the loaders are asked for). No batch is read ahead for it.
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
                copied.record_stream(computing)  # freed memory must not be reused while kernels still read it
                return copied
            with torch.cuda.stream(computing):  # the tensors in it are not known here, so none could be recorded
                return moved(leaf, self.device)

        with torch.cuda.stream(self._stream):
            on_device = map_tensors(move, batch, moves_itself)
        computing.wait_stream(self._stream)
        return on_device
