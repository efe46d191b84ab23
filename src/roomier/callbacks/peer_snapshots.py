"""PeerSnapshots: callback that stores snapshots of the run in the memory of the nodes."""

from __future__ import annotations

import shutil
from collections import Counter
from functools import partial
from pathlib import Path

from torch import nn

from roomier.api.callback import Callback
from roomier.api.module import Module
from roomier.api.trainer_view import TrainerView
from roomier.checkpoint.commit import absolute, remove
from roomier.checkpoint.find import list_complete
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
    the next node, while training continues. If at most one node was lost, the next fit with this callback and the same
    ``default_root_dir`` writes the newest snapshot to the run folder, before it looks for a checkpoint to resume from.
    If two neighboring nodes were lost, it prints a notice, and the run resumes from the newest checkpoint on disk. At
    the end of the fit, the snapshots are deleted.

    On one node, snapshots survive failed processes, but not a failure of the node. The memory must have space for two
    snapshots (four with several nodes) and for the copy from which they are written.

    Args:
        every_n_steps: number of optimizer steps between snapshots. A snapshot starts later if the previous one, or an
            asynchronous checkpoint, is not yet complete.
        place: folder on a memory file system of each node.

    Raises:
        RoomierError: ``every_n_steps`` is not a positive integer. When training starts, the error is also raised if
            ``place`` is too small or does not exist, if the run has no local run folder, or if the nodes have
            different numbers of ranks.

    Example:
        >>> trainer = roomier.Trainer(callbacks=[PeerSnapshots(every_n_steps=10)])
    """

    reads_parameters, keeps_snapshots = False, True

    def __init__(self, every_n_steps: int, place: str | Path = "/dev/shm") -> None:
        check_integer("PeerSnapshots(every_n_steps)", every_n_steps, 1, "Use a positive integer")
        self.every_n_steps = every_n_steps
        self.place = absolute(place)
        self._memory: Path | None = None
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
        if len({*Counter(node for node, _ in of_ranks).values()}) > 1:
            problem = "requires the same number of ranks on each node"
            raise RoomierError(
                "callbacks", type(self).__name__, problem, "Start the same number, or remove the callback"
            )
        num_nodes = len({node for node, _ in of_ranks})
        received = (run.ranks.world.node_rank - 1) % num_nodes
        here = sum(each for node, each in of_ranks if node == run.ranks.world.node_rank)
        here += sum(each for node, each in of_ranks if node == received and num_nodes > 1)
        self._check_space(run, 2 * here)
        self._memory, self._step = folder_in_memory(self.place, run.folder), trainer.global_step

    def _check_space(self, run: Run, num_bytes: int) -> None:
        place = self.place
        problem = "" if place.is_dir() else "does not exist"
        if not problem and free_bytes(place) < num_bytes:
            problem = f"is too small. Space for two snapshots {shortage(place, num_bytes)}"
        for rank, each in enumerate(run.ranks.gather(problem)):
            if each:
                action = "Enlarge it (`mount -o remount,size=...`), or remove PeerSnapshots"
                raise RoomierError("PeerSnapshots(place)", str(place), f"{each} (rank {rank})", action)

    def on_save_point(self, trainer: TrainerView, pl_module: Module) -> None:
        step, run = trainer.global_step, run_of(trainer, "PeerSnapshots")
        background = run.saves.background
        is_due = step - self._step >= self.every_n_steps and not trainer.is_last_save_point
        if self._memory is None or not is_due or (background is not None and background.is_busy):
            return
        self._step = step
        assert run.folder is not None
        path = run.folder / "checkpoints" / f"{INTERRUPTED}{step}"
        then = partial(self._remove_older, trainer)
        run.saves.deferred.append(WantedSave(path, asynchronous=True, when_committed=then, memory=self._memory))

    def _remove_older(self, trainer: TrainerView) -> None:
        if self._memory is not None and trainer.world.local_rank == 0:
            for path in list_complete(self._memory)[:-1]:
                remove(path)

    def teardown(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        memory, self._memory = self._memory, None
        is_needed = trainer.interrupted and trainer.run.saves.step != trainer.global_step
        if memory is not None and not is_needed and trainer.world.local_rank == 0:
            shutil.rmtree(memory, ignore_errors=True)


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
