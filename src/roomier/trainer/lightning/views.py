"""Views of a Trainer with the names of Lightning's loops, strategy, precision plugin and accelerator."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from inspect import isfunction
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from roomier import checkpoint
from roomier.api.callback import Callback
from roomier.api.datamodule import DataModule
from roomier.api.overrides import is_builtin, overrides
from roomier.callbacks.prediction_writer import PredictionWriter
from roomier.core.all_gather import all_gather
from roomier.core.device.resolve import resolve_device
from roomier.core.errors import RoomierError
from roomier.core.torch_private import replace_functions
from roomier.core.tree import map_tensors
from roomier.run.run import run_of
from roomier.techniques.precision.policy import Precision, precision_of

if TYPE_CHECKING:
    from roomier.api.module import Module
    from roomier.api.trainer_view import TrainerView


def _progress(begun: int, done: int, before: int = 0) -> SimpleNamespace:
    """Return the numbers of started and completed items, of which ``before`` belong to earlier epochs."""
    current, total = (
        SimpleNamespace(ready=begun + more, started=begun + more, processed=done + more, completed=done + more)
        for more in (0, before)
    )
    return SimpleNamespace(current=current, total=total)


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
        return int(self.batch_progress.current.ready) - 1

    @property
    def total_batch_idx(self) -> int:
        """Index of the current batch in the run."""
        return int(self.batch_progress.total.ready) - 1

    @property
    def batch_progress(self) -> SimpleNamespace:
        """Counts of batches."""
        run = self._trainer.fitted
        if run is None:
            return _progress(0, 0)
        done = run.progress.batch_idx or (0 if run.results.is_in_batch else run.now.batch_idx + 1)
        before = run.progress.num_batches - done
        begun = max(done, run.now.batch_idx + 1) if run.results.is_in_batch else done
        return _progress(begun, done, before)

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
        if name in ("batch_idx", "total_batch_idx"):
            return getattr(self.epoch_loop, name)
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
    def epoch_progress(self) -> SimpleNamespace:
        """Counts of epochs."""
        epoch = self._trainer.current_epoch
        return _progress(epoch + bool(self._trainer.is_running), epoch)

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


_WITHOUT_INIT = dict.fromkeys(filter(isfunction, vars(nn.init).values()), lambda tensor, *_, **__: tensor)
"""Replacements of the functions in ``torch.nn.init``, which return their tensor unchanged."""


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
        with device, replace_functions(_WITHOUT_INIT) if empty_init else nullcontext():
            yield
    finally:
        torch.set_default_dtype(before)


class NamedSpans:
    """The value of ``trainer.profiler``. ``with trainer.profiler.profile(name)`` names a span in a torch profile."""

    def profile(self, action_name: str) -> AbstractContextManager[Any]:
        """Return a context manager that names a span."""
        return record_function(action_name)


class BatchHooks:
    """Selector of the object whose batch hook is called: the DataModule if it overrides the hook, otherwise the
    module."""

    def __init__(self, trainer: TrainerView) -> None:
        self._trainer = trainer

    @property
    def _datahook_selector(self) -> BatchHooks:
        return self

    def get_instance(self, hook_name: str) -> Any:
        """Return the object on which the hook ``hook_name`` is called."""
        data = self._trainer.datamodule
        return data if data is not None and overrides(data, hook_name, DataModule) else self._trainer.lightning_module


_OF_TRAINER = (
    *("world_size", "global_rank", "local_rank", "node_rank", "num_nodes", "is_global_zero"),
    *("model", "lightning_module", "optimizers"),
)
"""Attributes that have the values of the Trainer's attributes of the same names."""
_REDUCTIONS = ("mean", "avg", "sum", "max", "min")


class Strategy:
    """View of the ranks and the device of a Trainer, for Lightning's callbacks and modules.

    All methods except ``all_gather`` send values through host memory. Use these methods for metrics and decisions, not
    for the tensors of a step. Every rank must make the same calls in the same order.

    Args:
        trainer: Trainer whose ranks and device are shown.
    """

    def __init__(self, trainer: TrainerView) -> None:
        self._trainer = trainer

    def __repr__(self) -> str:
        return f"Strategy({self.name!r}, world_size={self.world_size})"

    @property
    def name(self) -> str:
        """Strategy of the plan, such as ``"single"``, ``"ddp"`` or ``"zero3"``."""
        return self._trainer.plan.parallel.strategy

    @property
    def root_device(self) -> torch.device:
        """Device of this rank."""
        return root_device(self._trainer)

    @property
    def _lightning_optimizers(self) -> list[Any]:
        """Attribute that ``LightningModule.optimizers`` reads after a run."""
        return list(self._trainer.manual_optimizers)

    def __getattr__(self, name: str) -> Any:
        if name in _OF_TRAINER:
            return getattr(self._trainer, name)
        raise AttributeError(f"trainer.strategy has no attribute {name!r}")

    def barrier(self, name: str | None = None) -> None:
        """Wait until every rank has called this method."""
        self._trainer.ranks.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return ``obj`` of rank ``src`` on every rank."""
        ranks = self._trainer.ranks
        if src == 0:
            return ranks.from_zero(obj, allows_pickle=True)
        return ranks.gather(obj, allows_pickle=True)[src]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: str | None = "mean") -> Any:
        """Reduce ``tensor``, which can have any shape, across all ranks. Return any other object unchanged.

        Args:
            tensor: tensor to reduce, or any other object.
            group: ignored. All ranks take part.
            reduce_op: ``"mean"``, ``"avg"``, ``"sum"``, ``"max"`` or ``"min"``. None means ``"mean"``.

        Raises:
            RoomierError: ``reduce_op`` is unknown.
        """
        word = "mean" if reduce_op is None else str(reduce_op).rpartition(".")[2].lower()
        if word not in _REDUCTIONS:
            raise RoomierError("reduce_op", reduce_op, "is unknown", f"Use one of: {', '.join(_REDUCTIONS)}")
        if not isinstance(tensor, Tensor) or self._trainer.ranks.is_alone:
            return tensor
        of_all = torch.stack(self._trainer.ranks.gather(tensor.detach().cpu()))
        if word in ("mean", "avg"):
            reduced = of_all.sum(0) / len(of_all)
        elif word == "sum":
            reduced = of_all.sum(0)
        else:
            reduced = of_all.amax(0) if word == "max" else of_all.amin(0)
        return reduced.to(tensor.device)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return True if ``decision`` is True on all ranks, or on any rank if ``all`` is False."""
        decisions = self._trainer.ranks.gather(bool(decision))
        return min(decisions) if all else max(decisions)

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Stack the tensors of all ranks, so that shape ``(...)`` becomes ``(ranks, ...)``. Dicts and lists may be
        nested.

        Equivalent of :meth:`roomier.Module.all_gather`. With one rank, tensors are returned unchanged.
        """
        return all_gather(tensor, self._trainer.ranks, self.root_device, group, has_gradients=sync_grads)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """On rank 0, remove the checkpoint at ``filepath`` if it exists."""
        self._trainer.ranks.on_zero(partial(_remove, Path(filepath)))


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        os.unlink(path)
    elif path.exists():
        checkpoint.remove(path)  # rejects other folders


class PredictLoop:
    """State of a prediction on this rank, with Lightning's names. :class:`KeepsPredicted` updates this state.

    Attributes:
        current_batch_number: number of the current batch, counted over all ranks.
        current_batch_indices: dataset indices of the samples in the current batch. The list is empty if the loader is
            not a DataLoader that reads the dataset in order.
        epoch_batch_indices: dataset indices of the samples in each batch so far, as one list per loader. The lists are
            empty if no callback writes predictions at the end.
        return_predictions: True if ``predict`` returns the predictions.
        returned: predictions that ``predict`` returns, as one list per loader that is complete.
    """

    def __init__(self, return_predictions: bool = False) -> None:
        self.current_batch_number = -1
        self.current_batch_indices: list[int] = []
        self.epoch_batch_indices: list[list[list[int]]] = []
        self.return_predictions = return_predictions
        self.returned: list[list[Any]] = []
        self._predictions: list[list[Any]] = []

    @property
    def predictions(self) -> list[Any]:
        """Predictions in host memory. With several loaders, the value is one list per loader.

        If a callback writes predictions at the end, these are the predictions of this rank. Otherwise, these are the
        predictions that ``predict`` returns, which are available from ``on_predict_epoch_end`` on.
        """
        found = self._predictions if any(self._predictions) else self.returned
        return found[0] if len(found) == 1 else found

    def begin(self, num_loaders: int) -> None:
        """Start a prediction over ``num_loaders`` loaders."""
        self.epoch_batch_indices = [[] for _ in range(num_loaders)]
        self._predictions = [[] for _ in range(num_loaders)]

    def add(self, loader_number: int, number: int, indices: list[int], output: Any, *, is_kept: bool) -> None:
        """Add a batch.

        Args:
            loader_number: index of the loader.
            number: number of the batch, counted over all ranks.
            indices: dataset indices of the samples in the batch.
            output: prediction for the batch.
            is_kept: True to store the indices and the prediction.
        """
        self.current_batch_number, self.current_batch_indices = number, indices
        if is_kept:
            self.epoch_batch_indices[loader_number].append(indices)
            self._predictions[loader_number].append(map_tensors(lambda tensor: tensor.cpu(), output))


class KeepsPredicted(Callback):
    """Callback that updates ``trainer.predict_loop``. It must be the first callback in the list, so that writers read
    current values.

    Args:
        until_end: True to store the predictions for a callback that writes them at the end.
    """

    def __init__(self, *, until_end: bool) -> None:
        self._until_end = until_end

    def on_predict_start(self, trainer: TrainerView, pl_module: Module) -> None:
        trainer.predict_loop.begin(len(trainer.num_predict_batches))

    def on_predict_batch_end(
        self, trainer: TrainerView, pl_module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        loaders = trainer.predict_dataloaders
        is_list = isinstance(loaders, (list, tuple)) and all(isinstance(each, DataLoader) for each in loaders)
        loader = loaders[dataloader_idx] if is_list else loaders
        number = run_of(trainer, "predict_loop").now.batch_number
        indices = batch_indices(loader, number)
        trainer.predict_loop.add(dataloader_idx, number, indices, outputs, is_kept=self._until_end)


def writes_predictions(callback: Any) -> bool:
    """Return True if ``callback`` is a prediction writer from roomier or from Lightning."""
    return isinstance(callback, PredictionWriter) or is_builtin(callback, "BasePredictionWriter")


def writes_at_end(callback: Any) -> bool:
    """Return True if ``callback`` writes all predictions of a rank at the end of the prediction."""
    interval = callback.interval
    return "epoch" in str(getattr(interval, "value", interval))


def batch_indices(loader: Any, number: int) -> list[int]:
    """Return the dataset indices of the samples in batch ``number``, or ``[]`` if the loader does not read the dataset
    in order."""
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(loader, DataLoader) or type(sampler) is not BatchSampler:
        return []
    if type(sampler.sampler) is not SequentialSampler:
        return []
    start = number * sampler.batch_size
    return list(range(start, min(start + sampler.batch_size, len(sampler.sampler))))
