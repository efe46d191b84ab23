"""A checkpoint as the one file that Lightning reads: ``load_from_checkpoint``, and ``Trainer.fit(ckpt_path=...)``."""

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
"""The version of Lightning whose form is written."""
_CHECKPOINTS = "ModelCheckpoint"


def export_lightning(path: str | Path, output: str | Path) -> Path:
    """Write the checkpoint ``path`` as the file ``output``, whole or not at all.

    It holds the weights, hyperparameters and progress; and the states of optimizers, schedulers, the loss scale and
    callbacks, where the module configured its own optimizers. It is in memory once, on the host.

    Left out, and said so: states of an optimizer that the Trainer named (Lightning has no such keyword), those of
    adapters (the weights are written with them added), which checkpoints ModelCheckpoint keeps (these are folders that
    Lightning would not read), random states, and the position in the data within an epoch.

    Raises:
        RoomierError: ``output`` is there already.
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
    if _can_go_on(path, described):
        content.update(_training_state(path))
    with replacing_file(target) as aside:
        try:
            torch.save(content, aside)
        except RuntimeError as error:  # torch's writer has no other
            problem = f"cannot be written ({' '.join(str(error).split())})"
            raise CheckpointError("output", str(target), problem, "Free space, or name a file elsewhere") from error
    return target


def _can_go_on(path: str | Path, described: Mapping[str, Any]) -> bool:
    """Whether the states of training mean something to Lightning."""
    why = None
    if "optimizers" not in described:
        why = "the checkpoint was saved with weights only"
    elif any(map(is_adapter, described["module"])):
        why = "its optimizer trains adapters, which were added to the weights"
    elif described["plan"]["optimizer"]["name"] is not None:
        why = f"its optimizer is {described['plan']['optimizer']['name']!r}, which the Trainer named"
    else:
        names = [each["type"] for each in described["optimizers"]]
        kinds = [name for name in names if "roomier" in name.lower()]
        why = f"its optimizer is roomier's {kinds[0]}" if kinds else None
    if why is None:
        return True
    notice(f"{path}: {why}, so Lightning can load the weights of this file, and not go on with its training")
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
    """An optimizer's state as torch has it: its parameters are numbered in the order of the groups."""
    names = [name for group in saved["param_groups"] for name in group["params"]]
    number_of = {name: number for number, name in enumerate(names)}
    return {
        "state": {number_of[name]: each for name, each in saved["state"].items()},
        "param_groups": [
            {**group, "params": [number_of[name] for name in group["params"]]} for group in saved["param_groups"]
        ],
    }


def _others(path: str | Path, described: Mapping[str, Any]) -> dict[str, Any]:
    """What ``on_save_checkpoint`` hooks added."""
    names = [key for key in described if key not in OWN_ENTRIES and key != "stale_norm"]
    return checkpoint.load(path, only=names) if names else {}


def _validates(described: Mapping[str, Any]) -> bool:
    return not described.get("progress", {}).get("is_validation_due", False)


def _place(progress: Mapping[str, Any], is_validated: bool) -> dict[str, Any]:
    """Where Lightning's loops stand: behind an epoch, as when it saves after a fit, or behind a batch."""
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
