"""Views of a Trainer with the names of Lightning's loops, precision plugin and accelerator."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from roomier.core.device.resolve import resolve_device
from roomier.techniques.precision.policy import Precision, precision_of

if TYPE_CHECKING:
    from roomier.api.trainer_view import TrainerView


@dataclass(frozen=True)
class Counts:
    """Numbers of started and completed items."""

    ready: int
    completed: int

    @property
    def started(self) -> int:
        """Same as ``ready``."""
        return self.ready

    @property
    def processed(self) -> int:
        """Same as ``completed``."""
        return self.completed


@dataclass(frozen=True)
class ProgressView:
    """Counts of the current epoch and of the run."""

    current: Counts
    total: Counts


class EpochLoop:
    """View of the training epoch: the value of ``trainer.fit_loop.epoch_loop``."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @property
    def global_step(self) -> int:
        """Number of optimizer steps."""
        return int(self._trainer.global_step)

    @property
    def batch_idx(self) -> int:
        """Index of the current batch in its epoch."""
        return self.batch_progress.current.ready - 1

    @property
    def total_batch_idx(self) -> int:
        """Index of the current batch in the run."""
        return self.batch_progress.total.ready - 1

    @property
    def batch_progress(self) -> ProgressView:
        """Counts of batches."""
        run = self._trainer.fitted
        if run is None:
            return ProgressView(Counts(0, 0), Counts(0, 0))
        done, before = run.progress.batch_idx, run.progress.num_batches - run.progress.batch_idx
        begun = max(done, run.now.batch_idx + 1) if run.results.is_in_batch else done
        return ProgressView(Counts(begun, done), Counts(before + begun, before + done))

    @property
    def _batches_that_stepped(self) -> int:
        run = self._trainer.fitted
        return 0 if run is None else int(run.log_step)


_SETTABLE = ("max_epochs", "min_epochs")


class FitLoop:
    """View of a fit: the value of ``trainer.fit_loop``. ``max_epochs`` and ``min_epochs`` can be set between fits."""

    _trainer: Any

    def __init__(self, trainer: Any) -> None:
        vars(self)["_trainer"] = trainer

    def __getattr__(self, name: str) -> Any:
        if name in _SETTABLE:
            return getattr(self._trainer, name)
        raise AttributeError(f"trainer.fit_loop has no attribute {name!r}")

    @property
    def max_batches(self) -> float:
        """Number of training batches per epoch."""
        return float(self._trainer.num_training_batches)

    @property
    def epoch_loop(self) -> EpochLoop:
        """The current epoch."""
        return EpochLoop(self._trainer)

    @property
    def epoch_progress(self) -> ProgressView:
        """Counts of epochs."""
        epoch = self._trainer.current_epoch
        counts = Counts(epoch + bool(self._trainer.is_running), epoch)
        return ProgressView(counts, counts)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _SETTABLE:
            raise AttributeError(f"trainer.fit_loop.{name} cannot be set. Set max_epochs or min_epochs")
        setattr(self._trainer, name, value)


class PrecisionView:
    """View of the precision: the value of ``trainer.precision_plugin``."""

    def __init__(self, trainer: TrainerView) -> None:
        self._trainer = trainer

    @property
    def precision(self) -> str:
        """Name of the precision."""
        return self._trainer.plan.precision.mode

    @property
    def scaler(self) -> Any:
        """The loss scale; None if the precision does not use a loss scale."""
        return self._trainer.scaler

    @property
    def _policy(self) -> Precision:
        return precision_of(self.precision, root_device(self._trainer))

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        return self._policy.forward_context()()

    train_step_context = val_step_context = test_step_context = predict_step_context = forward_context

    def convert_input(self, data: Any) -> Any:
        """Convert floating-point tensors to the dtype of the weights."""
        return self._policy.convert_batch(data)


class DeviceTypeView:
    """View of the type of device: the value of ``trainer.accelerator`` if Lightning is not imported."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def name(self) -> str:
        """Type of the device, such as ``"cpu"``."""
        return self._device.type

    def __repr__(self) -> str:
        return f"Accelerator({self.name!r})"


def root_device(trainer: TrainerView) -> torch.device:
    """Return the device of this rank."""
    return resolve_device(trainer.plan.parallel.accelerator) if trainer.run is None else trainer.run.engine.device


def accelerator_of(trainer: TrainerView) -> Any:
    """Return an object that describes the device. If Lightning is imported, the object has Lightning's class."""
    device = root_device(trainer)
    owner = type(trainer.lightning_module).__mro__ if trainer.lightning_module is not None else ()
    packages = dict.fromkeys([*(each.__module__.partition(".core")[0] for each in owner), "lightning.pytorch"])
    for package in packages:
        kinds = sys.modules.get(f"{package}.accelerators")
        kind = getattr(kinds, f"{device.type.upper()}Accelerator", None)
        if kind is not None:
            return kind()
    return DeviceTypeView(device)


class _SkipsInit(TorchFunctionMode):
    """Mode in which the functions of ``torch.nn.init`` return their tensor unchanged."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


@contextmanager
def init_module(trainer: TrainerView, empty_init: bool | None = None) -> Iterator[None]:
    """Create tensors on the device and in the dtype of ``trainer`` inside the context.

    Args:
        trainer: Trainer that determines the device and the dtype.
        empty_init: True to leave the weights uninitialized, for example because a checkpoint is loaded next.
    """
    device = root_device(trainer)
    dtype = precision_of(trainer.plan.precision.mode, device).weight_dtype
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        with device:
            if empty_init:
                with _SkipsInit():
                    yield
            else:
                yield
    finally:
        torch.set_default_dtype(before)
