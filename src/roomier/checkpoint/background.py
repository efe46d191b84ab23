"""Save checkpoints in the background. Training waits only until the state is copied to host memory."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from roomier.checkpoint.agree import all_ranks, together
from roomier.checkpoint.commit import absolute
from roomier.checkpoint.saving import TensorBox, prepare, write
from roomier.core import torch_private
from roomier.core.daemon import in_daemon
from roomier.core.device.capability import capabilities_of
from roomier.core.device.streams import synchronize
from roomier.core.log import notice
from roomier.core.ranks import Ranks

_GRACE_S = 30.0


class BackgroundSaver:
    """Saver that writes one checkpoint at a time in a thread. The checkpoint is committed as in
    :func:`roomier.checkpoint.save`.

    With several ranks, the threads communicate in a separate process group. If two threads used the same process group,
    the order of their collectives could differ between ranks. Every rank must call the same methods in the same order.

    The saver requires host memory for one copy of the data that this rank writes, and reuses this memory for the next
    save. For tensors on a device that copies asynchronously, this memory is pinned.

    Args:
        ranks: ranks that save together. If None, the ranks are the ranks of the default process group, or only this
            process.

    Attributes:
        num_started: number of saves that were started; identical on all ranks.

    Example:
        >>> saver = BackgroundSaver()
        >>> saver.start("checkpoints/step-100", state)
        >>> ...  # continue training
        >>> saver.wait()
        >>> saver.close()
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self._ranks = all_ranks() if ranks is None else ranks
        self._group: dist.ProcessGroup | None = None
        self._buffers: dict[str, Tensor] = {}
        self._save: Future[None] | None = None
        self.num_started = 0

    @property
    def is_busy(self) -> bool:
        """True after :meth:`start` until :meth:`wait` returns True or raises."""
        return self._save is not None

    @property
    def num_ended(self) -> int:
        """Number of started saves that have finished on this rank, successfully or with an error."""
        return self.num_started - int(self._save is not None and not self._save.done())

    def start(self, path: str | Path, state: Mapping[str, Any], memory: Path | None = None) -> None:
        """Wait for the previous save, copy ``state``, and start writing the copy to ``path``.

        Args:
            path: checkpoint folder.
            state: nested state as for :func:`roomier.checkpoint.save`.
            memory: folder of this node in memory for a snapshot; see [Note: snapshots] in ``snapshots.py``. None to
                write the checkpoint to ``path``.

        Raises:
            CheckpointError: the previous save failed, or ``state`` cannot be saved.
        """
        self.wait()
        prepared = prepare(absolute(path), state, self._ranks)
        staged: list[TensorBox] = []
        together(self._ranks, lambda: staged.extend(self._stage(prepared.parts)))
        if self._group is None and not self._ranks.is_alone:
            self._group = dist.new_group(backend="gloo", group_desc=torch_private.BACKGROUND_GROUP)
        job = replace(prepared, parts=staged, memory=memory)
        # The thread is a daemon, because an uncommitted checkpoint is unusable after the process has exited.
        self._save = in_daemon(partial(write, job, Ranks(self._ranks.world, self._group)), "roomier-checkpoint")
        self.num_started += 1

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the current save is committed.

        Args:
            timeout_s: maximum time to wait in seconds; None waits without a limit.

        Returns:
            False if ``timeout_s`` passed before the end of the save. True if the save is committed, or if no save was
            started.

        Raises:
            CheckpointError: the save failed on any rank.
        """
        if self._save is None:
            return True
        try:
            error = self._save.exception(timeout_s)
        except TimeoutError:
            return False
        self._save = None
        if error is not None:
            raise error
        return True

    def end(self) -> None:
        """Wait for up to 30 s, so that an almost complete checkpoint is not lost, and call :meth:`close`. An error of
        the save is printed, because it must not replace the error that ended the run."""
        try:
            is_over = self.wait(_GRACE_S)
        except Exception as error:
            notice(f"writing a checkpoint in the background also failed: {error}")
            is_over = True
        if is_over:
            self.close()

    def close(self) -> None:
        """Release the host copies and the process group. This method must not be called during a save."""
        assert self._save is None or self._save.done()
        self._buffers.clear()
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def _stage(self, parts: list[TensorBox]) -> list[TensorBox]:
        buffers = {part.name: self._buffer(part) for part in parts}
        self._buffers = buffers  # frees the buffers of tensors that are no longer in the state
        for part in parts:
            buffers[part.name].copy_(part.tensor.detach(), non_blocking=_copies_asynchronously(part))
        for device in {part.tensor.device for part in parts if _copies_asynchronously(part)}:
            synchronize(device)  # a model can use several devices
        return [replace(part, tensor=buffers[part.name]) for part in parts]

    def _buffer(self, part: TensorBox) -> Tensor:
        shape, dtype = part.tensor.shape, part.tensor.dtype
        held = self._buffers.get(part.name)
        if held is not None and held.shape == shape and held.dtype == dtype:
            return held
        return torch.empty(shape, dtype=dtype, pin_memory=_copies_asynchronously(part))


def _copies_asynchronously(part: TensorBox) -> bool:
    return capabilities_of(part.tensor.device).copies_asynchronously
