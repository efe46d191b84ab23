"""Module: an ``nn.Module`` that says how it is trained. The names are those LightningModule made known."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roomier.api.exports import Exports
from roomier.api.hparams import HasHyperParameters
from roomier.api.loss_terms import count_loss_terms
from roomier.core.all_gather import all_gather
from roomier.core.errors import RoomierError
from roomier.core.tree import to_device

if TYPE_CHECKING:
    from roomier.api.logger import Logger
    from roomier.api.trainer_view import TrainerView


class Module(HasHyperParameters, Exports, nn.Module):
    """Subclass it, write ``training_step`` and ``configure_optimizers``, give it to ``Trainer.fit``.

    Attributes:
        automatic_optimization: False where ``training_step`` calls ``manual_backward`` and steps the
            optimizers itself.
        loss_reduction: what the loss of one micro-batch is of its terms, ``"mean"`` or ``"sum"``; it decides how
            micro-batches are weighted when gradients are accumulated (see :meth:`num_loss_terms`).
        example_input_array: what ``forward`` takes, for those who draw or export it.
        strict_loading: False where a checkpoint need not have all weights of this module, nor this module all of its:
            what has no counterpart is left as it is.
        prepare_data_per_node: as of a :class:`roomier.DataModule`.
    """

    automatic_optimization: bool = True
    loss_reduction: Literal["mean", "sum"] = "mean"
    example_input_array: Any = None
    strict_loading: bool = True
    prepare_data_per_node: bool = True

    # What the user writes -------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor | Mapping[str, Any] | None:
        """``(batch, batch_idx)`` -> the loss (0-dim tensor), or a dict with the key ``"loss"``, or None to leave
        this micro-batch out."""
        raise RoomierError(
            "training_step",
            type(self).__name__,
            "the module does not define training_step",
            "Define training_step(self, batch, batch_idx) and return the loss",
        )

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """``(batch, batch_idx)``, and ``dataloader_idx`` with several loaders. Log what you measure."""

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`validation_step`, for ``Trainer.test``."""

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """``(batch, batch_idx)`` -> the prediction; by default ``self(batch)``."""
        return self(args[0])

    def configure_optimizers(self) -> Any:
        """An optimizer; a list of them; ``([optimizers], [schedulers])``; or a dict with ``"optimizer"`` and
        ``"lr_scheduler"``, the latter a scheduler or a dict with ``scheduler``, ``interval`` (``"epoch"`` or
        ``"step"``), ``frequency``, ``monitor``, ``strict``, ``name``."""
        return None

    def configure_model(self) -> None:
        """Build large parts of the model here; called once before the optimizers are made."""

    def configure_callbacks(self) -> Any:
        """Callbacks this module needs; one of the same type given to the Trainer is replaced."""
        return []

    def train_dataloader(self) -> Any:
        """The training data, where neither ``fit`` nor a DataModule gives it."""
        return None

    def val_dataloader(self) -> Any:
        return None

    def test_dataloader(self) -> Any:
        return None

    def predict_dataloader(self) -> Any:
        return None

    def num_loss_terms(self, batch: Any) -> int | Tensor:
        """How many terms the loss of ``batch`` is the mean of: the weight of this micro-batch.

        Accumulated gradients equal those of the whole batch when each micro-batch counts by its number of
        terms. The default counts target entries other than -100 where the batch has integer targets with two
        or more dimensions or ignored entries (``labels``, ``targets``, ``target`` or ``y`` of a mapping, the last
        item of a tuple), else samples. Override it where your loss averages over something else: one with
        class weights, ``cross_entropy(weight=...)``, divides by the sum of the weights of its targets, so that sum
        is to be returned. Called on the batch as the loader gave it, before it is moved to the device.
        """
        return count_loss_terms(batch)

    # Moments of a run -----------------------------------------------------------------------------------------

    def prepare_data(self) -> None: ...
    def setup(self, stage: str) -> None: ...
    def teardown(self, stage: str) -> None: ...
    def on_fit_start(self) -> None: ...
    def on_fit_end(self) -> None: ...
    def on_train_start(self) -> None: ...
    def on_train_end(self) -> None: ...
    def on_train_epoch_start(self) -> None: ...
    def on_train_epoch_end(self) -> None: ...
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None: ...
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...
    def on_before_zero_grad(self, optimizer: Optimizer) -> None: ...
    def on_before_backward(self, loss: Tensor) -> None: ...
    def on_after_backward(self) -> None: ...
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None: ...
    def on_validation_model_zero_grad(self) -> None:
        """Before a validation within a fit: gradients make room for it."""
        self.zero_grad()

    def on_validation_model_eval(self) -> None:
        self.eval()

    def on_validation_model_train(self) -> None:
        """Called after a validation where it is overridden; by default each submodule gets back the mode it had."""

    def on_test_model_eval(self) -> None:
        self.eval()

    def on_test_model_train(self) -> None: ...
    def on_predict_model_eval(self) -> None:
        self.eval()

    def on_predict_model_train(self) -> None: ...
    def on_validation_start(self) -> None: ...
    def on_validation_end(self) -> None: ...
    def on_validation_epoch_start(self) -> None: ...
    def on_validation_epoch_end(self) -> None: ...
    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_test_start(self) -> None: ...
    def on_test_end(self) -> None: ...
    def on_test_epoch_start(self) -> None: ...
    def on_test_epoch_end(self) -> None: ...
    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_predict_start(self) -> None: ...
    def on_predict_end(self) -> None: ...
    def on_predict_epoch_start(self) -> None: ...
    def on_predict_epoch_end(self) -> None: ...
    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None: ...
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None: ...
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch

    # What automatic optimization calls, to be overridden where it must differ -----------------------------------

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        optimizer.zero_grad()

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    # What the user calls --------------------------------------------------------------------------------------

    @property
    def trainer(self) -> TrainerView:
        """The Trainer this module is attached to.

        Raises:
            RoomierError: it is attached to none.
        """
        trainer: TrainerView | None = self.__dict__.get("_trainer")
        if trainer is None:
            raise RoomierError(
                "trainer",
                None,
                f"{type(self).__name__} is not attached to a Trainer",
                "Call Trainer.fit first",
            )
        return trainer

    @property
    def is_attached(self) -> bool:
        return self.__dict__.get("_trainer") is not None

    @property
    def current_epoch(self) -> int:
        return self.trainer.current_epoch if self.is_attached else 0

    @property
    def global_step(self) -> int:
        return self.trainer.global_step if self.is_attached else 0

    @property
    def global_rank(self) -> int:
        return self.trainer.global_rank if self.is_attached else 0

    @property
    def local_rank(self) -> int:
        return self.trainer.local_rank if self.is_attached else 0

    @property
    def logger(self) -> Logger | None:
        return self.trainer.logger if self.is_attached else None

    @property
    def loggers(self) -> list[Logger]:
        return self.trainer.loggers if self.is_attached else []

    @property
    def on_gpu(self) -> bool:
        """Whether it is on a CUDA device."""
        return self.device.type == "cuda"

    @property
    def device(self) -> torch.device:
        """Where the first parameter or buffer lives; the CPU where there is none."""
        return next((t.device for t in _own_tensors(self)), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        return next((t.dtype for t in _own_tensors(self) if t.is_floating_point()), torch.get_default_dtype())

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | Tensor | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Log a number (a 0-dim tensor, a float, or a torchmetrics metric) under ``name``.

        Args:
            prog_bar: show it in the progress bar.
            logger: send it to the loggers (default True).
            on_step: log the value of this step. Default: True in ``training_step``.
            on_epoch: log the value reduced over the epoch. Default: True in validation and test.
            reduce_fx: ``"mean"`` (weighted by ``batch_size``), ``"sum"``, ``"min"`` or ``"max"``; or the function of
                torch or Python of that name. For another one log a torchmetrics object.
            enable_graph: taken, and of no effect: a value is kept without its graph, here as in Lightning.
            sync_dist: on several ranks, let the rows of the log hold the mean over them (weighted by ``batch_size``; or
                the sum, minimum, maximum that ``reduce_fx`` names) in place of the first rank's value. Values of an
                epoch are those of all ranks in any case.
            sync_dist_group: None, or a group of all ranks: an epoch's figure is that of all of them.
            add_dataloader_idx: with several loaders, put ``/dataloader_idx_N`` behind the name.
            batch_size: the weight of this value in the epoch's mean; by default the first dimension of the
                first tensor of the batch. Pass the number of tokens where the value is a mean over tokens; one that is
                counted on the device may stay there.
            metric_attribute: taken, and not needed: a torchmetrics object is found among the attributes of the module.
            rank_zero_only: take the value of rank 0 alone.

        The value stays on its device: nothing here waits for it.
        """
        if self.is_attached:
            self.trainer.results.log(
                name,
                value,
                prog_bar=prog_bar,
                logger=True if logger is None else logger,
                on_step=on_step,
                on_epoch=on_epoch,
                reduce_fx=reduce_fx,
                add_dataloader_idx=add_dataloader_idx,
                batch_size=batch_size,
                sync_dist=sync_dist,
                sync_dist_group=sync_dist_group,
                rank_zero_only=rank_zero_only,
            )

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """:meth:`log` for each item of a mapping, or of a torchmetrics ``MetricCollection``; the other arguments are
        those of :meth:`log`, in its order, and hold for all."""
        for name, value in _items_to_log(dictionary):
            self.log(name, value, *args, **kwargs)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` on rank 0 only."""
        if self.global_rank == 0:
            print(*args, **kwargs)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """The optimizer, or the list of them, for manual optimization. Stepping one of them counts."""
        found = self.trainer.manual_optimizers if use_pl_optimizer else self.trainer.optimizers
        return found[0] if len(found) == 1 else found

    def lr_schedulers(self) -> Any:
        """None, the scheduler, or the list of them."""
        found = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return None if not found else found[0] if len(found) == 1 else found

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """``loss.backward()`` with the precision's loss scaling and the hooks around it.

        Raises:
            RoomierError: optimization is automatic, which calls the backward of what ``training_step`` returns.
        """
        if self.automatic_optimization:
            raise RoomierError(
                "manual_backward",
                type(self).__name__,
                "optimization is automatic: the backward comes after training_step",
                "Set self.automatic_optimization = False in __init__, or return the loss and do not call it",
            )
        self.trainer.engine.backward(loss, *args, **kwargs)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients of ``optimizer`` by ``"norm"`` (default) or ``"value"``; None leaves them."""
        unwrapped = self.trainer.unwrapped_optimizer(optimizer)
        self.trainer.engine.clip(gradient_clip_val, gradient_clip_algorithm, optimizer=unwrapped)

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Let only the parameters of ``optimizer`` require gradients, until :meth:`untoggle_optimizer`."""
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        state: dict[int, tuple[nn.Parameter, bool]] = {}
        for other in self.trainer.optimizers:
            for group in other.param_groups:
                for parameter in group["params"]:
                    state.setdefault(id(parameter), (parameter, parameter.requires_grad))
        for key, (parameter, required) in state.items():
            parameter.requires_grad = required and key in own
        self.__dict__["_toggled"] = list(state.values())

    def untoggle_optimizer(self, optimizer: Any) -> None:
        """Undo :meth:`toggle_optimizer`."""
        for parameter, required in self.__dict__.pop("_toggled", []):
            parameter.requires_grad = required

    @contextmanager
    def toggled_optimizer(self, optimizer: Any) -> Iterator[None]:
        """:meth:`toggle_optimizer`, and :meth:`untoggle_optimizer` at the end, whatever happens inside."""
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """``data`` of every rank, on every rank: tensors of shape (...) as one of shape (world size, ...).

        Every rank must call it, with tensors of the same shapes. With one rank tensors are given back as they are.

        Args:
            data: a tensor or number, or mappings, lists and tuples of them.
            group: a process group; None for all ranks.
            sync_grads: gradients go back to the rank the tensor came from.
        """
        return all_gather(data, self.trainer.ranks, self.device, group, has_gradients=sync_grads)

    def freeze(self) -> None:
        """No parameter requires a gradient; evaluation mode."""
        self.requires_grad_(False).eval()

    def unfreeze(self) -> None:
        """Every parameter requires a gradient; training mode."""
        self.requires_grad_(True).train()

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path,
        map_location: str | torch.device | None = None,
        *,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """The module as the checkpoint has it: made from its stored hyperparameters, with its weights.

        Args:
            checkpoint_path: a checkpoint folder, or a ``.ckpt`` of Lightning.
            map_location: the device to put it on; None leaves it where ``__init__`` makes it, on the CPU as a rule.
            strict: the names of the weights must agree; by default as ``strict_loading`` says.
            kwargs: arguments of ``__init__`` that take the place of stored ones, or were not stored.

        Raises:
            RoomierError: ``map_location`` is no device that is here.
            CheckpointError: damaged, or its weights do not fit this class.
        """
        # The one import that goes up: the name is known from Lightning, the work is the checkpoint layer's.
        from roomier.checkpoint.module import load_module  # late: a higher layer

        return load_module(cls, checkpoint_path, map_location, strict=strict, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # A copy of a module (EMA, pickling to workers) must not drag the Trainer along.
        return {key: value for key, value in self.__dict__.items() if key != "_trainer"}


def _own_tensors(module: nn.Module) -> Iterable[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _items_to_log(dictionary: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    torchmetrics = sys.modules.get("torchmetrics")  # who has such an object has imported it
    if torchmetrics is not None and isinstance(dictionary, torchmetrics.MetricCollection):
        found: Iterable[tuple[str, Any]] = dictionary.items(
            copy_state=False
        )  # the metrics themselves, under full names
        return found
    if not isinstance(dictionary, Mapping):
        action = "Write self.log_dict({'loss': loss, ...}), or self.log(name, value) for one"
        raise RoomierError("log_dict", type(dictionary).__name__, "is no mapping of names to values", action)
    return dictionary.items()
