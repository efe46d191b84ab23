"""A module back from a checkpoint: its hyperparameters, then its weights."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from roomier.adapters.lora import apply_lora, quantise_base
from roomier.api.blocks import find_blocks
from roomier.api.hparams import HyperParameters
from roomier.api.module import Module
from roomier.api.overrides import is_one, overrides
from roomier.api.wrapped import network_of
from roomier.checkpoint.lightning import LightningFile, is_lightning_file
from roomier.checkpoint.run_state import peek_run
from roomier.checkpoint.shown import OWN_ENTRIES, ShownCheckpoint
from roomier.checkpoint.verbs import load
from roomier.core.errors import CheckpointError, RoomierError
from roomier.plan.parts import AdapterPlan

AnyNetwork = TypeVar("AnyNetwork", bound=nn.Module)


def load_module(
    cls: type[AnyNetwork],
    path: str | Path,
    map_location: str | torch.device | None = None,
    *,
    strict: bool | None = None,
    **init_arguments: Any,
) -> AnyNetwork:
    """A module of ``cls`` as the checkpoint ``path`` has it: made from its stored hyperparameters, with its weights.

    Behind :meth:`roomier.Module.load_from_checkpoint`; and by itself for a LightningModule, whose method of that name
    reads Lightning's files alone: ``load_module(MyLightningModule, "runs/version_0/checkpoints/last")``.

    Args:
        cls: a subclass of ``roomier.Module``, of LightningModule, or any other ``nn.Module`` that was trained.
        path: a checkpoint folder, or a ``.ckpt`` of Lightning.
        map_location: the device to put it on; None leaves it where ``__init__`` makes it, on the CPU as a rule.
        strict: the names of the weights must agree; by default as ``strict_loading`` of the module says.
        init_arguments: arguments of ``__init__`` that take the place of stored ones, or were not stored.

    Raises:
        RoomierError: ``map_location`` is no device that is here.
        CheckpointError: damaged; ``cls`` cannot be made from what is stored; or its weights have other names
            or shapes (with ``strict=False``, other shapes only).
    """
    device = None if map_location is None else _device(map_location)
    file = LightningFile(path) if is_lightning_file(path) else None
    described = peek_run(path) if file is None else file.described
    module = make_module(cls, path, described, init_arguments)
    strict = bool(getattr(module, "strict_loading", True)) if strict is None else strict
    if file is not None:
        _load_lightning(module, file, strict=strict)
        return module if device is None else module.to(device)
    _put_adapters(module, described.get("plan"))
    if is_one(module, Module) and overrides(module, "on_load_checkpoint", Module):
        _load_changed(module, path, described, strict=strict)
        return module if device is None else module.to(device)
    if strict:
        # Filled in place; what a module keeps beside its tensors (get_extra_state) is set behind that.
        places = {"module": module.state_dict()}
        found = load(path, into=places, only=("module",), empty=("module",))["module"]
        _load_weights(module, found, path, strict=True)
    else:
        _load_weights(module, load(path, only=("module",))["module"], path)
    return module if device is None else module.to(device)


def make_module(
    cls: type[AnyNetwork], path: str | Path, described: Mapping[str, Any], init_arguments: Mapping[str, Any]
) -> AnyNetwork:
    """A module of ``cls``, any ``nn.Module``, with the stored hyperparameters, and none of the stored weights.

    Args:
        described: what :func:`roomier.checkpoint.peek` gives of the checkpoint ``path``.
        init_arguments: take the place of stored ones.

    Raises:
        CheckpointError: it cannot be made of these arguments.
    """
    stored = described.get("hyperparameters", {})
    argument = described.get("hyperparameters_argument")
    if argument in inspect.signature(cls).parameters:  # they were passed in one
        stored = {argument: HyperParameters(stored)}
    arguments = {**_taken_by(cls, stored), **init_arguments}
    try:
        module = cls(**arguments)
    except TypeError as error:
        raise CheckpointError(
            "checkpoint_path",
            str(path),
            f"{cls.__name__} cannot be made from the stored hyperparameters {sorted(arguments)} ({error})",
            "Pass the missing arguments to load_from_checkpoint, and call save_hyperparameters in __init__",
        ) from error
    configure_model = getattr(module, "configure_model", None)  # of a Module, or of a LightningModule
    if callable(configure_model):
        configure_model()
    return module


def _load_changed(module: Any, path: str | Path, described: Mapping[str, Any], *, strict: bool) -> None:
    """With what ``on_load_checkpoint`` makes of the checkpoint; of roomier's own entries it gets those of a model."""
    only = described.keys() - (OWN_ENTRIES - {"module", "hyperparameters", "progress"})
    shown = ShownCheckpoint(load(path, only=only))
    module.on_load_checkpoint(shown)
    differing = sorted(shown["module"].keys() ^ module.state_dict().keys())
    if strict and differing:
        problem = f"belongs to another model than {type(module).__name__}: one of the two alone has {differing[:5]}"
        raise CheckpointError("checkpoint_path", str(path), problem, "Give the class that was saved, or strict=False")
    _load_weights(module, shown["module"], path)


def _load_lightning(module: Any, file: LightningFile, *, strict: bool) -> None:
    if hasattr(module, "on_load_checkpoint"):
        module.on_load_checkpoint(file.content)  # as in Lightning: it may change the names
    if strict and file.state_dict.keys() != module.state_dict().keys():
        differing = sorted(file.state_dict.keys() ^ module.state_dict().keys())
        problem = f"belongs to another model than {type(module).__name__}: it alone, or this alone, has {differing[:5]}"
        raise CheckpointError("checkpoint_path", str(file.path), problem, "Give the class that was saved")
    _load_weights(module, file.state_dict, file.path)


def _put_adapters(module: nn.Module, plan: Mapping[str, Any] | None) -> None:
    """The adapters of the run that was saved, and its frozen weights in few bits: the checkpoint has their tensors."""
    adapter = AdapterPlan(**(plan or {}).get("adapter", {}))
    if adapter.lora_rank is None:
        return
    network = network_of(module) if isinstance(module, Module) else module
    apply_lora(network, find_blocks(network), adapter)
    if adapter.frozen_base != "as_is":
        quantise_base(network, adapter)


def _device(map_location: str | torch.device) -> torch.device:
    try:
        device = torch.device(map_location)
        torch.empty(0, device=device)
    except (TypeError, RuntimeError, AssertionError) as error:  # the last from a torch built without CUDA
        problem = "is no device of this machine"
        raise RoomierError("map_location", map_location, problem, "Pass 'cpu', 'cuda', 'cuda:1' or 'mps'") from error
    return device


def _taken_by(cls: type, stored: Mapping[str, Any]) -> dict[str, Any]:
    # A subclass that fixes arguments of its parent has the parent's among the stored ones, but does not take them.
    parameters = inspect.signature(cls).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(stored)
    return {name: value for name, value in stored.items() if name in parameters}


def _load_weights(module: nn.Module, found: Mapping[str, Any], path: str | Path, *, strict: bool = False) -> None:
    try:
        module.load_state_dict(found, strict=strict)
    except RuntimeError as error:
        raise CheckpointError(
            "checkpoint_path",
            str(path),
            f"its weights do not fit {type(module).__name__} ({' '.join(str(error).split())})",
            "Make the module with the arguments it was saved with",
        ) from error
