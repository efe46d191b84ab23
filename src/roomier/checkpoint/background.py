"""Saving beside the training: it waits only while the state is copied to host memory."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from roomier.checkpoint.agree import all_ranks, together
from roomier.checkpoint.commit import absolute
from roomier.checkpoint.parts import Part
from roomier.checkpoint.saving import Prepared, prepare, write
from roomier.core import torch_private
from roomier.core.ranks import Ranks


class BackgroundSaver:
    """Writes one checkpoint at a time in a thread of its own, which commits it as :func:`roomier.checkpoint.save` does.

    Several ranks agree there in a process group of their own: collectives of two threads in one group would meet in an
    order that is not the same on all ranks. Every rank must make the same calls.

    Host memory: one copy of what this rank writes, kept for the next save; pinned where it comes from a CUDA device.

    Args:
        ranks: that save together; None takes those of torch's process group, or this process alone.

    Attributes:
        num_started: how many saves were started so far; the same on all ranks.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self._ranks = all_ranks() if ranks is None else ranks
        self._group: dist.ProcessGroup | None = None
        self._buffers: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.num_started = 0

    @property
    def is_busy(self) -> bool:
        """Whether a save was started that :meth:`wait` has not ended yet."""
        return self._thread is not None

    @property
    def num_ended(self) -> int:
        """How many of the saves that were started have come to their end, good or bad, on this rank."""
        return self.num_started - int(self._thread is not None and self._thread.is_alive())

    def start(self, path: str | Path, state: Mapping[str, Any]) -> None:
        """Copy ``state`` and begin to write it at ``path``; waits for the save before it.

        Raises:
            CheckpointError: that save failed, or ``state`` cannot be stored.
        """
        self.wait()
        prepared = prepare(absolute(path), state, self._ranks)
        staged: list[Part] = []
        together(self._ranks, lambda: staged.extend(self._stage(prepared.parts)))
        if self._group is None and not self._ranks.is_alone:
            self._group = dist.new_group(backend="gloo", group_desc=torch_private.BACKGROUND_GROUP)
        job = replace(prepared, parts=staged)
        # A daemon: when the process has to end, what is not committed is not a checkpoint anyway.
        self._thread = threading.Thread(target=self._write, args=(job,), name="roomier-checkpoint", daemon=True)
        self._thread.start()
        self.num_started += 1

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until the save that was started is committed. False where ``timeout_s`` passed before; True also where none
        was started.

        Raises:
            CheckpointError: it failed, on whichever rank.
        """
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        return True

    def close(self) -> None:
        """Give back the copies and the process group. Nothing may be in flight."""
        assert self._thread is None or not self._thread.is_alive()
        self._buffers.clear()
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def _write(self, prepared: Prepared) -> None:
        try:
            write(prepared, Ranks(self._ranks.world, self._group))
        except BaseException as error:
            self._error = error

    def _stage(self, parts: list[Part]) -> list[Part]:
        buffers = {part.name: self._buffer(part) for part in parts}
        self._buffers = buffers  # those of tensors that are no longer there go
        for part in parts:
            # Only for CUDA is there somebody who waits below: other devices would still be copying.
            buffers[part.name].copy_(part.tensor.detach(), non_blocking=part.tensor.is_cuda)
        for device in {part.tensor.device for part in parts if part.tensor.is_cuda}:
            torch.cuda.synchronize(device)  # a model may stand on several
        return [replace(part, tensor=buffers[part.name]) for part in parts]

    def _buffer(self, part: Part) -> Tensor:
        shape, dtype = part.tensor.shape, part.tensor.dtype
        held = self._buffers.get(part.name)
        if held is not None and held.shape == shape and held.dtype == dtype:
            return held
        return torch.empty(shape, dtype=dtype, pin_memory=part.tensor.is_cuda)
