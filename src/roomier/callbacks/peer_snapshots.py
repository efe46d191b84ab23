"""PeerSnapshots: callback that stores snapshots of the run in the memory of the nodes."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from roomier.api.callback import Callback, KeptSnapshots
from roomier.api.module import Module
from roomier.api.trainer_view import TrainerView
from roomier.checkpoint.background import BackgroundSaver
from roomier.checkpoint.commit import absolute
from roomier.checkpoint.saving import parts_to_write
from roomier.checkpoint.snapshots import INTERRUPTED, folder_in_memory
from roomier.core.disk_space import free_bytes, shortage
from roomier.core.errors import RoomierError, check_integer
from roomier.run.progress import WantedSave
from roomier.run.run import Run, run_of
from roomier.storage.mirror import remote_of
from roomier.techniques.optim.state_bytes import state_bytes


class PeerSnapshots(Callback):
    """Callback that saves the run to the memory of its nodes every few steps, so that a restarted run repeats only
    these steps.

    A snapshot is a checkpoint in a memory file system. Each rank writes its shard and, with several nodes, sends it to
    the next node, while the next step runs. This step ends only when the snapshot is complete on all ranks, so a
    restarted run repeats at most ``every_n_steps`` completed steps. If at most one node was lost, the next fit with
    this callback and the same ``default_root_dir`` writes the newest snapshot to the run folder, before it looks for a
    checkpoint to resume from. If two neighboring nodes were lost, it prints a notice, and the run resumes from the
    newest checkpoint on disk.

    The snapshots are deleted at the end of the fit. If a job is not restarted, they remain in memory until a later fit
    with this callback under the same ``default_root_dir`` writes them to disk, or until a later fit of the same user
    finds that a checkpoint on disk has replaced them, or that the run folder was deleted.

    On one node, snapshots survive failed processes, but not a failure of the node. The memory must have space for two
    snapshots (four with several nodes) and for the copy from which they are written.

    Args:
        every_n_steps: number of optimizer steps between snapshots.
        place: folder on a memory file system of each node.

    Raises:
        RoomierError: ``every_n_steps`` is not a positive integer. When training starts, the error is also raised if
            ``place`` is too small or does not exist, or if the run has no local run folder.

    Example:
        >>> trainer = roomier.Trainer(callbacks=[PeerSnapshots(every_n_steps=10)])
    """

    reads_parameters, kept_weights = False, KeptSnapshots()

    def __init__(self, every_n_steps: int, place: str | Path = "/dev/shm") -> None:
        check_integer("PeerSnapshots(every_n_steps)", every_n_steps, 1, "Use a positive integer")
        self.every_n_steps = every_n_steps
        self.place = absolute(place)
        self._memory: Path | None = None
        self._saver: BackgroundSaver | None = None
        self._step = 0

    def on_train_start(self, trainer: TrainerView, pl_module: Module) -> None:
        run = run_of(trainer, "PeerSnapshots")
        if trainer.fast_dev_run:
            return
        if run.folder is None or remote_of(run.folder) is not None:
            problem = "requires a run folder on a local or shared file system"
            action = "Set default_root_dir to such a folder, and keep enable_checkpointing=True"
            raise RoomierError("callbacks", type(self).__name__, problem, action)
        of_ranks = run.ranks.gather((run.ranks.world.node_rank, _bytes_to_write(run)))
        num_nodes = len({node for node, _ in of_ranks})
        received = (run.ranks.world.node_rank - 1) % num_nodes
        here = sum(each for node, each in of_ranks if node == run.ranks.world.node_rank)
        here += sum(each for node, each in of_ranks if node == received and num_nodes > 1)
        self._check_space(run, 2 * here)
        is_leader = run.ranks.world.local_rank == 0
        self._memory = folder_in_memory(self.place, run.folder) if is_leader else self.place
        self._step = trainer.global_step
        self._saver = BackgroundSaver(run.ranks)

    def _check_space(self, run: Run, num_bytes: int) -> None:
        place = self.place
        problem = "" if place.is_dir() else "does not exist"
        if not problem and free_bytes(place) < num_bytes:
            problem = f"is too small. Space for two snapshots {shortage(place, num_bytes)}"
        for rank, each in enumerate(run.ranks.gather(problem)):
            if each:
                action = "Enlarge it (`mount -o remount,size=...`), delete old snapshots in it, or remove PeerSnapshots"
                raise RoomierError("PeerSnapshots(place)", str(place), f"{each} (rank {rank})", action)

    def on_train_batch_end(self, trainer: TrainerView, pl_module: Module, *_: Any, **__: Any) -> None:
        if self._saver is not None and trainer.global_step != self._step:
            self._saver.wait()

    def on_save_point(self, trainer: TrainerView, pl_module: Module) -> None:
        step, run = trainer.global_step, run_of(trainer, "PeerSnapshots")
        is_due = not 0 <= step - self._step < self.every_n_steps  # negative if the run returned to an earlier step
        if self._saver is None or not is_due or trainer.is_last_save_point:
            return
        self._step = step
        assert run.folder is not None
        path = run.folder / "checkpoints" / f"{INTERRUPTED}{step}"
        run.saves.deferred.append(WantedSave(path, start=partial(self._saver.start, memory=self._memory)))

    def teardown(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        saver, self._saver = self._saver, None
        if saver is None:
            return
        saver.end()
        is_needed = trainer.interrupted and trainer.run.saves.step != trainer.global_step
        if self._memory is not None and not is_needed and trainer.world.local_rank == 0:
            shutil.rmtree(self._memory, ignore_errors=True)


def _bytes_to_write(run: Run) -> int:
    """Return the size in bytes of the weights and optimizer states that this rank writes to a snapshot."""
    engine, weights = run.engine, run.engine.weights()
    home_of = {
        id(parameter): (optimizer, group)
        for optimizer in engine.optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    parameters: dict[str, nn.Parameter] = dict(engine.module.named_parameters())
    num_bytes = 0
    for part in parts_to_write(weights, writes_whole=run.ranks.is_zero):
        num_bytes += part.tensor.nbytes
        optimizer, group = home_of.get(id(parameters.get(part.name)), (None, {}))
        if optimizer is not None:
            full_shape = tuple(weights[part.name].shape)
            num_bytes += state_bytes(optimizer, group, tuple(part.tensor.shape), part.tensor.dtype, full_shape)
    return num_bytes
