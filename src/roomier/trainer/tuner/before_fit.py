"""Searches that run before a fit if ``auto_lr_find`` or ``auto_scale_batch_size`` of the Trainer requests them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from roomier.api.module import network_of
from roomier.checkpoint.commit import at_home
from roomier.checkpoint.run_state import peek_run
from roomier.core.device.resolve import resolve_device
from roomier.core.errors import RoomierError
from roomier.core.log import notice
from roomier.launch import join
from roomier.plan import Plan
from roomier.run.run import Run
from roomier.train.saving.restore import resolve_checkpoint
from roomier.train.settling.job import checkpoint_after_restart
from roomier.trainer.attributes import TrainerAttributes
from roomier.trainer.tuner.range_test import attribute_of, lr_find, set_attribute
from roomier.trainer.tuner.trial import Subject

if TYPE_CHECKING:
    from roomier.trainer.tuner.range_test import LearningRateCurve

PICTURE = "lr_find.png"


def check_flags(auto_lr_find: bool | str, auto_scale_batch_size: bool | str) -> None:
    """Check the values of ``auto_lr_find`` and ``auto_scale_batch_size``.

    Raises:
        RoomierError: a value is invalid.
    """
    if not isinstance(auto_lr_find, bool) and not (isinstance(auto_lr_find, str) and auto_lr_find.isidentifier()):
        action = "Use True or False, or the name of the attribute that contains the learning rate"
        raise RoomierError("auto_lr_find", auto_lr_find, "must be a bool or the name of an attribute", action)
    if isinstance(auto_scale_batch_size, bool):
        return
    from roomier.trainer.tuner.tuner import MODES  # late import: most runs do not search

    if auto_scale_batch_size not in MODES:
        action = "Use True or False, 'power' or 'binsearch'"
        raise RoomierError("auto_scale_batch_size", auto_scale_batch_size, "is not a known mode", action)


def tune(trainer: TrainerAttributes, subject: Subject, ckpt_path: str | Path | None) -> LearningRateCurve | None:
    """Run the searches that the flags of ``trainer`` request, and use the results in the next fit.

    The searches are skipped if the fit resumes from a checkpoint, or if the model was fitted previously. In both cases,
    the results of an earlier search are already available.

    Returns:
        The curve of the learning rate search; None if the learning rate search did not run.
    """
    rate, size = trainer.auto_lr_find, trainer.auto_scale_batch_size
    if _was_fitted(trainer, subject.model):
        notice("auto_lr_find, auto_scale_batch_size: skipped, because the model has been fitted before")
        return None
    best = trainer.checkpoint_callback
    best_path, root = None if best is None else best.best_model_path, at_home(trainer.default_root_dir)
    trainer.ranks = join(trainer.world, resolve_device(trainer.plan.parallel.accelerator).type)
    asked = trainer.set_path if ckpt_path is None else ckpt_path
    path = trainer.ranks.on_zero(lambda: resolve_checkpoint(asked, root, best_path))
    if trainer.keeps_files:
        path = checkpoint_after_restart(root, trainer.ranks) or path
    if path is not None:
        _take_from(trainer, subject.model, path)
        return None
    if size:
        mode = size if isinstance(size, str) else "power"
        from roomier.trainer.tuner.tuner import scale_batch_size  # late import: most runs do not search

        found = scale_batch_size(trainer, subject, mode=mode)
        notice(f"auto_scale_batch_size: micro-batches of {found} samples")
    curve = None
    if rate:
        name = rate if isinstance(rate, str) else ""
        curve = lr_find(trainer, subject, update_attr=True, attr_name=name)
        if curve is not None:
            notice(f"auto_lr_find: the learning rate is {curve.suggestion():.3g}")
    return curve


def write_picture(curve: LearningRateCurve, run: Run) -> None:
    """Save a plot of the curve in the run folder, if the run has one. If the plot cannot be saved, print a notice."""
    if run.folder is None or not run.ranks.is_zero:
        return
    try:
        curve.save_png(run.folder / PICTURE)
    except (RoomierError, OSError) as error:
        notice(f"auto_lr_find: cannot write the plot of the curve: {error}")


def _was_fitted(trainer: TrainerAttributes, model: nn.Module) -> bool:
    fitted = trainer.fitted
    return fitted is not None and model in (fitted.module, network_of(fitted.module))


def _take_from(trainer: TrainerAttributes, model: nn.Module, path: Path) -> None:
    try:
        record = peek_run(path)
        stored = Plan.from_dict(record["plan"])
    except (RoomierError, KeyError):  # the fit raises the error
        return
    if trainer.auto_lr_find and None not in (stored.optimizer.name, trainer.requested_plan.optimizer.name):
        trainer.use_learning_rate(stored.optimizer.lr)
    elif trainer.auto_lr_find and trainer.requested_plan.optimizer.name is None:
        _put_kept_rate(trainer, model, record.get("hyperparameters", {}))
    if trainer.auto_scale_batch_size:
        trainer.micro_batch, trainer.num_micro_batches = None, stored.batch.accumulate_grad_batches
    notice("auto_lr_find, auto_scale_batch_size: skipped, because the fit resumes with the values of its checkpoint")


def _put_kept_rate(trainer: TrainerAttributes, model: nn.Module, hyperparameters: Mapping[str, Any]) -> None:
    # The optimizer resumes with this learning rate in any case. The attribute is set for code that reads it.
    with suppress(RoomierError):  # The attribute may no longer exist.
        name = attribute_of(model, trainer.auto_lr_find if isinstance(trainer.auto_lr_find, str) else "")
        if isinstance(hyperparameters.get(name), float):
            set_attribute(model, name, hyperparameters[name])
