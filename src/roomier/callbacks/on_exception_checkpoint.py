"""OnExceptionCheckpoint: what can be saved when a run breaks off.

[Note: what is exact after an error]
An error comes in the middle of a step: random states, running statistics, metrics and the position in the data have
moved on, and no place in the loop can be entered again from there. To have the state of the last save point would take
a copy of all of it at each step. So what is saved are the weights, which are worth looking at, and which a new fit can
begin with; a run goes on exactly from a checkpoint of ModelCheckpoint.

Nothing is asked of other ranks, which may be gone or wait elsewhere: a rank that sees an error writes what it has.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from roomier import checkpoint
from roomier.api.callback import Callback
from roomier.api.hparams import is_plain
from roomier.core.errors import RoomierError
from roomier.core.log import notice
from roomier.core.paths import check_path
from roomier.core.ranks import Ranks

if TYPE_CHECKING:
    from roomier.api.module import Module
    from roomier.api.trainer_view import TrainerView

_WHOLE_ON_EACH_RANK = ("single", "ddp")


class OnExceptionCheckpoint(Callback):
    """Saves the weights when an error ends a fit, in ``<dirpath>/<filename>``: a checkpoint with weights only.

    Read it with ``load_from_checkpoint`` or ``fit(..., weights=...)``; one that is there already is replaced. To go on
    exactly as if there had been no error, use the newest checkpoint of :class:`ModelCheckpoint`: the message names it.
    Of several ranks (``ddp``) each that sees an error writes its own, without waiting for others: the first rank's has
    the name, others ``<filename>-rank=N``. Where parameters are cut no rank has them all, and it is refused.

    Args:
        dirpath: an existing or new folder.
        filename: of the checkpoint in it.

    Raises:
        RoomierError: ``filename`` is empty, or ``dirpath`` is no path. When a fit begins: the strategy shards the
            parameters.
    """

    def __init__(self, dirpath: str | Path, filename: str = "on_exception") -> None:
        if not filename:
            raise RoomierError("OnExceptionCheckpoint(filename)", filename, "is empty", "Give a name")
        check_path("OnExceptionCheckpoint(dirpath)", dirpath)
        self.dirpath = Path(dirpath)
        self.filename = filename
        self._is_training = False

    @property
    def ckpt_path(self) -> str:
        """Where the first rank writes."""
        return str(self.dirpath / self.filename)

    def setup(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        self._is_training, strategy = False, trainer.plan.parallel.strategy
        if stage == "fit" and strategy not in _WHOLE_ON_EACH_RANK:
            raise RoomierError(
                "OnExceptionCheckpoint",
                strategy,
                "cuts the parameters among ranks: when one fails, no other has its part",
                "Use ModelCheckpoint(every_n_train_steps=...), from which a run goes on exactly",
            )

    def on_train_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self._is_training = True

    def on_train_end(self, trainer: TrainerView, pl_module: Module) -> None:
        self._is_training = False

    def on_exception(self, trainer: TrainerView, pl_module: Module, exception: BaseException) -> None:
        run = trainer.run
        if run is None or not self._is_training or not run.progress.global_step:
            return
        rank = trainer.global_rank
        path = Path(self.ckpt_path) if rank == 0 else self.dirpath / f"{self.filename}-rank={rank}"
        step = run.progress.global_step
        try:
            weights = run.engine.module.state_dict()
            broken = next((name for name, each in weights.items() if not _is_finite(each)), None)
            if broken is not None:
                notice(f"OnExceptionCheckpoint: {broken} is not finite at step {step}; the weights are not saved")
                return
            state: dict[str, Any] = {
                "plan": run.plan.to_dict(),
                "progress": run.progress.state(),
                "hyperparameters": {name: each for name, each in run.module.hparams.items() if is_plain(each)},
                "module": weights,
            }
            self.dirpath.mkdir(parents=True, exist_ok=True)
            checkpoint.save(path, state, Ranks())
        except Exception as error:  # the one that ended the run is to be seen
            notice(f"OnExceptionCheckpoint: the weights could not be saved: {error}")
            return
        way = "no checkpoint was written to go on from exactly"
        if run.saves.path is not None:
            way = f"the run goes on exactly from {run.saves.path} (step {run.saves.step})"
        notice(f"{type(exception).__name__} in the step after {step}: the weights are saved in {path}; {way}")


def _is_finite(tensor: Any) -> bool:
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or not tensor.numel():
        return True
    return bool(torch.stack(tensor.aminmax()).isfinite().all())
