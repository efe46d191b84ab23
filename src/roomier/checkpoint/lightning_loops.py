"""Entries of Lightning's checkpoints, computed from the state of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roomier.checkpoint.lightning import HYPERPARAMETERS, HYPERPARAMETERS_NAME, VERSION

WRITTEN_FOR = "2.6.0"
"""Version of Lightning whose format is written."""


def lightning_entries(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a Lightning checkpoint that contain the progress and the hyperparameters in ``state``."""
    progress = state.get("progress", {})
    return {
        **loop_states(progress, is_validated=not progress.get("is_validation_due", False)),
        "epoch": state.get("epoch", shown_epoch(progress)),
        VERSION: WRITTEN_FOR,
        HYPERPARAMETERS_NAME: state.get("hyperparameters_argument", "kwargs"),
        HYPERPARAMETERS: dict(state.get("hyperparameters", {})),
    }


def loop_states(progress: Mapping[str, Any], is_validated: bool) -> dict[str, Any]:
    """Return the state of Lightning's loops at the end of an epoch (for example after a fit) or after a batch within an
    epoch.
    """
    epoch, step = progress.get("epoch", 0), progress.get("global_step", 0)
    num_done, num_batches = progress.get("batch_idx", 0), progress.get("num_batches", 0)
    is_in_epoch = num_done > 0
    begun = epoch + (1 if is_in_epoch else 0)
    in_epoch = num_done if is_in_epoch else (num_batches // epoch if epoch else 0)
    batches = {**_counts(in_epoch, num_batches), "is_last_batch": not is_in_epoch and epoch > 0}
    steps_in_epoch = min(step, in_epoch)
    epochs = {"ready": begun, "started": begun, "processed": epoch, "completed": epoch}
    fit_loop = {
        "state_dict": {},
        "epoch_loop.state_dict": {"_batches_that_stepped": step},
        "epoch_loop.batch_progress": batches,
        "epoch_loop.scheduler_progress": _progress(0, 0, "ready", "completed"),
        "epoch_loop.automatic_optimization.state_dict": {},
        "epoch_loop.automatic_optimization.optim_progress": {
            "optimizer": {
                "step": _progress(steps_in_epoch, step, "ready", "completed"),
                "zero_grad": _progress(steps_in_epoch, step, "ready", "started", "completed"),
            }
        },
        "epoch_loop.manual_optimization.state_dict": {},
        "epoch_loop.manual_optimization.optim_step_progress": _progress(steps_in_epoch, step, "ready", "completed"),
        "epoch_loop.val_loop.state_dict": {},
        "epoch_loop.val_loop.batch_progress": {**_counts(0, 0), "is_last_batch": is_validated and not is_in_epoch},
        "epoch_progress": {"total": dict(epochs), "current": dict(epochs)},
    }
    idle = {"state_dict": {}, "batch_progress": {**_counts(0, 0), "is_last_batch": False}}
    loops = {"fit_loop": fit_loop, **{name: dict(idle) for name in ("validate_loop", "test_loop", "predict_loop")}}
    loops["predict_loop"] = {"state_dict": {}, "batch_progress": _counts(0, 0)}
    return {"global_step": step, "loops": loops}


def shown_epoch(progress: Mapping[str, Any]) -> int:
    """Return ``trainer.current_epoch`` at the save point of a fit that saved ``progress``."""
    epoch: int = progress.get("epoch", 0)
    return epoch - 1 if epoch and not progress.get("batch_idx") else epoch


def _counts(current: int, total: int) -> dict[str, Any]:
    return _progress(current, total, "ready", "started", "processed", "completed")


def _progress(current: int, total: int, *names: str) -> dict[str, Any]:
    return {"total": dict.fromkeys(names, total), "current": dict.fromkeys(names, current)}
