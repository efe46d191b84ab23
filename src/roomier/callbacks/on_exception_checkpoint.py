"""OnExceptionCheckpoint: callback that saves the weights when an error ends a run.

[Note: state after an error]
An error occurs in the middle of a step, when random states, running statistics, metrics and the position in the data
have already advanced, so a run cannot resume from this point. Restoring the state of the last save point instead would
require a copy of the full state in each step. This callback therefore saves only the weights, for inspection or as the
start of a new fit. To resume a run exactly, use a checkpoint of ModelCheckpoint.

The ranks do not communicate, because the others may have exited or may be waiting in a different collective. Each rank
that raises an error writes its own weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from roomier import checkpoint
from roomier.api.callback import Callback
from roomier.api.hparams import plain_items
from roomier.api.module import Module
from roomier.api.trainer_view import TrainerView
from roomier.checkpoint.commit import at_home
from roomier.checkpoint.shown import lightning_entries
from roomier.core.errors import RoomierError
from roomier.core.log import notice
from roomier.core.ranks import Ranks
from roomier.core.replacing import replacing_path
from roomier.storage.mirror import local_of, remote_of, shown

_WHOLE_ON_EACH_RANK = ("single", "ddp")


class OnExceptionCheckpoint(Callback):
    """Callback that saves the weights to ``<dirpath>/<filename>`` when an error ends a fit. An existing
    checkpoint is replaced.

    The checkpoint contains only weights, so load it with ``load_from_checkpoint`` or ``fit(..., weights=...)``. To
    resume exactly, use the newest checkpoint of :class:`ModelCheckpoint`, whose path is in the notice about the error.

    With several ranks (``ddp``), each rank that raises an error writes its own checkpoint without waiting for other
    ranks. Ranks other than the first write ``<filename>-rank=N``. Strategies that shard parameters, and pipelines, are
    not supported, because no rank has all parameters.

    Args:
        dirpath: folder of the checkpoint; created if it does not exist.
        filename: name of the checkpoint in ``dirpath``.

    Raises:
        RoomierError: ``filename`` is empty, or ``dirpath`` is not a path. The error is also raised when a fit starts if
            the strategy shards the parameters or divides them into stages.

    Example:
        >>> trainer = roomier.Trainer(callbacks=[OnExceptionCheckpoint("checkpoints")])
    """

    reads_parameters = False

    def __init__(self, dirpath: str | Path, filename: str = "on_exception") -> None:
        if not filename:
            raise RoomierError("OnExceptionCheckpoint(filename)", filename, "must not be empty", "Pass a name")
        self.dirpath = local_of(at_home(dirpath, "OnExceptionCheckpoint(dirpath)", RoomierError))
        self.filename = filename
        self._is_training = False

    @property
    def ckpt_path(self) -> str:
        """Path of the checkpoint that the first rank writes."""
        return shown(self.dirpath / self.filename)

    def setup(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        self._is_training = False
        if stage == "fit":
            check_saves_weights("OnExceptionCheckpoint", trainer)

    def on_train_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self._is_training = True

    def on_train_end(self, trainer: TrainerView, pl_module: Module) -> None:
        self._is_training = False

    def on_exception(self, trainer: TrainerView, pl_module: Module, exception: BaseException) -> None:
        if self._is_training:
            save_weights_after(exception, trainer, self.dirpath, self.filename)


def check_saves_weights(field: str, trainer: TrainerView) -> None:
    """Check that each rank has all parameters.

    Raises:
        RoomierError: the strategy shards the parameters, or divides them into stages.
    """
    strategy, num_stages = trainer.plan.parallel.strategy, trainer.plan.parallel.num_stages
    if strategy not in _WHOLE_ON_EACH_RANK or num_stages > 1:
        part = "stage" if num_stages > 1 else "shard"
        problem = f"is not supported, because each rank has only one {part} and cannot save that of a failed rank"
        action = "Use ModelCheckpoint(every_n_train_steps=...), from which a run resumes exactly"
        raise RoomierError(field, strategy, problem, action)


def save_weights_after(
    exception: BaseException, trainer: TrainerView, folder: Path, filename: str, suffix: str = ""
) -> None:
    """Save the weights of this rank to ``folder`` after an error in a step, without communication. If ``suffix`` is not
    empty, save a file for Lightning with this suffix."""
    run = trainer.run
    if run is None or not run.progress.global_step:
        return
    rank = trainer.global_rank
    path = folder / ((filename if rank == 0 else f"{filename}-rank={rank}") + suffix)
    step = run.progress.global_step
    try:
        weights = run.engine.module.state_dict()
        broken = next((name for name, each in weights.items() if not _is_finite(each)), None)
        if broken is not None:
            notice(f"OnExceptionCheckpoint: weights not saved, because {broken} is not finite at step {step}")
            return
        state: dict[str, Any] = {
            "plan": run.plan.to_dict(),
            "progress": run.progress.state(),
            "epoch": run.current_epoch,
            "hyperparameters": plain_items(run.module.hparams),
            "module": weights,
        }
        folder.mkdir(parents=True, exist_ok=True)
        if suffix:
            with replacing_path(path) as aside:
                torch.save({**lightning_entries(state), "state_dict": weights}, aside)
        else:
            checkpoint.save(path, state, Ranks())
        if remote_of(path) is not None:
            checkpoint.upload(path)
    except Exception as error:  # an error in the save must not replace the error that ended the run
        notice(f"OnExceptionCheckpoint: the weights could not be saved: {error}")
        return
    way = "this run has no checkpoint from which it can resume exactly"
    if run.saves.path is not None:
        way = f"to resume exactly, use {shown(run.saves.path)} (step {run.saves.step})"
    notice(f"{type(exception).__name__} in the step after {step}: the weights were saved to {shown(path)}; {way}")


def _is_finite(tensor: Any) -> bool:
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or not tensor.numel():
        return True
    return bool(torch.stack(tensor.aminmax()).isfinite().all())
