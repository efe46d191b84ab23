"""Export of a checkpoint to a file for Lightning's ``load_from_checkpoint`` and ``Trainer.fit(ckpt_path=...)``."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from roomier import checkpoint
from roomier.checkpoint.export.output_file import for_torch, new_file, replacing_file
from roomier.checkpoint.export.plain import weights_of
from roomier.checkpoint.lightning import DATA_HYPERPARAMETERS, DATA_HYPERPARAMETERS_NAME
from roomier.checkpoint.run_state import peek_run
from roomier.checkpoint.shown import OWN_ENTRIES, lightning_entries
from roomier.core.log import notice
from roomier.techniques.adapters.layers import is_adapter

_CHECKPOINTS = "ModelCheckpoint"


def export_lightning(path: str | Path, output: str | Path) -> Path:
    """Write the checkpoint ``path`` to the file ``output``, atomically.

    The file contains weights, hyperparameters and progress. If the module configured its optimizers, the file also
    contains the states of optimizers, schedulers, loss scale and callbacks. During the export, the full content is in
    host memory.

    The following states are omitted. If Lightning cannot resume training from the file, a notice explains why.

    - states of an optimizer that the Trainer created, because Lightning does not support it
    - optimizer states of adapters, because the adapters are merged into the weights
    - the list of checkpoints that ModelCheckpoint saved as folders, because Lightning cannot read folders
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
    content = lightning_content(path, described)
    if _can_resume(path, described):
        content.update(_training_state(path))
    with replacing_file(target) as aside, for_torch(aside) as file:
        torch.save(content, file)
    return target


def lightning_content(path: str | Path, described: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a Lightning checkpoint for the checkpoint ``path``, without the states of optimizers and
    callbacks.

    Args:
        path: checkpoint folder.
        described: result of :func:`roomier.checkpoint.run_state.peek_run` for ``path``.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    # ``epoch``, and the entries that ``on_save_checkpoint`` hooks added
    names = [key for key in described if key not in OWN_ENTRIES and key != "stale_norm"]
    others = checkpoint.load(path, only=names) if names else {}
    content = {**lightning_entries(described), **others, "state_dict": weights_of(path)}
    init = described.get("datamodule_init")
    if init is not None:
        content[DATA_HYPERPARAMETERS_NAME] = init.get("argument", "kwargs")
        content[DATA_HYPERPARAMETERS] = dict(init["hyperparameters"])
        if described.get("datamodule"):
            content[init["type"]] = checkpoint.load(path, only=("datamodule",))["datamodule"]
    return content


def _can_resume(path: str | Path, described: Mapping[str, Any]) -> bool:
    """Return True if Lightning can resume from the training states. Otherwise, print a notice."""
    why = None
    if "optimizers" not in described:
        why = "the checkpoint was saved with weights only"
    elif any(map(is_adapter, described["module"])):
        why = "the optimizer trains adapters, which were merged into the weights"
    elif described["plan"]["optimizer"]["name"] is not None:
        why = f"the optimizer {described['plan']['optimizer']['name']!r} was created by the Trainer"
    else:
        names = [each["type"] for each in described["optimizers"]]
        kinds = [name for name in names if "roomier" in name.lower()]
        why = f"the optimizer {kinds[0]} is part of roomier" if kinds else None
    if why is None:
        return True
    notice(f"{path}: {why}, so Lightning can load the exported weights but cannot resume training from them")
    return False


def _training_state(path: str | Path) -> dict[str, Any]:
    state = checkpoint.load(path, only=("optimizers", "schedulers", "scaler", "callbacks"))
    callbacks = {key: each for key, each in state["callbacks"].items() if each and not key.startswith(_CHECKPOINTS)}
    for key, each in state["callbacks"].items():
        if key.startswith(_CHECKPOINTS) and each["kept"] and each.get("suffix"):
            callbacks[key] = _state_of_files(each, is_max="'mode': 'max'" in key)
    content: dict[str, Any] = {
        "optimizer_states": [_by_number(each) for each in state["optimizers"]],
        "lr_schedulers": [each["state"] for each in state["schedulers"]],
        "callbacks": callbacks,
    }
    if state["scaler"] is not None:
        content["MixedPrecision"] = {key: each for key, each in state["scaler"].items() if key != "num_skipped"}
    return content


def _state_of_files(saved: Mapping[str, Any], *, is_max: bool) -> dict[str, Any]:
    """Convert the state of a ModelCheckpoint that saved files instead of folders to Lightning's format."""
    path_of = partial(os.path.join, saved["dirpath"] or "")
    scores = {path_of(name): torch.tensor(score) for name, score in saved["kept"] if score is not None}
    ordered = sorted(scores, key=lambda path: float(scores[path]), reverse=is_max)
    best = ordered[0] if ordered else path_of(saved["kept"][-1][0])
    current = saved["current_score"]
    return {
        "monitor": saved["monitor"],
        "dirpath": saved["dirpath"],
        "best_model_path": best,
        "best_model_score": scores.get(best),
        "best_k_models": scores,
        "kth_best_model_path": ordered[-1] if ordered else "",
        "kth_value": scores[ordered[-1]] if ordered else torch.tensor(-math.inf if is_max else math.inf),
        "last_model_path": path_of(f"last{saved['suffix']}") if saved["last"] else "",
        "current_score": None if current is None else torch.tensor(current),
    }


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
