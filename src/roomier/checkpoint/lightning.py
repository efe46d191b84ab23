"""Reader for Lightning's checkpoints, which are single ``.ckpt`` files. Reading such a file never executes code from
the file.
"""

from __future__ import annotations

import pickle
import tempfile
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roomier.checkpoint.commit import at_home
from roomier.checkpoint.harmless_types import as_plain, harmless_types, unresolved_in
from roomier.core.errors import CheckpointError, first_few
from roomier.core.forms import Form, FormError, anything, count, fields, finite, flag, list_of, mapping_of, optional
from roomier.core.untrusted import open_regular
from roomier.storage.remote_path import RemotePath
from roomier.storage.sending import fetch

VERSION = "pytorch-lightning_version"
HYPERPARAMETERS, HYPERPARAMETERS_NAME = "hyper_parameters", "hparams_name"
DATA_HYPERPARAMETERS, DATA_HYPERPARAMETERS_NAME = "datamodule_hyper_parameters", "datamodule_hparams_name"
_CONTAINER_TYPES = ("hparams_type", "datamodule_hparams_type")
SCALERS = ("MixedPrecision", "MixedPrecisionPlugin", "NativeMixedPrecisionPlugin", "native_amp_scaling_state")
SUFFIX = ".ckpt"
_GROUP_KEYS_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}
_NUM_NAMES_SHOWN = 5
_PICKLE = b"\x80"
_MAX_PICKLE_BYTES = 2**26


def _parameter(value: Any, place: str) -> None:
    """Accept the index or the name of a parameter. Files that were converted from a sharded checkpoint contain
    names.
    """
    if not isinstance(value, (int, str)) or isinstance(value, bool):
        raise FormError(place, value, "an integer or a name")


_STATE = mapping_of(anything, keys=anything)
_GROUPS = list_of(fields({"params": list_of(_parameter)}, others=anything))
_FACTORS = {"scale": finite, "growth_factor": finite, "backoff_factor": finite}
FORMS_OF_SCALER: Mapping[str, Form] = {**_FACTORS, "growth_interval": count, "_growth_tracker": count}
_FORMS: Mapping[str, Form] = {
    HYPERPARAMETERS: optional(_STATE),
    DATA_HYPERPARAMETERS: optional(_STATE),
    "global_step": count,
    "optimizer_states": list_of(
        fields({"state": mapping_of(_STATE, keys=anything), "param_groups": _GROUPS}, others=anything)
    ),
    "lr_schedulers": list_of(optional(_STATE)),
    "callbacks": _STATE,
    **dict.fromkeys(SCALERS, optional(fields(FORMS_OF_SCALER))),
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
    """Return True if ``path`` is a ``.ckpt`` file, or another file in the zip format of ``torch.save``."""
    path = at_home(path)
    return path.is_file() and (path.suffix == SUFFIX or zipfile.is_zipfile(path))


def was_written_for_lightning(path: Path) -> bool:
    """Return True if the file ``path`` contains the version of Lightning. The content is not unpickled."""
    try:
        with open_regular(path) as data, zipfile.ZipFile(data) as file:
            found = [each for each in file.infolist() if each.filename.endswith("/data.pkl")]
            return any(VERSION.encode() in file.read(each) for each in found if each.file_size <= _MAX_PICKLE_BYTES)
    except Exception:  # the file can contain arbitrary bytes, so any error is possible
        return False


@dataclass(frozen=True)
class LoopPosition:
    """Position of Lightning's loops.

    Attributes:
        epoch: number of finished epochs.
        batch_idx: number of batches of the current epoch that each rank has processed.
        num_batches: number of batches that were processed in all epochs.
        global_step: number of optimizer steps.
        is_last_batch: True if Lightning marked the last processed batch as the last batch of its epoch.
    """

    epoch: int
    batch_idx: int
    num_batches: int
    global_step: int
    is_last_batch: bool


class LightningFile:
    """Content of a Lightning checkpoint file. Tensors remain in the file until they are read.

    Args:
        path: path of the file.

    Attributes:
        path: path of the file.
        content: the content of the file, with tensors on the CPU and plain values.

    Raises:
        CheckpointError: the file is damaged, is not a Lightning checkpoint, or contains objects of classes that are not
            known to be harmless. Such objects are never created.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = at_home(path)
        with _local_copy(self.path) as local:
            self.content: dict[str, Any] = _read(self.path, local)

    @property
    def state_dict(self) -> dict[str, Any]:
        """Mapping from names to weights."""
        found: dict[str, Any] = self.content["state_dict"]
        return found

    @property
    def version(self) -> str:
        """Version of Lightning that wrote the file."""
        return str(self.content.get(VERSION, "unknown"))

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """Mapping from names to hyperparameters.

        Raises:
            CheckpointError: a value is an unresolved OmegaConf interpolation, or is missing.
        """
        return self._resolved(HYPERPARAMETERS)

    def _resolved(self, entry: str) -> dict[str, Any]:
        found: dict[str, Any] = dict(self.content.get(entry) or {})
        if unresolved := unresolved_in(found):
            shown = ", ".join(unresolved[:_NUM_NAMES_SHOWN])
            action = (
                "Create the module and load only the weights with fit(weights=...), or call OmegaConf.resolve(cfg) "
                "before save_hyperparameters. fit(ckpt_path=...) can resume from this file unchanged"
            )
            raise self.error(f"has unresolved or missing hyperparameters: {shown}", action)
        return found

    @property
    def described(self) -> dict[str, Any]:
        """Entries from which :func:`roomier.checkpoint.module.make_module` creates a module."""
        argument = self._argument(HYPERPARAMETERS_NAME, "hyperparameters_argument")
        return {"hyperparameters": self.hyperparameters, **argument}

    @property
    def described_datamodule(self) -> dict[str, Any]:
        """Hyperparameters of the DataModule, and the name of the single argument that contained all of them, if such an
        argument exists.
        """
        argument = self._argument(DATA_HYPERPARAMETERS_NAME, "argument")
        return {"hyperparameters": self._resolved(DATA_HYPERPARAMETERS), **argument}

    def _argument(self, entry: str, key: str) -> dict[str, str]:
        # "kwargs" means separate arguments. Any other value is the name of the single argument that contains all
        # hyperparameters.
        name = self.content.get(entry)
        return {} if name in (None, "kwargs") else {key: str(name)}

    @property
    def scaler(self) -> dict[str, Any] | None:
        """State of the loss scale; None if the file contains none."""
        return next((dict(self.content[name]) for name in SCALERS if self.content.get(name)), None)

    def position(self) -> LoopPosition:
        """Return the position from which a run resumes.

        Raises:
            CheckpointError: the file contains only weights, or was written by Lightning 1.x.
        """
        lacking = [name for name in ("optimizer_states", "lr_schedulers", "callbacks") if name not in self.content]
        if lacking:
            problem = f"has no {', '.join(lacking)}, because Lightning saved only the weights"
            raise self.error(problem, "Start a new fit with its weights: fit(..., weights=...)")
        try:
            fields({"global_step": count, "loops": fields({"fit_loop": _FIT_LOOP}, others=anything)}, others=anything)(
                self.content, "the checkpoint"
            )
        except FormError as error:
            problem = (
                f"was written by Lightning {self.version}, but the states of its loops do not have the form of version "
                f"2: {error}"
            )
            action = "Start a new fit with its weights: fit(..., weights=...)"
            raise self.error(problem, action) from error
        loops = self.content["loops"]["fit_loop"]
        epochs, batches = loops["epoch_progress"]["current"], loops["epoch_loop.batch_progress"]
        is_over = epochs["processed"] >= epochs["ready"]
        return LoopPosition(
            epoch=epochs["processed"],
            batch_idx=0 if is_over else batches["current"]["processed"],
            num_batches=batches["total"]["processed"],
            global_step=self.content["global_step"],
            is_last_batch=not is_over and batches["is_last_batch"],
        )

    def optimizers(self, optimizers: Sequence[Optimizer], names: Mapping[nn.Parameter, str]) -> list[dict[str, Any]]:
        """Return the states of ``optimizers`` in the form of roomier's checkpoints.

        Args:
            optimizers: optimizers of this run.
            names: name of each parameter.

        Raises:
            CheckpointError: the states belong to different optimizers.
        """
        stored = self.content["optimizer_states"]
        if len(stored) != len(optimizers):
            problem = f"has the states of {len(stored)} optimizers, but this run has {len(optimizers)}"
            raise self.error(problem, "Configure the optimizers as in the saved run")
        return [self._named(saved, each, names) for saved, each in zip(stored, optimizers, strict=True)]

    def check_schedulers(self, schedulers: Sequence[Any]) -> None:
        """Check that the scheduler states belong to ``schedulers``, and replace missing states with empty states.

        Raises:
            CheckpointError: the states belong to different schedulers.
        """
        stored = self.content["lr_schedulers"] = [each or {} for each in self.content["lr_schedulers"]]
        own = [each.state_dict() or {} for each in schedulers]
        differing = [
            type(each).__name__
            for each, mine, saved in zip(schedulers, own, stored, strict=False)
            if not _plain_keys(saved) >= _plain_keys(mine) - {"_is_initial", "_get_lr_called_within_step"}
        ]
        if len(stored) != len(own) or differing:
            now = [type(each).__name__ for each in schedulers]
            problem = (
                f"has the states of {len(stored)} schedulers, which do not match the schedulers of this run: {now}"
            )
            action = "Configure the schedulers as in the saved run, or load only the weights with fit(weights=...)"
            raise self.error(problem, action)

    def error(self, problem: str, action: str) -> CheckpointError:
        """Return an error about this file."""
        return CheckpointError("checkpoint", str(self.path), problem, action)

    def _named(
        self, saved: Mapping[str, Any], optimizer: Optimizer, names: Mapping[nn.Parameter, str]
    ) -> dict[str, Any]:
        kind = type(optimizer).__name__
        action = "Build the optimizer as in the saved run, or load only the weights with fit(weights=...)"
        groups, then = optimizer.param_groups, saved["param_groups"]
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in then]:
            problem = f"its parameter groups do not match the parameter groups of {kind}"
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
            raise self.error(f"has states of {kind} for parameters that are not in its parameter groups", action)
        state = {name_of[index]: dict(each) for index, each in saved["state"].items()}
        for name, each in state.items():
            average = each.get("exp_avg", each.get("momentum_buffer"))
            if isinstance(average, Tensor) and tuple(average.shape) != shape_of[name]:
                problem = (
                    f"its optimizer state for {name!r} has shape {tuple(average.shape)}, but the parameter has shape "
                    f"{shape_of[name]}"
                )
                raise self.error(problem, action)
        return {"type": kind, "state": state, "param_groups": named_groups}

    def _check_options(self, kind: str, own: Mapping[str, Any], then: Mapping[str, Any], action: str) -> None:
        # The file does not contain the class of the optimizer, so the names of the optimizer options are compared.
        unknown = then.keys() - own.keys() - _GROUP_KEYS_OF_SCHEDULERS
        decays = "decoupled_weight_decay"
        is_other_adam = decays in then and then[decays] is not own.get(decays, then[decays])  # both are flags
        if unknown or is_other_adam:
            found = f"options {sorted(unknown)[:_NUM_NAMES_SHOWN]}" if unknown else f"{decays}={then[decays]}"
            raise self.error(f"has the states of an optimizer other than {kind}, with {found}", action)


def books_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the state of Lightning's ModelCheckpoint to the state of roomier's ModelCheckpoint.

    Checkpoints that Lightning wrote remain in the ranking. roomier deletes their files only if it writes ``.ckpt``
    files to the same folder.
    """
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


@contextmanager
def _local_copy(path: Path) -> Iterator[Path]:
    """Yield ``path``, or a copy if it is remote. Tensors that are mapped into memory remain valid after the block."""
    if not isinstance(path, RemotePath):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="roomier-") as folder:
        fetch(path, Path(folder, path.name))
        yield Path(folder, path.name)


def _read(path: Path, local: Path) -> dict[str, Any]:
    again = (
        "Pass a checkpoint folder, or a .ckpt file that Lightning saved. If Lightning saved this file, copy the file "
        "again"
    )
    try:
        with open_regular(local) as file:
            first_byte = file.read(1)
            is_zip = zipfile.is_zipfile(file)  # torch before 1.6 wrote other files, which cannot be memory-mapped
        if not is_zip and first_byte != _PICKLE:
            raise ValueError("the file was not written by torch, or is truncated")
        with harmless_types(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected pickle protocol", category=UserWarning)
            content = torch.load(local, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        raise _refused(path, error) from error
    except Exception as error:  # the file can contain arbitrary bytes, so any error is possible
        problem = f"cannot be read ({' '.join(str(error).split())[:200] or type(error).__name__})"
        raise CheckpointError("checkpoint", str(path), problem, again) from error
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        problem = "is not a Lightning checkpoint, because it has no 'state_dict'"
        action = "Pass a Lightning .ckpt file, a roomier checkpoint folder, or .safetensors files"
        raise CheckpointError("checkpoint", str(path), problem, action)
    for name in _CONTAINER_TYPES:
        content.pop(name, None)  # this entry is the class of the container, which is not used
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


def _refused(path: Path, error: Exception) -> CheckpointError:
    try:
        with harmless_types():
            found = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except (RuntimeError, ValueError):
        found = []
    if not found:
        problem = f"cannot be loaded without executing code ({' '.join(str(error).split())[:160]})"
    else:
        problem = f"contains objects of {first_few(found)}, and loading them would execute code"
    action = (
        "If you trust the source of this file, remove the objects in an environment that contains their packages: "
        "c = torch.load(path, weights_only=False); c['hyper_parameters'] = {}; torch.save(c, 'plain.ckpt'). Then pass "
        "plain.ckpt. To avoid this step, exclude such hyperparameters with save_hyperparameters(ignore=[...])"
    )
    return CheckpointError("checkpoint", str(path), problem, action)


def _plain_keys(state: Mapping[str, Any]) -> set[str]:
    return {key for key, value in state.items() if not callable(value)}
