"""Module: an ``nn.Module`` that also contains the code that trains it. The names of hooks and methods are the same as
in Lightning's ``LightningModule``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Never, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roomier.api.hparams import HasHyperParameters
from roomier.api.loss_terms import count_loss_terms
from roomier.api.module_hooks import ModuleHooks
from roomier.api.provided import provided
from roomier.core.all_gather import all_gather
from roomier.core.errors import RoomierError

if TYPE_CHECKING:
    from roomier.api.logger import Logger
    from roomier.api.trainer_view import TrainerView


class Module(HasHyperParameters, ModuleHooks):
    """Base class for models: an ``nn.Module`` that also contains the code that trains it.

    Define :meth:`training_step` and :meth:`configure_optimizers`, and pass an instance to ``Trainer.fit``. All other
    methods are optional. The names, arguments and order of the hooks are the same as in Lightning's
    ``LightningModule``.

    Attributes:
        automatic_optimization: set it to False if ``training_step`` calls ``manual_backward`` and steps the optimizers
            itself.
        loss_reduction: reduction of the loss over the terms of a micro-batch, ``"mean"`` or ``"sum"``. The reduction
            determines the weights of micro-batches with accumulated gradients (see :meth:`num_loss_terms`).
        example_input_array: an example input of ``forward``, for model summaries, graphs and exports.
        strict_loading: set it to False to ignore weights that exist only in the checkpoint or only in this module.
        prepare_data_per_node: as in :class:`roomier.api.module_hooks.DataHooks`.

    Example:
        >>> class Regression(roomier.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = nn.Linear(8, 1)
        ...
        ...     def training_step(self, batch, batch_idx):
        ...         inputs, targets = batch
        ...         loss = nn.functional.mse_loss(self.layer(inputs), targets)
        ...         self.log("loss", loss)
        ...         return loss
        ...
        ...     def configure_optimizers(self):
        ...         return torch.optim.AdamW(self.parameters(), lr=1e-3)
        >>> roomier.Trainer(max_epochs=3).fit(Regression(), loader)
    """

    automatic_optimization: bool = True
    loss_reduction: Literal["mean", "sum"] = "mean"
    example_input_array: Any = None
    strict_loading: bool = True

    # TorchScript compiles all properties of a class except those listed here, which an exported model does not need.
    __jit_unused_properties__: ClassVar[list[str]] = [
        *("trainer", "is_attached", "current_epoch", "global_step", "global_rank", "local_rank", "logger", "loggers"),
        *("on_gpu", "device", "dtype", "hparams", "logged_hparams", "hparams_initial", "fabric"),
    ]

    # Methods that users define --------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor | Mapping[str, Any] | None:
        """Compute the loss of a micro-batch. The arguments are ``(batch, batch_idx)``.

        Returns:
            The loss (0-dim tensor), a mapping with the key ``"loss"``, or None to skip the micro-batch.
        """
        action = "Define training_step(self, batch, batch_idx) and return the loss"
        raise RoomierError("training_step", type(self).__name__, "the module does not define training_step", action)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a batch and log metrics.

        The arguments are ``(batch, batch_idx)``, and ``dataloader_idx`` if there are several loaders.
        """

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a batch for ``Trainer.test``, as in :meth:`validation_step`."""

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the prediction for a batch. By default, return ``self(batch)``.

        The arguments are the same as in :meth:`validation_step`.
        """
        return self(args[0])

    def configure_optimizers(self) -> Any:
        """Create the optimizers and learning rate schedulers.

        Returns:
            One of these values:

            - an optimizer, or a list of optimizers;
            - ``([optimizers], [schedulers])``;
            - a dict with ``"optimizer"`` and ``"lr_scheduler"``. The scheduler is an object, or a dict with
              ``scheduler``, ``interval`` (``"epoch"`` or ``"step"``), ``frequency``, ``monitor``, ``strict`` and
              ``name``.
        """
        return None

    def configure_model(self) -> None:
        """Create large parts of the model. Called once before ``configure_optimizers``.

        With a strategy that shards parameters, each rank allocates only its shards of the modules created in this
        method.
        """

    def configure_callbacks(self) -> Any:
        """Return callbacks for this module. These callbacks replace callbacks of the same type that were passed to the
        Trainer."""
        return []

    def num_loss_terms(self, batch: Any) -> int | Tensor:
        """Return the number of terms over which the loss is averaged. This number is the weight of the micro-batch.

        If each micro-batch is weighted by its number of terms, accumulated gradients equal the gradients of the full
        batch. By default, integer targets other than -100 are counted (``labels``, ``targets``, ``target``, ``label``
        or ``y`` of a mapping, or the last item of a tuple). Without integer targets, samples are counted. Override this
        method if the loss is averaged over different terms. For example, ``cross_entropy(weight=...)`` divides by the
        sum of the class weights of the targets, so return this sum.

        Args:
            batch: the batch as the loader returned it, before it is moved to the device.
        """
        return count_loss_terms(batch)

    # Steps of automatic optimization ----------------------------------------------------------------------------

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass of ``loss``."""
        loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Zero the gradients of ``optimizer``."""
        optimizer.zero_grad()

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients of ``optimizer``, by default with :meth:`clip_gradients`."""
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """Update the parameters. The closure computes the gradients, so an override must call the closure or pass it to
        the optimizer."""
        optimizer.step(closure=optimizer_closure)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Step ``scheduler``. ``metric`` is the value that the scheduler monitors; None if it monitors no value."""
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    # Methods that users call ------------------------------------------------------------------------------------

    @property
    def trainer(self) -> TrainerView:
        """The Trainer to which this module is attached.

        Raises:
            RoomierError: the module is not attached to a Trainer.
        """
        trainer: TrainerView | None = self.__dict__.get("_trainer")
        if trainer is None:
            problem = f"{type(self).__name__} is not attached to a Trainer"
            raise RoomierError("trainer", None, problem, "Call Trainer.fit first")
        return trainer

    @trainer.setter
    def trainer(self, trainer: TrainerView | None) -> None:
        self.__dict__["_trainer"] = trainer

    @property
    def is_attached(self) -> bool:
        """True if the module is attached to a Trainer."""
        return self.__dict__.get("_trainer") is not None

    @property
    def current_epoch(self) -> int:
        """Number of completed epochs, as in the Trainer; 0 without a Trainer."""
        return self.trainer.current_epoch if self.is_attached else 0

    @property
    def global_step(self) -> int:
        """Number of completed optimizer steps; 0 without a Trainer."""
        return self.trainer.global_step if self.is_attached else 0

    @property
    def global_rank(self) -> int:
        """Rank of this process among all processes; 0 without a Trainer."""
        return self.trainer.global_rank if self.is_attached else 0

    @property
    def local_rank(self) -> int:
        """Rank of this process on its node; 0 without a Trainer."""
        return self.trainer.local_rank if self.is_attached else 0

    @property
    def logger(self) -> Logger | None:
        """The first logger; None if there is no logger."""
        return self.trainer.logger if self.is_attached else None

    @property
    def loggers(self) -> list[Logger]:
        """All loggers; an empty list without a Trainer."""
        return self.trainer.loggers if self.is_attached else []

    @property
    def on_gpu(self) -> bool:
        """True if the module is on a CUDA device."""
        return self.device.type == "cuda"

    @property
    def device(self) -> torch.device:
        """Device of the first parameter or buffer, if possible one that is not on ``meta``; the CPU if the module has
        neither."""
        devices = (t.device for t in _own_tensors(self))
        first = next(devices, torch.device("cpu"))
        return next((each for each in devices if each.type != "meta"), first) if first.type == "meta" else first

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the first floating-point parameter or buffer; the default dtype if the module has neither."""
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
        """Log a value under ``name``. The value stays on its device, so logging does not wait for the device.

        Args:
            name: name of the value, and of its column in the logs.
            value: a 0-dim tensor, a number, or a torchmetrics metric.
            prog_bar: if True, show the value in the progress bar.
            logger: if True, send the value to the loggers. Default: True.
            on_step: if True, log the value of this step. Default: True in ``training_step``.
            on_epoch: if True, log the value reduced over the epoch. Default: True in validation and test.
            reduce_fx: ``"mean"`` (weighted by ``batch_size``), ``"sum"``, ``"min"`` or ``"max"``, or the function of
                torch or Python that has one of these names. For other reductions, log a torchmetrics object.
            enable_graph: has no effect. Values are stored without their graph, as in Lightning.
            sync_dist: if True, log the value of a step reduced over all ranks with ``reduce_fx``, instead of the value
                of the first rank. Values of an epoch are always reduced over all ranks.
            sync_dist_group: a process group that contains all ranks, or ranks that together read each sample once; None
                uses all ranks.
            add_dataloader_idx: if True, append ``/dataloader_idx_N`` to the name if there are several loaders.
            batch_size: weight of this value in the mean over the epoch. Default: the size of the first dimension of the
                first tensor in the batch. Pass the number of tokens if the value is a mean over tokens. A tensor can
                stay on its device.
            metric_attribute: has no effect. torchmetrics objects are found among the attributes of the module.
            rank_zero_only: if True, log only the value of rank 0.

        Raises:
            RoomierError: an argument is invalid, or no step or epoch is running.

        Example:
            >>> self.log("loss", loss, prog_bar=True)
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
        """Call :meth:`log` for each item of a mapping or of a torchmetrics ``MetricCollection``.

        Args:
            dictionary: names and values.
            *args: other arguments of :meth:`log`, which apply to all items.
            **kwargs: other arguments of :meth:`log`, which apply to all items.
        """
        for name, value in _items_to_log(dictionary):
            self.log(name, value, *args, **kwargs)

    def log_image(self, key: str, images: Any, *, caption: str | Sequence[str] | None = None) -> None:
        """Log one or several images at the current step. Loggers that cannot show images report it once.

        Only rank 0 logs its images; the other ranks ignore the call. In a sanity check, all ranks ignore it. Copying
        the images to the host waits for the device, so do not log images in every step.

        Args:
            key: name of the images.
            images: a tensor (C, H, W) or (H, W), an array (H, W, C) or (H, W), a PIL image, a list of them, or a batch
                with four dimensions. Values are in [0, 1], or in [0, 255] if the dtype is uint8. C is 1, 3 or 4.
            caption: one caption for each image.

        Raises:
            RoomierError: an item is not an image, the number of captions is wrong, or no step or epoch is running.

        Example:
            >>> self.log_image("samples", images[:8], caption=[f"class {y}" for y in labels[:8].tolist()])
        """
        if self.is_attached:
            self.trainer.log_visual("log_image", key, images, caption=caption)

    def log_figure(self, key: str, figure: Any) -> None:
        """Log a matplotlib figure at the current step, as :meth:`log_image` logs images. The figure stays open, so call
        ``plt.close(figure)`` afterwards.

        Args:
            key: name of the figure.
            figure: a ``matplotlib.figure.Figure``.

        Raises:
            RoomierError: ``figure`` is not a figure, or no step or epoch is running.

        Example:
            >>> self.log_figure("confusion", figure)
        """
        if self.is_attached:
            self.trainer.log_visual("log_figure", key, figure)

    def log_histogram(self, key: str, values: Any, *, bins: int | Sequence[float] = 64) -> None:
        """Log a histogram of ``values`` at the current step. Loggers that cannot show histograms report it once.

        The histogram of a sharded tensor counts the values of all shards, so every rank must call this method. For any
        other value, only rank 0 counts. Values that are not finite are ignored. This method waits for the device.

        Args:
            key: name of the histogram.
            values: a tensor of any shape, an array, or numbers.
            bins: number of bins of equal width between the smallest and the largest value (at most 512), or the edges
                of the bins.

        Raises:
            RoomierError: ``values`` are not real numbers, ``bins`` is invalid, or no step or epoch is running.

        Example:
            >>> self.log_histogram("logits", logits)
        """
        if self.is_attached:
            self.trainer.log_visual("log_histogram", key, values, bins=bins)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Call ``print`` on rank 0 only."""
        if self.global_rank == 0:
            print(*args, **kwargs)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer or the list of optimizers, for manual optimization.

        Args:
            use_pl_optimizer: if True, return optimizers whose ``step`` increments ``global_step`` and calls the hooks.
                If False, return the torch optimizers.
        """
        found = self.trainer.manual_optimizers if use_pl_optimizer else self.trainer.optimizers
        return found[0] if len(found) == 1 else found

    def lr_schedulers(self) -> Any:
        """Return the scheduler; a list if there are several schedulers; None if there is no scheduler."""
        found = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return None if not found else found[0] if len(found) == 1 else found

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass of ``loss`` with loss scaling and hooks, in manual optimization.

        Raises:
            RoomierError: ``automatic_optimization`` is True.
        """
        if self.automatic_optimization:
            problem = "is not supported with automatic optimization, which calls backward after training_step"
            action = "Set self.automatic_optimization = False in __init__, or return the loss and remove this call"
            raise RoomierError("manual_backward", type(self).__name__, problem, action)
        self.trainer.engine.backward(loss, *args, **kwargs)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients of ``optimizer``.

        Args:
            optimizer: the optimizer whose gradients are clipped.
            gradient_clip_val: maximum norm or value; None disables clipping.
            gradient_clip_algorithm: ``"norm"`` (default) or ``"value"``.
        """
        unwrapped = self.trainer.unwrapped_optimizer(optimizer)
        self.trainer.engine.clip(gradient_clip_val, gradient_clip_algorithm, optimizer=unwrapped)

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Set ``requires_grad`` to False for all parameters that only other optimizers update."""
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
        """Restore the values of ``requires_grad`` that :meth:`toggle_optimizer` changed."""
        for parameter, required in self.__dict__.pop("_toggled", []):
            parameter.requires_grad = required

    @contextmanager
    def toggled_optimizer(self, optimizer: Any) -> Iterator[None]:
        """Call :meth:`toggle_optimizer` at the start of the context, and :meth:`untoggle_optimizer` at its end."""
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Gather the ``data`` of all ranks on every rank. Tensors of shape (...) get the shape (world size, ...).

        Every rank must call this method with tensors of the same shapes. With one rank, tensors are returned unchanged.

        Args:
            data: a tensor, a number, or nested mappings, lists and tuples of tensors and numbers.
            group: a process group; None for all ranks, or in a pipeline, the ranks of the same stage.
            sync_grads: if True, propagate gradients to the rank that provided each tensor.
        """
        return all_gather(data, self.trainer.ranks, self.device, group, has_gradients=sync_grads)

    def freeze(self) -> Self:
        """Set ``requires_grad`` to False for all parameters and set evaluation mode. Return the module."""
        return self.requires_grad_(False).eval()

    def unfreeze(self) -> Self:
        """Set ``requires_grad`` to True for all parameters and set training mode. Return the module."""
        return self.requires_grad_(True).train()

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path,
        map_location: str | torch.device | None = None,
        hparams_file: str | Path | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Create the module from the hyperparameters in a checkpoint and load its weights.

        Args:
            checkpoint_path: a checkpoint folder, or a Lightning ``.ckpt`` file.
            map_location: device of the module; None leaves the module on the device on which ``__init__`` creates it.
            hparams_file: YAML file of hyperparameters, which replace the hyperparameters in the checkpoint.
            strict: if True, require that the checkpoint and the module have weights with the same names. Default:
                ``strict_loading``.
            weights_only: has no effect, because roomier never executes code in a checkpoint.
            kwargs: arguments of ``__init__`` that replace stored arguments, or that are not stored.

        Raises:
            RoomierError: ``map_location`` is not an available device, or ``hparams_file`` cannot be read.
            CheckpointError: the checkpoint is damaged, or its weights do not match this class.

        Example:
            >>> model = Net.load_from_checkpoint("runs/version_0/checkpoints/last")
        """
        loaded: Self = provided("load_module")(
            cls, checkpoint_path, map_location, hparams_file=hparams_file, strict=strict, **kwargs
        )
        return loaded

    def to_onnx(self, file_path: str | Path | BytesIO | None = None, input_sample: Any = None, **kwargs: Any) -> Any:
        """Export this module in evaluation mode as an ONNX file for any batch size.

        The file is run with onnxruntime, and its outputs are compared with the outputs of the module.

        Args:
            file_path: path of the file; None returns the program without writing a file.
            input_sample: input of ``forward``: a tensor, a tuple of the arguments, or a dict of keyword arguments.
                Default: ``self.example_input_array``.
            kwargs: arguments of ``torch.onnx.export``, and ``max_difference``: the largest allowed difference between
                the outputs, relative to the largest value (default 1e-4).

        Returns:
            The ``torch.onnx.ONNXProgram``.

        Raises:
            RoomierError: a package is missing (``pip install "roomier[onnx]"``), the module cannot be exported, or the
                outputs differ.
        """
        return provided("export_onnx")(self, file_path, input_sample, may_exist=True, **kwargs)

    def to_omni(self, *args: Any, **kwargs: Any) -> Never:
        """Raise an error that suggests :meth:`to_onnx`, because published examples contain this misspelling."""
        raise RoomierError("to_omni", args or None, "is not a method of a Module", "Call to_onnx instead")

    def to_torchscript(
        self,
        file_path: str | Path | None = None,
        method: Literal["script", "trace"] = "script",
        example_inputs: Any = None,
        **kwargs: Any,
    ) -> torch.jit.ScriptModule:
        """Convert this module in evaluation mode to TorchScript.

        Args:
            file_path: path of the file; None returns the module without writing a file.
            method: ``"script"`` compiles the code of ``forward``. ``"trace"`` records the operations of ``forward`` for
                one input.
            example_inputs: the inputs for ``"trace"``. Default: ``self.example_input_array``.
            kwargs: arguments of ``torch.jit.script`` or ``torch.jit.trace``.

        Raises:
            RoomierError: the module cannot be converted, or the outputs of the converted module and of this module
                differ.
        """
        scripted: torch.jit.ScriptModule = provided("export_torchscript")(
            self, file_path, method=method, example_inputs=example_inputs, may_exist=True, **kwargs
        )
        return scripted

    def __getstate__(self) -> dict[str, Any]:
        # Copies of a module (EMA, pickles for workers) must not contain the Trainer.
        return {key: value for key, value in self.__dict__.items() if key != "_trainer"}


def _own_tensors(module: nn.Module) -> Iterable[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _items_to_log(dictionary: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    torchmetrics = sys.modules.get("torchmetrics")  # already imported if ``dictionary`` is a torchmetrics object
    if torchmetrics is not None and isinstance(dictionary, torchmetrics.MetricCollection):
        # These items are the metric objects, with prefix and postfix in their names.
        found: Iterable[tuple[str, Any]] = dictionary.items(copy_state=False)
        return found
    if not isinstance(dictionary, Mapping):
        action = "Call self.log_dict({'loss': loss, ...}), or self.log(name, value) for one value"
        raise RoomierError("log_dict", type(dictionary).__name__, "must be a mapping of names to values", action)
    return dictionary.items()


class WrappedModule(Module):
    """Module that wraps ``network``. Checkpoints contain the parameter names of ``network``, without a prefix.

    Attributes:
        network: the model of the user.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network


def network_of(module: Module) -> nn.Module:
    """Return the module whose parameters are trained. Checkpoints use the parameter names of this module."""
    return module.network if isinstance(module, WrappedModule) else module
