"""Handling of Lightning's callbacks, which run unchanged, are replaced by roomier's callbacks, or are rejected.

A callback that uses only hooks and public attributes of the Trainer runs unchanged. A callback that uses the internals
of Lightning's loops is replaced by roomier's callback of the same name with the same arguments; the results of
ModelCheckpoint and LearningRateMonitor are also available on the user's object. ``docs/design/callbacks.md`` lists the
replaced and the rejected callbacks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from roomier import callbacks
from roomier.api.callback import Callback
from roomier.api.overrides import added_names, builtin_class
from roomier.callbacks import ModelCheckpoint
from roomier.callbacks.checkpoint_ledger import Ledger
from roomier.core.errors import RoomierError
from roomier.core.forms import anything, fields, mapping_of
from roomier.core.log import notice

if TYPE_CHECKING:
    from roomier.api.module import Module
    from roomier.api.trainer_view import TrainerView

AS_THEY_ARE = ("EarlyStopping", "LambdaCallback", "Timer")

_SHOWN = (
    *("best_model_path", "best_model_score", "best_k_models", "kth_best_model_path", "last_model_path"),
    *("current_score", "dirpath"),
)
REFUSED = {
    "BatchSizeFinder": "Use Trainer(auto_scale_batch_size=True)",
    "LearningRateFinder": "Use Trainer(auto_lr_find=True)",
    "ModelPruning": "Call torch.nn.utils.prune in on_fit_start of a callback, before the weights are sharded",
    "ThroughputMonitor": "Use roomier.callbacks.Throughput()",
    "SpikeDetection": "Use roomier.callbacks.SpikeGuard()",
}


class _MirroredCheckpoint(ModelCheckpoint):
    """ModelCheckpoint that copies its results to Lightning's object.

    The callback equals Lightning's object and has its class, so ``isinstance`` and ``in`` find the user's object in
    ``trainer.callbacks``. Other attributes are read from Lightning's object.
    """

    def __init__(self, seen_as: Any, **arguments: Any) -> None:
        self.seen_as = seen_as
        super().__init__(**arguments)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(vars(self).get("seen_as", self))

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.seen_as

    def __hash__(self) -> int:
        return hash(self.seen_as)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "seen_as":
            raise AttributeError(name)
        return getattr(self.seen_as, name)

    def on_fit_start(self, trainer: TrainerView, pl_module: Module) -> None:
        super().on_fit_start(trainer, pl_module)
        self._show()

    def _committed(self, trainer: TrainerView, books: Ledger) -> None:
        super()._committed(trainer, books)
        self._show()

    def _show(self) -> None:
        for name in _SHOWN:
            setattr(self.seen_as, name, getattr(self, name))
        worst = torch.tensor(math.inf if self.mode == "min" else -math.inf)
        self.seen_as.kth_value = worst if self.kth_value is None else self.kth_value


_MirroredCheckpoint.__qualname__ = ModelCheckpoint.__qualname__  # both classes store their state under this name
_MirroredCheckpoint.__name__ = ModelCheckpoint.__name__  # and messages contain this name


class _Finetuning(callbacks.BaseFinetuning):
    """BaseFinetuning callback that calls the methods of Lightning's object."""

    def __init__(self, given: Any) -> None:
        super().__init__()
        self._given = given
        self.freeze_before_training = given.freeze_before_training  # type: ignore[method-assign]
        self.finetune_function = given.finetune_function  # type: ignore[method-assign]

    @property
    def state_key(self) -> str:
        return str(self._given.state_key)

    def setup(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        strategy = trainer.plan.parallel.strategy
        if strategy not in ("single", "ddp"):
            action = "Derive the class from roomier.callbacks.BaseFinetuning, whose methods have the same names"
            problem = f"does not support sharded parameters (strategy={strategy!r})"
            raise RoomierError("callbacks", type(self._given).__name__, problem, action)
        super().setup(trainer, pl_module, stage)

    def state_dict(self) -> dict[str, Any]:
        own = {name: value for name, value in self._given.state_dict().items() if name != _GROUPS}
        return {**super().state_dict(), "own": own}

    def check_stored_state(self, state: Any, place: str) -> None:
        super().check_stored_state(state, place)
        fields({"own": mapping_of(anything)}, others=anything)(state, place)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # the parameter groups have already been restored
        self._given.load_state_dict({_GROUPS: {}, **state_dict["own"]})


_GROUPS = "internal_optimizer_metadata"


def adopted(given: Iterable[Any]) -> list[Any]:
    """Return ``given`` with roomier's callbacks in place of Lightning callbacks that cannot run unchanged. A notice
    reports each replacement.

    Raises:
        RoomierError: roomier has no corresponding callback, or a method that a subclass adds would not be called.
    """
    return [_adopted(each) for each in given]


def _adopted(callback: Any) -> Any:
    builtin = builtin_class(callback)
    if builtin is None or builtin.__name__ in AS_THEY_ARE:
        return callback
    name = builtin.__name__
    if name in REFUSED:
        problem = f"is not supported, because Lightning's {name} uses the internals of Lightning's loops"
        raise RoomierError("callbacks", type(callback).__name__, problem, REFUSED[name])
    make = MADE.get(name)
    if make is None:
        action = "Use a roomier callback (see help(roomier.callbacks)), or implement its hooks in a callback"
        problem = f"is not supported, because roomier has no equivalent of Lightning's {name}"
        raise RoomierError("callbacks", type(callback).__name__, problem, action)
    left = [each for each in added_names(callback, builtin) if each not in _MAY_ADD.get(name, ())]
    if left and name not in _DRAWS:
        problem = f"runs as roomier's {name}, which would not call its methods {', '.join(left)}"
        action = f"Derive it from roomier.callbacks.{name}, or implement these methods in a separate callback"
        raise RoomierError("callbacks", type(callback).__name__, problem, action)
    own = make(callback)
    unheard = f"; its methods {', '.join(left)} are not called" if left else ""
    remark = _REMARK if name == "ModelCheckpoint" else ""
    notice(f"callbacks: Lightning's {type(callback).__name__} runs as roomier.callbacks.{_name(own)}{remark}{unheard}")
    return own


_REMARK = "; its checkpoints are folders, for ckpt_path= and roomier.checkpoint.load_module(cls, path)"


def _name(own: Any) -> str:
    return next(cls.__qualname__ for cls in type(own).__mro__ if cls.__qualname__ in callbacks.__all__)


def _checkpoint(given: Any) -> ModelCheckpoint:
    names = {"CHECKPOINT_NAME_LAST": "last", "CHECKPOINT_JOIN_CHAR": "-", "CHECKPOINT_EQUALS_CHAR": "="}
    for name, default in names.items():
        if getattr(given, name, default) != default:
            action = "Set the names of checkpoints with filename; the newest is linked as 'last'"
            raise RoomierError(f"ModelCheckpoint.{name}", getattr(given, name), "is not supported", action)
    own = _MirroredCheckpoint(
        given,
        dirpath=None if given.dirpath is None else Path(given.dirpath),
        format=getattr(given, "format", "folder"),
        save_on_exception=getattr(given, "save_on_exception", False),
        **_attributes(given, "filename monitor verbose save_last save_top_k save_weights_only mode"),
        **_attributes(given, "auto_insert_metric_name"),
        **_attributes(given, "every_n_train_steps train_time_interval every_n_epochs", prefix="_"),
        **_attributes(given, "save_on_train_epoch_end enable_version_counter", prefix="_"),
    )
    own.FILE_EXTENSION = given.FILE_EXTENSION
    return own


def _attributes(given: Any, names: str, prefix: str = "") -> dict[str, Any]:
    """Return the arguments ``names``, which ``given`` stores as attributes whose names start with ``prefix``."""
    return {name: getattr(given, f"{prefix}{name}") for name in names.split()}


def _lr_monitor(given: Any) -> callbacks.LearningRateMonitor:
    own = callbacks.LearningRateMonitor(given.logging_interval, given.log_momentum, given.log_weight_decay)
    own.lrs = given.lrs  # both callbacks share one dict
    return own


def _weight_averaging(given: Any) -> callbacks.WeightAveraging:
    own = callbacks.WeightAveraging(given._device, given._use_buffers, **given._kwargs)
    own.should_update = given.should_update  # type: ignore[method-assign]  # method of the user's class
    return own


def _backbone_finetuning(given: Any) -> callbacks.BaseFinetuning:
    is_derived: bool = type(given) is not builtin_class(given)
    if is_derived:
        return _Finetuning(given)
    names = "unfreeze_backbone_at_epoch lambda_func backbone_initial_ratio_lr backbone_initial_lr should_align"
    return callbacks.BackboneFinetuning(**_attributes(given, f"{names} initial_denom_lr train_bn verbose rounding"))


def _stochastic_weight_averaging(given: Any) -> Callback:
    names = "swa_lrs swa_epoch_start annealing_epochs annealing_strategy device"
    own_fn = None if given._avg_fn is type(given).avg_fn else given._avg_fn
    return callbacks.StochasticWeightAveraging(**_attributes(given, names, prefix="_"), avg_fn=own_fn)


def _progress_bar(given: Any) -> callbacks.ProgressBar:
    own = callbacks.ProgressBar()
    builtin = builtin_class(given)
    if builtin is not None and "get_metrics" in added_names(given, builtin):
        own.get_metrics = given.get_metrics  # type: ignore[method-assign]  # method of the user's class
    return own


_PROGRESS_BARS = ("ProgressBar", "TQDMProgressBar", "RichProgressBar")

MADE: dict[str, Callable[[Any], Any]] = {
    "ModelCheckpoint": _checkpoint,
    "LearningRateMonitor": _lr_monitor,
    "ModelSummary": lambda given: callbacks.ModelSummary(max_depth=given._max_depth),
    "RichModelSummary": lambda given: callbacks.RichModelSummary(max_depth=given._max_depth),
    **dict.fromkeys(_PROGRESS_BARS, _progress_bar),
    **dict.fromkeys(("WeightAveraging", "EMAWeightAveraging"), _weight_averaging),
    "StochasticWeightAveraging": _stochastic_weight_averaging,
    "GradientAccumulationScheduler": lambda given: callbacks.GradientAccumulationScheduler(dict(given.scheduling)),
    "BaseFinetuning": _Finetuning,
    "BackboneFinetuning": _backbone_finetuning,
    "DeviceStatsMonitor": lambda given: callbacks.DeviceStatsMonitor(given._cpu_stats),
    "OnExceptionCheckpoint": lambda given: callbacks.OnExceptionCheckpoint(given.dirpath, given.filename),
}
_MAY_ADD = {
    **dict.fromkeys(_PROGRESS_BARS, ("get_metrics",)),
    **dict.fromkeys(("WeightAveraging", "EMAWeightAveraging"), ("should_update",)),
    **dict.fromkeys(("BaseFinetuning", "BackboneFinetuning"), ("freeze_before_training", "finetune_function")),
}
_DRAWS = ("ModelSummary", "RichModelSummary", "ProgressBar", "TQDMProgressBar", "RichProgressBar")
"""Callbacks that only print. Methods that a subclass adds are reported in a notice, but not called."""
