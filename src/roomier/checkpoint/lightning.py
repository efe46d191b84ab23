"""Checkpoints that Lightning wrote: one file ``x.ckpt`` with everything in it. No code runs when one is read."""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roomier.checkpoint.commit import at_home
from roomier.checkpoint.harmless_types import as_plain, harmless_types, unresolved_in
from roomier.core.errors import CheckpointError
from roomier.core.forms import Form, FormError, anything, count, fields, finite, flag, list_of, mapping_of, optional

VERSION = "pytorch-lightning_version"
HYPERPARAMETERS, HYPERPARAMETERS_NAME = "hyper_parameters", "hparams_name"
_HYPERPARAMETERS_TYPE = "hparams_type"
SCALERS = ("MixedPrecision", "MixedPrecisionPlugin", "NativeMixedPrecisionPlugin", "native_amp_scaling_state")
SUFFIX = ".ckpt"
_GROUP_KEYS_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}
_NUM_NAMES_SHOWN = 5
_PICKLE = b"\x80"


def _parameter(value: Any, place: str) -> None:
    """Accept the index of a parameter, or its name, which files converted from a sharded checkpoint contain."""
    if not isinstance(value, (int, str)) or isinstance(value, bool):
        raise FormError(place, value, "an integer or a name")


_STATE = mapping_of(anything, keys=anything)
_GROUPS = list_of(fields({"params": list_of(_parameter)}, others=anything))
_SCALER = {"scale": finite, "growth_factor": finite, "backoff_factor": finite}
_FORMS: Mapping[str, Form] = {
    HYPERPARAMETERS: optional(_STATE),
    "global_step": count,
    "optimizer_states": list_of(
        fields({"state": mapping_of(_STATE, keys=anything), "param_groups": _GROUPS}, others=anything)
    ),
    "lr_schedulers": list_of(_STATE),
    "callbacks": _STATE,
    **dict.fromkeys(SCALERS, optional(fields({**_SCALER, "growth_interval": count, "_growth_tracker": count}))),
}
_EPOCHS = fields({"processed": count, "ready": count}, others=anything)
_BATCHES = fields({"processed": count}, others=anything)
_FIT_LOOP = fields(
    {
        "epoch_progress": fields({"current": _EPOCHS}, others=anything),
        "epoch_loop.batch_progress": fields(
            {"current": _BATCHES, "total": _BATCHES, "is_last_batch": flag}, others=anything
        ),
    },
    others=anything,
)


def is_lightning_file(path: str | Path) -> bool:
    """Whether ``path`` is a file as ``torch.save`` writes it, as Lightning's checkpoints are; roomier's are folders."""
    path = at_home(path)
    return path.is_file() and (path.suffix == SUFFIX or zipfile.is_zipfile(path))


@dataclass(frozen=True)
class Position:
    """Where Lightning's loops stood.

    Args:
        epoch: epochs finished. batch_idx: batches of the running one that are done, on each rank.
        num_batches: batches done in all. global_step: optimizer steps done.
        is_last_batch: Lightning knew the last of them for the last of its epoch.
    """

    epoch: int
    batch_idx: int
    num_batches: int
    global_step: int
    is_last_batch: bool


class LightningFile:
    """The content of the checkpoint ``path``; tensors stay in the file until they are read.

    Raises:
        CheckpointError: it is damaged, is no checkpoint of Lightning, or holds objects of classes that are not known to
            be harmless. None of them was made.

    Attributes:
        content: all of it: tensors on the CPU, plain values.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = at_home(path)
        self.content: dict[str, Any] = _read(self.path)

    @property
    def state_dict(self) -> dict[str, Any]:
        """The weights by name."""
        found: dict[str, Any] = self.content["state_dict"]
        return found

    @property
    def version(self) -> str:
        """Of the Lightning that wrote it."""
        return str(self.content.get(VERSION, "unknown"))

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """By name.

        Raises:
            CheckpointError: values among them are worked out by OmegaConf, which is not asked.
        """
        found: dict[str, Any] = dict(self.content.get(HYPERPARAMETERS) or {})
        if unresolved := unresolved_in(found):
            shown = ", ".join(unresolved[:_NUM_NAMES_SHOWN])
            action = (
                "Make the module yourself, and give it the weights: fit(weights=...); or call OmegaConf.resolve(cfg) "
                "before save_hyperparameters. A run goes on from this file as it is: fit(ckpt_path=...)"
            )
            raise self.error(f"its hyperparameters refer to others, or are missing: {shown}", action)
        return found

    @property
    def described(self) -> dict[str, Any]:
        """What :func:`roomier.checkpoint.module.make_module` makes a module of."""
        name = self.content.get(HYPERPARAMETERS_NAME)
        # "kwargs" stands for arguments by name, anything else is the one argument that all of them came in.
        argument = {} if name in (None, "kwargs") else {"hyperparameters_argument": str(name)}
        return {"hyperparameters": self.hyperparameters, **argument}

    @property
    def scaler(self) -> dict[str, Any] | None:
        """The state of the loss scale, if there was one."""
        return next((dict(self.content[name]) for name in SCALERS if self.content.get(name)), None)

    def position(self) -> Position:
        """Where a run goes on.

        Raises:
            CheckpointError: only weights were saved, or by a Lightning older than 2.0.
        """
        lacking = [name for name in ("optimizer_states", "lr_schedulers", "callbacks") if name not in self.content]
        if lacking:
            problem = f"holds no {', '.join(lacking)}: Lightning saved it with weights only"
            raise self.error(problem, "Begin a new fit with its weights: fit(..., weights=...)")
        try:
            fields({"global_step": count, "loops": fields({"fit_loop": _FIT_LOOP}, others=anything)}, others=anything)(
                self.content, "the checkpoint"
            )
        except FormError as error:
            problem = f"was written by Lightning {self.version}, but its loops do not have the form of 2.x: {error}"
            action = "Begin a new fit with its weights: fit(..., weights=...)"
            raise self.error(problem, action) from error
        loops = self.content["loops"]["fit_loop"]
        epochs, batches = loops["epoch_progress"]["current"], loops["epoch_loop.batch_progress"]
        is_over = epochs["processed"] >= epochs["ready"]
        return Position(
            epoch=epochs["processed"],
            batch_idx=0 if is_over else batches["current"]["processed"],
            num_batches=batches["total"]["processed"],
            global_step=self.content["global_step"],
            is_last_batch=not is_over and batches["is_last_batch"],
        )

    def optimizers(self, optimizers: Sequence[Optimizer], names: Mapping[nn.Parameter, str]) -> list[dict[str, Any]]:
        """The states for ``optimizers`` as roomier's own checkpoints have them, by the names of parameters.

        Raises:
            CheckpointError: they are states of other optimizers.
        """
        stored = self.content["optimizer_states"]
        if len(stored) != len(optimizers):
            problem = f"has the states of {len(stored)} optimizers, this run has {len(optimizers)}"
            raise self.error(problem, "Configure the optimizers as in the run that was saved")
        return [self._named(saved, each, names) for saved, each in zip(stored, optimizers, strict=True)]

    def check_schedulers(self, schedulers: Sequence[Any]) -> None:
        """Whether its states are of ``schedulers``.

        Raises:
            CheckpointError: they are of others.
        """
        stored = self.content["lr_schedulers"]
        own = [each.state_dict() for each in schedulers]
        differing = [
            type(each).__name__
            for each, mine, saved in zip(schedulers, own, stored, strict=False)
            if not _plain_keys(saved) >= _plain_keys(mine) - {"_is_initial", "_get_lr_called_within_step"}
        ]
        if len(stored) != len(own) or differing:
            now = [type(each).__name__ for each in schedulers]
            problem = f"has the states of {len(stored)} schedulers, which are not those of this run: {now}"
            action = "Configure the schedulers as in the run that was saved, or load the weights alone"
            raise self.error(problem, action)

    def error(self, problem: str, action: str) -> CheckpointError:
        return CheckpointError("checkpoint", str(self.path), problem, action)

    def _named(
        self, saved: Mapping[str, Any], optimizer: Optimizer, names: Mapping[nn.Parameter, str]
    ) -> dict[str, Any]:
        kind = type(optimizer).__name__
        action = "Build the optimizer as in the run that was saved, or begin with the weights alone: fit(weights=...)"
        groups, then = optimizer.param_groups, saved["param_groups"]
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in then]:
            problem = f"the parameter groups of {kind} are not those it holds states for"
            raise self.error(problem, action)
        named_groups, name_of = [], dict[Any, str]()
        shape_of: dict[str, tuple[int, ...]] = {}
        for group, group_then in zip(groups, then, strict=True):
            self._check_options(kind, group, group_then, action)
            own = [names.get(parameter, f"<parameter of {kind} outside the module>") for parameter in group["params"]]
            name_of.update(zip(group_then["params"], own, strict=True))
            shape_of.update(zip(own, (tuple(each.shape) for each in group["params"]), strict=True))
            kept = {key: value for key, value in group.items() if key != "params" and key not in group_then}
            named_groups.append({**kept, **group_then, "params": own})
        if not saved["state"].keys() <= name_of.keys():
            raise self.error(f"has states of {kind} for parameters that are in none of its groups", action)
        state = {name_of[index]: dict(each) for index, each in saved["state"].items()}
        for name, each in state.items():
            average = each.get("exp_avg", each.get("momentum_buffer"))
            if isinstance(average, Tensor) and tuple(average.shape) != shape_of[name]:
                problem = f"its state of {name!r} has the shape {tuple(average.shape)}, and that has {shape_of[name]}"
                raise self.error(problem, action)
        return {"type": kind, "state": state, "param_groups": named_groups}

    def _check_options(self, kind: str, own: Mapping[str, Any], then: Mapping[str, Any], action: str) -> None:
        # The file does not name the optimizer's class; what it is set by tells it.
        unknown = then.keys() - own.keys() - _GROUP_KEYS_OF_SCHEDULERS
        decays = "decoupled_weight_decay"
        is_other_adam = decays in then and then[decays] is not own.get(decays, then[decays])  # both are flags
        if unknown or is_other_adam:
            found = f"is set by {sorted(unknown)[:_NUM_NAMES_SHOWN]}" if unknown else f"has {decays}={then[decays]}"
            raise self.error(f"holds the states of another optimizer than {kind}: it {found}", action)


def books_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a ModelCheckpoint of Lightning as one of roomier's: what it keeps, and the scores. The files stay
    in the ranking and are never removed."""
    best = {str(path): float(score) for path, score in (state.get("best_k_models") or {}).items()}
    unranked = [str(state["best_model_path"])] if state.get("best_model_path") and not state.get("monitor") else []
    score = state.get("current_score")
    return {
        "monitor": state.get("monitor"),
        "dirpath": None,
        "kept": [*([path, each] for path, each in best.items()), *([path, None] for path in unranked)],
        "last": str(state.get("last_model_path") or ""),
        "superseded": [],
        "current_score": None if score is None else float(score),
        "step": -1,
        "due_step": -1,
        "foreign_names": None,
    }


def _read(path: Path) -> dict[str, Any]:
    again = "Give the path of a checkpoint folder, or of a .ckpt that Lightning saved; copy it again if it was one"
    try:
        is_zip = zipfile.is_zipfile(path)  # what torch wrote before 1.6 is none, and cannot be read in parts
        if not is_zip and _first_byte(path) != _PICKLE:
            raise ValueError("torch did not write it, or its end is missing")
        with harmless_types(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected pickle protocol", category=UserWarning)
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        raise _refused(path, error) from error
    except Exception as error:  # the reader meets bytes of any kind
        problem = f"cannot be read ({' '.join(str(error).split())[:200] or type(error).__name__})"
        raise CheckpointError("checkpoint", str(path), problem, again) from error
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        action = "Give a .ckpt file of Lightning, a checkpoint folder of roomier, or .safetensors files"
        raise CheckpointError("checkpoint", str(path), "is no checkpoint of Lightning: no 'state_dict' in it", action)
    content.pop(_HYPERPARAMETERS_TYPE, None)  # a class: that of their container
    try:
        plain = {key: value if key == "state_dict" else as_plain(value) for key, value in content.items()}
    except (ValueError, RecursionError) as error:
        raise _refused(path, error) from error
    try:
        for name in _FORMS.keys() & plain.keys():
            _FORMS[name](plain[name], name)
    except FormError as error:
        raise CheckpointError("checkpoint", str(path), f"is malformed: {error}", again) from error
    return plain


def _first_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(1)


def _refused(path: Path, error: Exception) -> CheckpointError:
    try:
        with harmless_types():
            found = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except (RuntimeError, ValueError):
        found = []
    if not found:
        problem = f"cannot be read without running code from it ({' '.join(str(error).split())[:160]})"
    else:
        more = f" and {len(found) - _NUM_NAMES_SHOWN} more" if len(found) > _NUM_NAMES_SHOWN else ""
        problem = f"holds objects of {', '.join(found[:_NUM_NAMES_SHOWN])}{more}: making them would run their code"
    action = (
        "If you trust who wrote it, take them out once where their package is installed: c = torch.load(path, "
        "weights_only=False); c['hyper_parameters'] = {}; torch.save(c, 'plain.ckpt'); and pass plain.ckpt. "
        "Hyperparameters of plain values need no such step: save_hyperparameters(ignore=[...]) leaves the others out"
    )
    return CheckpointError("checkpoint", str(path), problem, action)


def _plain_keys(state: Mapping[str, Any]) -> set[str]:
    return {key for key, value in state.items() if not callable(value)}
