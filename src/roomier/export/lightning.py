"""Exports a checkpoint to a file for Lightning's ``load_from_checkpoint`` and ``Trainer.fit(ckpt_path=...)``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from roomier import checkpoint
from roomier.adapters.layers import is_adapter
from roomier.checkpoint.lightning import HYPERPARAMETERS, HYPERPARAMETERS_NAME, VERSION
from roomier.checkpoint.run_state import peek_run
from roomier.checkpoint.shown import OWN_ENTRIES
from roomier.core.errors import CheckpointError
from roomier.core.log import notice
from roomier.export.output_file import new_file, replacing_file
from roomier.export.plain import weights_of

WRITTEN_FOR = "2.6.0"
"""Version of Lightning whose format is written."""
_CHECKPOINTS = "ModelCheckpoint"


def export_lightning(path: str | Path, output: str | Path) -> Path:
    """Write the checkpoint ``path`` to the file ``output``, atomically.

    The file contains weights, hyperparameters and progress. If the module configured its optimizers, the file also
    contains the states of optimizers, schedulers, loss scale and callbacks. The full content is in CPU memory during
    the export.

    The following states are omitted, and a notice explains why:

    - states of an optimizer that the Trainer created, which Lightning does not support
    - states of adapters, which are merged into the weights
    - the list of checkpoints of ModelCheckpoint, which are folders that Lightning cannot read
    - random states, and the position in the data within an epoch

    Args:
        path: checkpoint folder.
        output: new file.

    Returns:
        The absolute path of the file.

    Raises:
        RoomierError: ``output`` already exists.
        CheckpointError: the checkpoint is damaged, or the disk is full.
    """
    target = new_file(output)
    described = peek_run(path)
    content: dict[str, Any] = {
        **_others(path, described),
        **_place(described.get("progress", {}), _validates(described)),
        VERSION: WRITTEN_FOR,
        "state_dict": weights_of(path),
        HYPERPARAMETERS_NAME: described.get("hyperparameters_argument", "kwargs"),
        HYPERPARAMETERS: dict(described.get("hyperparameters", {})),
    }
    if _can_resume(path, described):
        content.update(_training_state(path))
    with replacing_file(target) as aside:
        try:
            torch.save(content, aside)
        except RuntimeError as error:  # the only error of torch's writer
            problem = f"cannot be written ({' '.join(str(error).split())})"
            raise CheckpointError("output", str(target), problem, "Free some space, or use another folder") from error
    return target


def _can_resume(path: str | Path, described: Mapping[str, Any]) -> bool:
    """Return True if Lightning can use the training states. Otherwise, print a notice."""
    why = None
    if "optimizers" not in described:
        why = "the checkpoint was saved with weights only"
    elif any(map(is_adapter, described["module"])):
        why = "its optimizer trains adapters, which were merged into the weights"
    elif described["plan"]["optimizer"]["name"] is not None:
        why = f"its optimizer {described['plan']['optimizer']['name']!r} was created by the Trainer"
    else:
        names = [each["type"] for each in described["optimizers"]]
        kinds = [name for name in names if "roomier" in name.lower()]
        why = f"its optimizer {kinds[0]} is part of roomier" if kinds else None
    if why is None:
        return True
    notice(f"{path}: {why}, so Lightning can load the weights of this file but cannot resume its training")
    return False


def _training_state(path: str | Path) -> dict[str, Any]:
    state = checkpoint.load(path, only=("optimizers", "schedulers", "scaler", "callbacks"))
    callbacks = {key: each for key, each in state["callbacks"].items() if each and not key.startswith(_CHECKPOINTS)}
    content: dict[str, Any] = {
        "optimizer_states": [_by_number(each) for each in state["optimizers"]],
        "lr_schedulers": [each["state"] for each in state["schedulers"]],
        "callbacks": callbacks,
    }
    if state["scaler"] is not None:
        content["MixedPrecision"] = {key: each for key, each in state["scaler"].items() if key != "num_skipped"}
    return content


def _by_number(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state in torch's format, with parameters numbered in the order of the groups."""
    names = [name for group in saved["param_groups"] for name in group["params"]]
    number_of = {name: number for number, name in enumerate(names)}
    return {
        "state": {number_of[name]: each for name, each in saved["state"].items()},
        "param_groups": [
            {**group, "params": [number_of[name] for name in group["params"]]} for group in saved["param_groups"]
        ],
    }


def _others(path: str | Path, described: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that ``on_save_checkpoint`` hooks added."""
    names = [key for key in described if key not in OWN_ENTRIES and key != "stale_norm"]
    return checkpoint.load(path, only=names) if names else {}


def _validates(described: Mapping[str, Any]) -> bool:
    return not described.get("progress", {}).get("is_validation_due", False)


def _place(progress: Mapping[str, Any], is_validated: bool) -> dict[str, Any]:
    """Return the state of Lightning's loops at the end of an epoch, as after a fit, or after a batch within an
    epoch."""
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
    return {"epoch": epoch, "global_step": step, "loops": loops}


def _counts(current: int, total: int) -> dict[str, Any]:
    return _progress(current, total, "ready", "started", "processed", "completed")


def _progress(current: int, total: int, *names: str) -> dict[str, Any]:
    return {"total": dict.fromkeys(names, total), "current": dict.fromkeys(names, current)}
