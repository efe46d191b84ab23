"""Create a module from the hyperparameters and weights in a checkpoint, or a DataModule from its hyperparameters and
state.
"""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import yaml
from torch import nn

from roomier.api.blocks import find_blocks
from roomier.api.hparams import with_attributes
from roomier.api.module import Module, network_of
from roomier.api.overrides import is_one, overrides
from roomier.checkpoint.commit import at_home
from roomier.checkpoint.lightning import LightningFile, is_lightning_file
from roomier.checkpoint.run_state import peek_run
from roomier.checkpoint.shown import OWN_ENTRIES, ShownCheckpoint
from roomier.checkpoint.verbs import load
from roomier.core.errors import CheckpointError, RoomierError
from roomier.core.log import notice
from roomier.core.paths import check_path
from roomier.core.tree import map_tensors
from roomier.core.untrusted import read_regular
from roomier.plan.parts import AdapterPlan
from roomier.plan.yaml_dialect import Loader
from roomier.techniques.adapters.lora import apply_lora, quantise_base

_MAX_HYPERPARAMETERS_BYTES = 2**24

AnyNetwork = TypeVar("AnyNetwork", bound=nn.Module)
T = TypeVar("T")


def load_module(
    cls: type[AnyNetwork],
    path: str | Path,
    map_location: str | torch.device | None = None,
    *,
    hparams_file: str | Path | None = None,
    strict: bool | None = None,
    **init_arguments: Any,
) -> AnyNetwork:
    """Create a module of class ``cls`` from the hyperparameters in a checkpoint and load its weights.

    :meth:`roomier.Module.load_from_checkpoint` calls this function. Call this function directly for a LightningModule,
    whose method ``load_from_checkpoint`` supports Lightning's files only.

    Args:
        cls: subclass of ``roomier.Module`` or LightningModule, or any other ``nn.Module`` that was trained.
        path: checkpoint folder, or ``.ckpt`` file of Lightning.
        map_location: device of the module. None leaves the module on the device on which ``__init__`` creates it,
            usually the CPU.
        hparams_file: YAML file of hyperparameters, which replace the stored hyperparameters. If the file does not
            exist, a notice is printed, and the stored hyperparameters are used.
        strict: if True, require that the names of the weights match; by default the module's ``strict_loading``.
        init_arguments: arguments of ``__init__`` that replace or complete the stored hyperparameters.

    Raises:
        RoomierError: ``map_location`` is not a device of this machine, or ``hparams_file`` cannot be read.
        CheckpointError: the checkpoint is damaged, ``cls`` cannot be constructed from the stored hyperparameters, or
            the names or shapes of its weights differ (with ``strict=False``, only the shapes).

    Example:
        >>> module = load_module(MyLightningModule, "runs/version_0/checkpoints/last")
    """
    device = None if map_location is None else _device(map_location)
    file = LightningFile(path) if is_lightning_file(path) else None
    described = peek_run(path) if file is None else file.described
    described["hyperparameters"] = _hyperparameters(hparams_file, described.get("hyperparameters", {}))
    module = make_module(cls, path, described, init_arguments)
    strict = bool(getattr(module, "strict_loading", True)) if strict is None else strict
    if file is None:
        add_adapters(module, described.get("plan"))
    if file is not None or (is_one(module, Module) and overrides(module, "on_load_checkpoint", Module)):
        _load_changed(module, path, described, file, strict=strict)
    elif strict:
        # Filled in place. Values from get_extra_state are set after the tensors are filled.
        places = {"module": module.state_dict()}
        found = load(path, into=places, only=("module",), empty=("module",))["module"]
        _load_weights(module, found, path, strict=True)
    else:
        _load_weights(module, load(path, only=("module",))["module"], path)
    return module if device is None else module.to(device)


def make_module(
    cls: type[AnyNetwork], path: str | Path, described: Mapping[str, Any], init_arguments: Mapping[str, Any]
) -> AnyNetwork:
    """Create a module of class ``cls`` with the stored hyperparameters, without loading weights.

    Args:
        cls: any subclass of ``nn.Module``.
        path: path of the checkpoint, for the error message.
        described: result of :func:`roomier.checkpoint.peek` for ``path``.
        init_arguments: arguments that replace or complete the stored hyperparameters.

    Raises:
        CheckpointError: ``cls`` cannot be constructed from these arguments.
    """
    argument = described.get("hyperparameters_argument")
    module = _constructed(cls, path, described.get("hyperparameters", {}), argument, init_arguments)
    configure_model = getattr(module, "configure_model", None)  # a method of a Module or of a LightningModule
    if callable(configure_model):
        configure_model()
    return module


def load_datamodule(
    cls: type[T],
    path: str | Path,
    map_location: str | torch.device | None = None,
    *,
    hparams_file: str | Path | None = None,
    **init_arguments: Any,
) -> T:
    """Create a DataModule of class ``cls`` from the hyperparameters in a checkpoint and restore its state.

    :meth:`roomier.DataModule.load_from_checkpoint` calls this function.

    Args:
        cls: subclass of ``roomier.DataModule`` or LightningDataModule.
        path: checkpoint folder, or ``.ckpt`` file of Lightning.
        map_location: device of the tensors in the state; None leaves them on the CPU.
        hparams_file: YAML file of hyperparameters, which replace the stored hyperparameters.
        init_arguments: arguments of ``__init__`` that replace or complete the stored hyperparameters.

    Raises:
        RoomierError: ``map_location`` is not a device of this machine, or ``hparams_file`` cannot be read.
        CheckpointError: the checkpoint is damaged, or ``cls`` cannot be constructed from the stored hyperparameters.
    """
    device = torch.device("cpu") if map_location is None else _device(map_location)
    if is_lightning_file(path):
        file = LightningFile(path)
        stored, state = file.described_datamodule, file.content.get(cls.__qualname__)
    else:
        described = peek_run(path)
        stored = described.get("datamodule_init", {})
        state = load(path, only=("datamodule",))["datamodule"] if "datamodule" in described else None
    found = _hyperparameters(hparams_file, stored.get("hyperparameters", {}))
    datamodule = _constructed(cls, path, found, stored.get("argument"), init_arguments)
    if state:
        cast(Any, datamodule).load_state_dict(map_tensors(lambda tensor: tensor.to(device), state))
    return datamodule


class _HyperparametersLoader(Loader):
    """Loader that also reads tuples as Lightning's loggers write them."""

    def construct_tuple(self, node: yaml.SequenceNode) -> tuple[Any, ...]:
        return tuple(self.construct_sequence(node, deep=True))


_HyperparametersLoader.add_constructor("tag:yaml.org,2002:python/tuple", _HyperparametersLoader.construct_tuple)


def _hyperparameters(hparams_file: str | Path | None, stored: dict[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters in ``hparams_file``, or ``stored`` if there is no such file."""
    if hparams_file is None:
        return stored
    check_path("hparams_file", hparams_file)
    if not at_home(hparams_file).exists():  # a run without hyperparameters has no such file
        notice(f"hparams_file={str(hparams_file)!r} does not exist: using the hyperparameters in the checkpoint")
        return stored
    try:
        text = read_regular(at_home(hparams_file), _MAX_HYPERPARAMETERS_BYTES).decode()
        found = yaml.load(text, Loader=_HyperparametersLoader)
        if not isinstance(found, dict):
            raise ValueError("it does not contain a mapping")
    except (OSError, ValueError, yaml.YAMLError) as error:
        problem = f"cannot be read ({' '.join(str(error).split())})"
        raise RoomierError("hparams_file", str(hparams_file), problem, "Pass a YAML file, such as lr: 0.1") from error
    return found


def _constructed(
    cls: type[T], path: str | Path, stored: Mapping[str, Any], argument: str | None, init_arguments: Mapping[str, Any]
) -> T:
    stored = with_attributes(stored)
    if argument in inspect.signature(cls).parameters:  # __init__ accepts all hyperparameters in one argument
        stored = {str(argument): stored}
    arguments = {**_accepted_by(cls, stored), **init_arguments}
    try:
        return cls(**arguments)
    except TypeError as error:
        problem = f"{cls.__name__} cannot be constructed from the stored hyperparameters {sorted(arguments)} ({error})"
        action = "Pass the missing arguments to load_from_checkpoint and call save_hyperparameters in __init__"
        raise CheckpointError("checkpoint_path", str(path), problem, action) from error


def _load_changed(
    module: Any, path: str | Path, described: Mapping[str, Any], file: LightningFile | None, *, strict: bool
) -> None:
    """Call ``on_load_checkpoint`` with the entries of hooks and of the model, which the hook can rename. Then load the
    weights."""
    shown: dict[str, Any]
    if file is not None:
        shown = file.content
    else:
        only = described.keys() - (OWN_ENTRIES - {"module", "hyperparameters", "progress"})
        shown = ShownCheckpoint(load(path, only=only))
    if hasattr(module, "on_load_checkpoint"):
        module.on_load_checkpoint(shown)
    _load_weights(module, shown["state_dict"], path, strict=strict)


def add_adapters(module: nn.Module, plan: Mapping[str, Any] | None) -> None:
    """Add the adapters of the saved run and quantize its frozen weights, so that the module has the stored tensors."""
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
    # Torch raises an AssertionError if it was built without CUDA.
    except (TypeError, RuntimeError, AssertionError) as error:
        problem = "is not a device of this machine"
        raise RoomierError("map_location", map_location, problem, "Pass 'cpu', 'cuda', 'cuda:1' or 'mps'") from error
    return device


def _accepted_by(cls: type, stored: Mapping[str, Any]) -> dict[str, Any]:
    # The stored hyperparameters of a subclass can include arguments of its parent class that the __init__ of the
    # subclass does not accept.
    parameters = inspect.signature(cls).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(stored)
    return {name: value for name, value in stored.items() if name in parameters}


def _load_weights(module: nn.Module, found: Mapping[str, Any], path: str | Path, *, strict: bool = False) -> None:
    try:
        module.load_state_dict(found, strict=strict)
    except RuntimeError as error:
        problem = f"has weights that do not match {type(module).__name__} ({' '.join(str(error).split())})"
        action = "Create the module as in the saved run. strict=False ignores missing and unexpected weights"
        raise CheckpointError("checkpoint_path", str(path), problem, action) from error
