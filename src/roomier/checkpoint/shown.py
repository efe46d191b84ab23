"""State of a run under the names of the entries of Lightning's checkpoints, for files and for the
``on_save_checkpoint`` and ``on_load_checkpoint`` hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from torch import Tensor

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


_SAME = {"state_dict": "module", "hyper_parameters": "hyperparameters"}
_READ: Mapping[str, tuple[tuple[str, ...], Callable[[Mapping[str, Any]], Any]]] = {
    "epoch": (("progress",), lambda state: shown_epoch(state["progress"])),
    "global_step": (("progress",), lambda state: state["progress"]["global_step"]),
    "optimizer_states": (("optimizers",), lambda state: list(state["optimizers"])),
    "lr_schedulers": (("schedulers",), lambda state: [each["state"] for each in state["schedulers"]]),
    "loops": (("progress",), lambda state: loop_states(state["progress"], is_validated=True)["loops"]),
    "hparams_name": (("hyperparameters",), lambda state: state.get("hyperparameters_argument", "kwargs")),
    "datamodule_hyper_parameters": (("datamodule_init",), lambda state: state["datamodule_init"]["hyperparameters"]),
    VERSION: (("module",), lambda _: WRITTEN_FOR),
}
"""Mapping from each computed entry of Lightning's checkpoints to the entries that it requires and the function that
computes it.
"""
OWN_ENTRIES = frozenset(
    {
        *("module", "optimizers", "scaler", "schedulers", "progress", "plan", "pretrained", "hyperparameters"),
        *("hyperparameters_argument", "random", "data", "datamodule", "datamodule_init"),
        *("results", "metrics", "callbacks", "seeding"),
    }
)
"""Top-level entries that roomier writes, except ``epoch``, which user hooks may replace. All other entries come from
user hooks."""


class ShownCheckpoint(dict[str, Any]):
    """State whose entries can also be read and replaced under the names of Lightning's checkpoints.

    ``state_dict`` is an alias of ``module``, the weights by name, and ``hyper_parameters`` is an alias of
    ``hyperparameters``. ``global_step``, ``optimizer_states``, ``lr_schedulers``, ``loops``, ``hparams_name``,
    ``datamodule_hyper_parameters`` and ``pytorch-lightning_version`` can be read, as can ``epoch`` of checkpoints that
    do not store it.
    """

    def __missing__(self, name: str) -> Any:
        if name in _SAME and _SAME[name] in self:
            return self[_SAME[name]]
        if name in _READ and all(super(ShownCheckpoint, self).__contains__(own) for own in _READ[name][0]):
            return _READ[name][1](self)
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        own = _SAME.get(name, name) if isinstance(name, str) else name
        if name in _READ:
            return super().__contains__(name) or all(map(super().__contains__, _READ[name][0]))  # type: ignore[index]
        return super().__contains__(name) or super().__contains__(own)

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(_SAME.get(name, name), value)

    def pop(self, name: str, *default: Any) -> Any:
        """Remove and return the entry ``name`` or its alias."""
        return super().pop(_SAME.get(name, name), *default)

    # These methods call the methods above, unlike those of dict.
    get = MutableMapping.get  # type: ignore[assignment]
    setdefault = MutableMapping.setdefault
    update = MutableMapping.update


def without_objects(state: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return ``state`` without the objects that hooks added, and the paths of these objects.

    Lightning pickles the entries that a module adds to its checkpoint. roomier skips values that are neither tensors
    nor plain Python data, so the checkpoints of modules written for Lightning can be saved. If a list or tuple contains
    such a value, the complete list or tuple is skipped.

    Returns:
        The state, and the paths of the skipped values, such as ``'["entry"]["key"]'``.
    """
    left_out: list[str] = []
    kept: dict[str, Any] = {}
    for name, value in state.items():
        is_of_hook = name not in OWN_ENTRIES or name == "hyperparameters"
        data = _data_of(value, f'["{name}"]', left_out) if is_of_hook else value
        if data is not _NOT_DATA:
            kept[name] = data
    return kept, left_out


_NOT_DATA = object()


def _data_of(value: Any, place: str, left_out: list[str]) -> Any:
    if isinstance(value, Tensor) or value is None or type(value) in (str, bool, int, float):
        return value
    if isinstance(value, Mapping):
        found = {key: _data_of(each, f"{place}[{key!r}]", left_out) for key, each in value.items()}
        return {key: each for key, each in found.items() if each is not _NOT_DATA}
    if type(value) in (list, tuple):
        inner: list[str] = []
        items = [_data_of(each, place, inner) for each in value]
        if not inner:
            return type(value)(items)
    left_out.append(place)
    return _NOT_DATA
