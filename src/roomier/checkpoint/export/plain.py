"""Load the plain model from a checkpoint of any strategy and any number of ranks, with or without adapters."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from roomier import checkpoint
from roomier.api.module import Module
from roomier.api.overrides import lightning_base
from roomier.checkpoint.export.merged import MergedTensors
from roomier.checkpoint.lightning import LightningFile, is_lightning_file
from roomier.checkpoint.module import make_module
from roomier.checkpoint.run_state import peek_run
from roomier.core.errors import CheckpointError
from roomier.core.hugging_face import data_of_config
from roomier.plan.parts import AdapterPlan
from roomier.techniques.adapters.layers import is_adapter


def plain_model(path: str | Path, cls: type[nn.Module], arguments: Mapping[str, Any] | None = None) -> nn.Module:
    """Create an instance of ``cls`` with the weights of the checkpoint ``path``, in evaluation mode, on the CPU.

    Args:
        path: checkpoint folder, or a Lightning ``.ckpt`` file.
        cls: class of the model.
        arguments: arguments of ``cls``, which replace stored hyperparameters.

    Raises:
        CheckpointError: the checkpoint is damaged, ``cls`` cannot be created from the stored hyperparameters, or the
            weights do not match the model.
    """
    file = LightningFile(path) if is_lightning_file(path) else None
    described = peek_run(path) if file is None else file.described
    model = make_module(cls, path, described, {**_configuration(cls, described), **(arguments or {})})
    fill(model, path, file)
    return model.eval()


def _configuration(cls: type[nn.Module], described: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dict with the ``config`` argument of ``cls`` if the trained module is a transformers model and ``cls``
    accepts this argument; otherwise, an empty dict."""
    found, made_by = described.get("pretrained"), getattr(cls, "config_class", None)
    if not found or found["prefix"] or made_by is None or "config" not in inspect.signature(cls).parameters:
        return {}
    return {"config": made_by.from_dict(data_of_config(found["config"]))}


def fill(model: nn.Module, path: str | Path, file: LightningFile | None = None) -> None:
    """Load the weights of ``path`` into ``model``.

    Raises:
        CheckpointError: the checkpoint is damaged or belongs to a different model.
    """
    weights = weights_of(path) if file is None else _of_lightning(model, file)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        problem = f"does not match the weights of {type(model).__name__} ({' '.join(str(error).split())[:300]})"
        action = "Pass the trained class and its arguments with --model and --model.NAME VALUE"
        raise CheckpointError("checkpoint", str(path), problem, action) from error


def weights_of(path: str | Path) -> dict[str, Any]:
    """Return the weights of the plain model in the checkpoint folder ``path``, with adapters merged into them."""
    described = peek_run(path)
    if not any(map(is_adapter, described["module"])):
        found: dict[str, Any] = checkpoint.load(path, only=("module",))["module"]
        return found
    stored = MergedTensors(path, "module", AdapterPlan(**described.get("plan", {}).get("adapter", {})))
    return {key: stored.whole(key) for key in stored.specs}


def _of_lightning(model: nn.Module, file: LightningFile) -> dict[str, Any]:
    if isinstance(model, Module) or lightning_base(type(model), Module) is not None:
        model.on_load_checkpoint(file.content)  # type: ignore[operator]  # may rename entries
    return file.state_dict
