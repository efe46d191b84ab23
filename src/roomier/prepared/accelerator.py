"""Accelerator: the members of ``accelerate.Accelerator``, implemented with roomier's engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from roomier.core.device.capability import usable_device
from roomier.core.device.memory import release_cached
from roomier.core.device.resolve import resolve_device
from roomier.core.device.transfer import BatchMover
from roomier.core.errors import PlanError, RoomierError, TrainingError, did_you_mean
from roomier.core.log import notice
from roomier.core.tree import leaves, map_tensors
from roomier.engine.prepared import ModelEngine, build_prepared
from roomier.launch import join, place, present_launch
from roomier.plan import Plan
from roomier.plan.migrate.accelerate import MEMBERS, PRECISIONS
from roomier.prepared.loader import AccumulationState, PreparedLoader, prepared_loader
from roomier.prepared.optimizer import PreparedModel, PreparedOptimizer, PreparedScheduler
from roomier.prepared.saving import full_weights, load_loop, save_loop, write_file, write_weights
from roomier.prepared.settings import (
    NO_TRACKER,
    Trackers,
    last_checkpoint,
    next_checkpoint,
    plan_of,
    project_of,
    remove_oldest,
)
from roomier.prepared.tensors import gathered, padded, part_of_rank, reduced
from roomier.techniques.loss.lazy_logits import computed
from roomier.techniques.precision.policy import precision_of, set_matmul_precision

Function = Callable[..., Any]


class UnsupportedMemberError(RoomierError, AttributeError):
    """Error for access to a member of ``accelerate.Accelerator`` that roomier does not have. The message names an
    alternative."""


class Accelerator:
    """Objects for a custom training loop, with the interface of ``accelerate.Accelerator``.

    In a script for Accelerate, replace the import and add a Plan. The Plan determines the strategy, the precision and
    the memory techniques. The launcher (torchrun, ``accelerate launch``, SLURM or MPI) determines the number of ranks,
    unless the Plan contains this number.

    Gradients are averaged over the micro-batches of an optimizer step and over the ranks. As in Accelerate, each rank
    reads full batches, and the first samples of an epoch fill its last batch.

    Args:
        plan: a Plan, a mapping, or the path of a YAML or JSON file. If None, the strategy is ``"ddp"`` on several
            ranks.
        mixed_precision: ``"no"``, ``"fp16"`` or ``"bf16"``. None uses the precision of the plan.
        gradient_accumulation_steps: number of micro-batches per optimizer step.
        split_batches: True to divide each batch of a loader among the ranks. By default, each rank reads one batch per
            step.
        step_scheduler_with_optimizer: True to step schedulers only after an optimizer step, once per rank.
        log_with: names of loggers, or logger objects, for :meth:`log`.
        project_dir: folder for logs and for checkpoints with automatic names.
        keywords: other keywords of ``accelerate.Accelerator``. roomier converts each keyword, reports that the keyword
            has no effect, or rejects the keyword and names an alternative.

    Attributes:
        plan: the Plan of the loop.
        ranks: all ranks.
        device: device of this rank.
        even_batches: True, because all ranks read the same number of batches.
        non_blocking: True, because copies from pinned memory do not block the host.
        project_configuration: Accelerate's ``ProjectConfiguration``, or a :class:`roomier.prepared.settings.Project`.
            The ``iteration`` attribute of this object is the number of the next checkpoint with an automatic name.

    Raises:
        PlanError: a keyword is not supported or contradicts the plan, or the plan is not supported in a custom loop.

    Example:
        >>> accelerator = Accelerator(plan={"precision": {"mode": "bf16-mixed"}}, gradient_accumulation_steps=2)
        >>> model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        >>> for inputs, targets in loader:
        ...     with accelerator.accumulate(model):
        ...         accelerator.backward(loss_function(model(inputs), targets))
        ...         optimizer.step()
        ...         scheduler.step()
        ...         optimizer.zero_grad()
    """

    even_batches = True
    non_blocking = True

    def __init__(
        self,
        *,
        plan: Plan | Mapping[str, Any] | str | Path | None = None,
        mixed_precision: Any = None,
        gradient_accumulation_steps: int = 1,
        split_batches: bool = False,
        step_scheduler_with_optimizer: bool = True,
        log_with: Any = None,
        project_dir: str | Path | None = None,
        **keywords: Any,
    ) -> None:
        given = {**keywords, "mixed_precision": mixed_precision}
        if gradient_accumulation_steps != 1:
            given["gradient_accumulation_steps"] = gradient_accumulation_steps
        self.plan = plan_of(plan, given)
        wanted = self.plan.parallel
        world = place(wanted.devices, wanted.num_nodes, present_launch())
        self.ranks = join(world, resolve_device(wanted.accelerator).type)
        mode = self.plan.precision.mode
        self.device = usable_device(wanted.accelerator, mode)
        self.project_configuration = project_of(keywords.get("project_config"), project_dir)
        self._trackers = Trackers(log_with, None if self.logging_dir is None else Path(self.logging_dir))
        set_matmul_precision(self.plan.precision.matmul)
        self._precision = precision_of(mode, self.device)
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        loaders = keywords.get("dataloader_config")
        self.split_batches = split_batches or bool(getattr(loaders, "split_batches", False))
        plugin = keywords.get("gradient_accumulation_plugin")
        self._accumulation = AccumulationState(
            self.plan.batch.accumulate_grad_batches, bool(getattr(plugin, "sync_with_dataloader", True))
        )
        self._mover = BatchMover(self.device)
        self._engines: list[ModelEngine] = []
        self._optimizers: list[PreparedOptimizer] = []
        self._schedulers: list[PreparedScheduler] = []
        self._loaders: list[PreparedLoader] = []
        self._registered: list[Any] = []
        self._is_triggered = False

    def prepare(self, *args: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Return the prepared ``args`` in the same order. For a single argument, the result is the prepared object
        instead of a tuple.

        Models, optimizers, DataLoaders and schedulers are prepared. Other objects are returned unchanged. Pass a model
        together with its optimizers, because sharding replaces the parameters.

        Args:
            args: objects to prepare.
            device_placement: accepted for compatibility with Accelerate; must contain only True or None.

        Raises:
            PlanError: the plan does not support several models, an optimizer does not belong to exactly one prepared
                model, ``device_placement`` contains False, or an object is a ``DummyOptim`` or ``DummyScheduler``.
        """
        if device_placement is not None and any(each is False for each in device_placement):
            problem = "contains False, but prepare moves all objects to the device"
            raise PlanError("device_placement", device_placement, problem, "Do not pass these objects to prepare")
        models = [each for each in args if isinstance(each, nn.Module) and not isinstance(each, PreparedModel)]
        optimizers = [each for each in args if _is_new(each, Optimizer, PreparedOptimizer)]
        self._check_owners(models, optimizers)
        done = self._prepare_models(models, optimizers)
        for each in optimizers:
            done[id(each)] = PreparedOptimizer(each, self._engine_of(each), self._accumulation)
            self._optimizers.append(done[id(each)])
        for each in args:
            if _is_new(each, LRScheduler, PreparedScheduler):
                done[id(each)] = PreparedScheduler(
                    each,
                    self._optimizers,
                    self._accumulation,
                    num_processes=self.num_processes,
                    steps_with_optimizer=self.step_scheduler_with_optimizer,
                    splits_batches=self.split_batches,
                )
                self._schedulers.append(done[id(each)])
            elif _is_new(each, DataLoader, PreparedLoader):
                done[id(each)] = self._prepared_loader(each)
                self._loaders.append(done[id(each)])
            elif type(each).__name__ in ("DummyOptim", "DummyScheduler"):
                action = "Create a torch optimizer and scheduler"
                raise PlanError("prepare", type(each).__name__, "is a placeholder for a DeepSpeed setting", action)
        found = tuple(done.get(id(each), each) for each in args)
        return found[0] if len(found) == 1 else found

    def prepare_model(self, model: nn.Module, device_placement: bool | None = None, **_: Any) -> Any:
        """Return one prepared model."""
        return self.prepare(model, device_placement=[device_placement])

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """Return one prepared optimizer. Its model must already be prepared."""
        return self.prepare(optimizer, device_placement=[device_placement])

    def prepare_data_loader(self, data_loader: Any, device_placement: bool | None = None, **_: Any) -> Any:
        """Return one prepared loader."""
        return self.prepare(data_loader, device_placement=[device_placement])

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Return one prepared scheduler."""
        return self.prepare(scheduler)

    def _prepare_models(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> dict[int, Any]:
        done: dict[int, Any] = {}
        with_parameters = [each for each in models if any(True for _ in each.parameters())]
        self._check_number_of_models(len(self._engines) + len(with_parameters))
        for model in models:
            if model not in with_parameters:  # such as a loss function
                done[id(model)] = model.to(self.device)
                continue
            own = [each for each in optimizers if _shares_parameters(each, model)]
            engine, _ = build_prepared(self.plan, model, own, ModelEngine, allows_none=True)
            if self._engines:
                self._engines[-1].chain(engine)
            self._engines.append(engine)
            done[id(model)] = PreparedModel(engine, self)
        return done

    def _check_number_of_models(self, number: int) -> None:
        strategy = self.plan.parallel.strategy
        if number > 1 and self.use_distributed and strategy not in ("single", "ddp"):
            problem = "supports one model per Accelerator"
            raise PlanError("strategy", strategy, problem, "Use strategy='ddp', or combine the models in one nn.Module")
        if number > 1 and self.plan.offload.optimizer_states != "none":
            problem = "is supported only for one model per Accelerator"
            action = "Combine the models in one nn.Module, or use 'none'"
            raise PlanError("offload.optimizer_states", self.plan.offload.optimizer_states, problem, action)

    def _check_owners(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        known = [*models, *(each.module for each in self._engines)]
        for optimizer in optimizers:
            num_owners = sum(_shares_parameters(optimizer, each) for each in known)
            if num_owners != 1:
                problem = "contains no parameters of a prepared model"
                action = "Pass the model and its optimizer in the same call to prepare"
                if num_owners:
                    problem, action = "has parameters of several models", "Create one optimizer for each model"
                raise PlanError("optimizer", type(optimizer).__name__, problem, action)

    def _engine_of(self, optimizer: Optimizer) -> ModelEngine:
        [owner] = [each for each in self._engines if _shares_parameters(optimizer, each.module)]
        if not any(each is optimizer for each in owner.optimizers):
            owner.add_optimizer(optimizer)
        return owner

    def _prepared_loader(self, loader: DataLoader[Any]) -> PreparedLoader:
        return prepared_loader(loader, self.ranks, self._move, self._accumulation, splits_batches=self.split_batches)

    def _move(self, batch: Any) -> Any:
        return self._precision.convert_batch(self._mover(batch))

    # Steps --------------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Divide ``loss`` by :attr:`gradient_accumulation_steps`, and compute the gradients."""
        loss = loss / self._accumulation.num_steps
        if self._engines:
            self._engines[0].backward(loss, **kwargs)
        else:
            loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Return a context for the forward pass, backward pass and update of one micro-batch.

        Gradients accumulate until the last micro-batch of an optimizer step. By default, the last batch of the loader
        also ends the accumulation. Before the last micro-batch, ``optimizer.step``, ``optimizer.zero_grad`` and
        ``scheduler.step`` have no effect. If ``step_scheduler_with_optimizer`` is False, ``scheduler.step`` always has
        an effect.
        """
        self._accumulation.advance()
        with ExitStack() as stack:
            for each in () if self.sync_gradients else models:
                stack.enter_context(self.no_sync(each))
            yield

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which backward passes do not reduce the gradients of ``model`` over the ranks."""
        return model.no_sync() if isinstance(model, PreparedModel) else nullcontext()

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> AbstractContextManager[None]:
        """Return a context that has no effect, because all ranks read the same number of batches.

        Raises:
            PlanError: ``even_batches`` is False.
        """
        if even_batches is False:
            problem = "is not supported, because all ranks must run the same number of steps"
            raise PlanError("even_batches", False, problem, "Remove it, and use gather_for_metrics")
        return nullcontext()

    @property
    def sync_gradients(self) -> bool:
        """True if the current micro-batch is the last micro-batch of an optimizer step."""
        return self._accumulation.is_syncing

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._accumulation.is_syncing = value

    @property
    def gradient_accumulation_steps(self) -> int:
        """Number of micro-batches per optimizer step."""
        return self._accumulation.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        self._accumulation.num_steps = value

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """True if the last step of any optimizer was skipped because its gradients were not finite."""
        return any(each.step_was_skipped for each in self._optimizers)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide the gradients of ``optimizer`` (default: all optimizers) by the loss scale. A second call in the same
        step has no effect."""
        wanted = self._optimizers if optimizer is None else optimizer
        for each in wanted if isinstance(wanted, (list, tuple)) else [wanted]:
            self._engine_of(each.optimizer).unscale(each.optimizer)

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        """Scale the gradients of ``parameters`` so that their norm is at most ``max_norm``.

        Returns:
            The norm over all ranks before clipping (a 0-dim tensor).

        Raises:
            TrainingError: scaled or sharded gradients are still being accumulated. The error is also raised if
                ``parameters`` were read before the model was sharded, or if gradients are sharded and ``norm_type`` is
                not 2.
        """
        own = self._begin_clip("clip_grad_norm_", parameters)
        if not self._engines:
            return nn.utils.clip_grad_norm_(own, max_norm, norm_type)
        return self._engines[0].clip_norm_of(own, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clamp each element of the gradients of ``parameters`` to ``[-clip_value, clip_value]``.

        Raises:
            TrainingError: scaled or sharded gradients are still being accumulated. The error is also raised if
                ``parameters`` were read before the model was sharded.
        """
        own = self._begin_clip("clip_grad_value_", parameters)
        if not self._engines:
            nn.utils.clip_grad_value_(own, clip_value)
        else:
            self._engines[0].clip_values_of(own, clip_value)

    def _begin_clip(self, name: str, parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
        own = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        is_sharded = any(engine.is_sharded and not engine.owns_any(own) for engine in self._engines)
        if own and is_sharded and all(each.grad is None for each in own):
            problem = "received no parameters of the sharded model, whose parameters were replaced by prepare"
            raise TrainingError(name, len(own), problem, "Pass model.parameters() of the prepared model")
        for engine in self._engines:
            if not self.sync_gradients and (engine.is_sharded or engine.scaler.is_on):
                problem = "was called while gradients accumulate"
                action = f"Call accelerator.{name}(...) only if accelerator.sync_gradients is True"
                raise TrainingError(name, None, problem, action)
            engine.begin_clip(own)
        return own

    def autocast(self, autocast_handler: Any = None) -> AbstractContextManager[Any]:
        """Return a context that runs computations outside the model in the precision of the plan."""
        if autocast_handler is not None and not autocast_handler.enabled:
            return torch.autocast(self.device.type, enabled=False)
        return self._precision.forward_context()()

    # Processes ----------------------------------------------------------------------------------------------------

    @property
    def num_processes(self) -> int:
        """Number of ranks."""
        return self.ranks.world.size

    @property
    def process_index(self) -> int:
        """Rank of this process."""
        return self.ranks.world.rank

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its machine."""
        return self.ranks.world.local_rank

    @property
    def use_distributed(self) -> bool:
        """True if there are several ranks."""
        return not self.ranks.is_alone

    @property
    def is_main_process(self) -> bool:
        """True on rank 0."""
        return self.process_index == 0

    should_save_model = is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """True on the first rank of each machine."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """True on the last rank."""
        return self.process_index == self.num_processes - 1

    def on_main_process(self, function: Function | None = None) -> Function:
        """Decorate ``function`` to run on rank 0 only. Other ranks return None."""
        return self._only(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: Function | None = None) -> Function:
        """Decorate ``function`` to run on the first rank of each machine only."""
        return self._only(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: Function) -> Function:
        """Decorate ``function`` to run on the last rank only."""
        return self._only(lambda: self.is_last_process, function)

    def on_process(self, function: Function | None = None, process_index: int | None = None) -> Function:
        """Decorate ``function`` to run on the rank ``process_index`` only."""
        return self._only(lambda: self.process_index == process_index, function)

    def on_local_process(self, function: Function | None = None, local_process_index: int | None = None) -> Function:
        """Decorate ``function`` to run on the rank ``local_process_index`` of each machine only."""
        return self._only(lambda: self.local_process_index == local_process_index, function)

    def _only(self, is_here: Callable[[], bool], function: Function | None) -> Function:
        if function is None:
            return partial(self._only, is_here)

        @wraps(function)
        def on_some(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if is_here() else None

        return on_some

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Return a context that the other ranks enter only after rank 0 has left it."""
        yield from self._first(self.is_main_process)

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Return a context that the other ranks enter only after the first rank of each machine has left it."""
        yield from self._first(self.is_local_main_process)

    def _first(self, is_first: bool) -> Iterator[None]:
        if not is_first:
            self.wait_for_everyone()
        yield
        if is_first:
            self.wait_for_everyone()

    def wait_for_everyone(self) -> None:
        """Wait until every rank calls this method."""
        self.ranks.barrier()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the first rank of each machine only."""
        if self.is_local_main_process:
            print(*args, **kwargs)

    def set_trigger(self) -> None:
        """Make the next call to :meth:`check_trigger` return True on all ranks."""
        self._is_triggered = True

    def check_trigger(self) -> bool:
        """Return whether any rank called :meth:`set_trigger`, and clear the request. Every rank must call this
        method."""
        found, self._is_triggered = self.ranks.any(self._is_triggered), False
        return found

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return ``tensor`` (nested tensors) reduced over the ranks.

        Args:
            tensor: tensors of the same shapes on every rank.
            reduction: ``"sum"``, ``"mean"``, ``"max"``, or ``"none"``, which also sums, as in Accelerate.
            scale: this argument has no effect, as in Accelerate on all devices except XLA.

        Raises:
            RoomierError: ``reduction`` is unknown.
        """
        return reduced(tensor, reduction, self.ranks)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Return ``tensor`` (nested tensors), with each tensor padded along ``dim`` to its largest size over the ranks.

        Args:
            tensor: tensors whose sizes can differ along ``dim``.
            dim: dimension to pad.
            pad_index: value of the added elements.
            pad_first: if True, add elements at the start instead of the end.
        """
        return padded(tensor, dim, pad_index, first=pad_first, ranks=self.ranks)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Return a context whose value is the part of ``inputs`` for this rank.

        Args:
            inputs: a list, tuple or tensor, or a dict of values with the same number of elements.
            apply_padding: if True, repeat the last element, so that all ranks receive the same number of elements.

        Raises:
            RoomierError: the values of a dict have different lengths.
        """
        yield part_of_rank(inputs, self.ranks, pads=apply_padding)

    # Weights, checkpoints and logged values -----------------------------------------------------------------------

    @property
    def project_dir(self) -> str | None:
        """Folder of the project; None if it is not set."""
        folder = self.project_configuration.project_dir
        return None if folder is None else str(folder)

    @property
    def logging_dir(self) -> str | None:
        """Folder for logs; None if it is not set."""
        folder = self.project_configuration.logging_dir
        return None if folder is None else str(folder)

    @property
    def save_iteration(self) -> int:
        """Number of the next checkpoint with an automatic name."""
        return int(self.project_configuration.iteration)

    def unwrap_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        """Return the network of a prepared model."""
        if not isinstance(model, PreparedModel):
            return model
        model.engine.settle()
        return model.module

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the unsharded state of ``model``. Every rank must call this method.

        If the model is sharded, its tensors are in host memory on rank 0, and are omitted on other ranks.
        """
        return full_weights(self.unwrap_model(model), self.ranks)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Save ``obj`` on rank 0 with ``torch.save``, or as a safetensors file if ``safe_serialization`` is set. If
        ``project_configuration.save_on_each_node`` is set, the first rank of each machine saves.

        Raises:
            RoomierError: ``safe_serialization`` is True, but a value of ``obj`` is not a tensor.
        """
        on_each_node = self.project_configuration.save_on_each_node
        if not (self.is_local_main_process if on_each_node else self.is_main_process):
            return
        if safe_serialization:
            write_file(Path(f), obj)
        else:
            torch.save(obj, f)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | Path,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the unsharded weights of ``model`` to a folder. Every rank must call this method.

        Args:
            model: a prepared model.
            save_directory: folder, which is created if it does not exist.
            max_shard_size: maximum size of one file, as a number of bytes or a text such as ``"5GB"``.
            safe_serialization: if True, write safetensors files; if False, write one pickle file,
                ``pytorch_model.bin``.
        """
        weights, folder = self.get_state_dict(model), Path(save_directory)
        if self.is_main_process and safe_serialization:
            write_weights(folder, weights, max_shard_size)
        elif self.is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(weights, folder / "pytorch_model.bin")
        self.wait_for_everyone()

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Add objects with ``state_dict`` and ``load_state_dict`` to the checkpoints of :meth:`save_state`.

        Raises:
            RoomierError: an object lacks one of these methods.
        """
        for each in objects:
            if not all(callable(getattr(each, name, None)) for name in ("state_dict", "load_state_dict")):
                problem = "does not have the methods state_dict and load_state_dict"
                raise RoomierError("register_for_checkpointing", each, problem, "Define both methods")
        self._registered += objects

    def save_state(self, output_dir: str | Path | None = None, safe_serialization: bool = True) -> str:
        """Write models, optimizers, schedulers, loaders, registered objects and random states as a checkpoint folder.

        Every rank must call this method. Each rank writes its shards as safetensors files.

        With ``ProjectConfiguration(automatic_checkpoint_naming=True)``, the folder is
        ``project_dir/checkpoints/checkpoint_<iteration>``. After the checkpoint is complete, the checkpoints with the
        lowest numbers are removed if there are more than ``total_limit`` checkpoints.

        Args:
            output_dir: the folder. This argument has no effect with automatic names.
            safe_serialization: must be True.

        Returns:
            The folder.

        Raises:
            RoomierError: ``output_dir`` is missing, the folder with the automatic name exists, or
                ``safe_serialization`` is False.
            CheckpointError: the folder cannot be written.
        """
        if not safe_serialization:
            problem = "is not supported, because checkpoints contain no pickles"
            raise RoomierError("safe_serialization", False, problem, "Remove it")
        project = self.project_configuration
        is_automatic = project.automatic_checkpoint_naming
        folder = next_checkpoint(project, self.ranks) if is_automatic else _folder("output_dir", output_dir)
        if is_automatic and output_dir is not None:
            notice(f"save_state: checkpoints are named automatically, so {folder} is written instead of {output_dir}")
        save_loop(folder, self._engines, self._states(), self.ranks)
        if is_automatic:
            remove_oldest(project, folder, self.ranks)
            project.iteration += 1
        return str(folder)

    def load_state(self, input_dir: str | Path | None = None) -> None:
        """Restore a checkpoint that :meth:`save_state` wrote. The strategy and the number of ranks can differ.

        Args:
            input_dir: the folder. With automatic names, None loads the checkpoint with the highest number, and the next
                checkpoint receives the following number.

        Raises:
            RoomierError: ``input_dir`` is missing, or the checkpoint contains other objects.
            CheckpointError: the checkpoint is damaged, or belongs to another model.
        """
        project = self.project_configuration
        if input_dir is None and project.automatic_checkpoint_naming:
            input_dir = last_checkpoint(project, self.ranks)
        load_loop(_folder("input_dir", input_dir), self._engines, self._states(), self.ranks)

    def _states(self) -> dict[str, list[Any]]:
        schedulers = [each.scheduler for each in self._schedulers]
        return {"schedulers": schedulers, "loaders": list(self._loaders), "registered": list(self._registered)}

    def init_trackers(self, project_name: str, config: Any = None, init_kwargs: Any = None) -> None:
        """Start the loggers in ``log_with`` on rank 0, and log ``config`` as hyperparameters.

        Raises:
            RoomierError: ``init_kwargs`` is not empty.
        """
        if init_kwargs:
            action = "Pass a logger with its arguments: log_with=roomier.loggers.WandbLogger(...)"
            raise RoomierError("init_kwargs", init_kwargs, "is not supported", action)
        if self.is_main_process:
            self._trackers.start(project_name, config)

    @property
    def trackers(self) -> list[Any]:
        """The started loggers."""
        return list(self._trackers.started)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a started logger. On all ranks except rank 0, return an object that ignores all calls.

        Args:
            name: name of the logger.
            unwrap: if True, return the underlying object of the logging service, such as a Weights & Biases run.

        Raises:
            RoomierError: no logger has this name.
        """
        if not self.is_main_process:
            return NO_TRACKER
        found = self._trackers.named(name)
        return found.experiment if unwrap else found

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Any = None) -> None:
        """Log numbers on rank 0.

        Args:
            values: numbers by name.
            step: step of the logged values. If None, each call uses the next step.
            log_kwargs: has no effect.
        """
        if self.is_main_process:
            self._trackers.log(values, step)

    def end_training(self) -> None:
        """Close the loggers."""
        if self.is_main_process:
            self._trackers.finish()

    def gather(self, tensor: Any) -> Any:
        """Return ``tensor`` (nested tensors), concatenated over the ranks along the first dimension.

        Raises:
            TrainingError: a tensor has a different shape on another rank.
        """
        return gathered(tensor, self.ranks, self.device)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return ``input_data`` from all ranks, without the repeated samples that fill the last batch of a loader.

        Args:
            input_data: nested tensors with one row per sample, or a list of objects.
            use_gather_object: True to gather tensors as objects, so their shapes can differ between ranks.
        """
        if self.ranks.is_alone:
            return computed(input_data)
        gathers_tensors = not use_gather_object and all(isinstance(each, Tensor) for each in leaves(input_data))
        if gathers_tensors:
            data = self.gather(input_data)
        else:
            data = list(chain.from_iterable(self.ranks.gather(input_data, allows_pickle=True)))
        loader = self._accumulation.loaders[-1] if self._accumulation.loaders else None
        if loader is None or not loader.end_of_dataloader:
            return data
        if not gathers_tensors:
            return data[: loader.num_kept(len(data))]
        return map_tensors(lambda each: each[: loader.num_kept(len(each))], data)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader that skips the first ``num_batches`` batches of this rank in each epoch."""
        prepared = dataloader if type(dataloader) is PreparedLoader else self._prepared_loader(dataloader)
        return prepared.without_first(num_batches)

    def free_memory(self, *objects: Any) -> list[None]:
        """Release all prepared objects, and return None for each of ``objects``."""
        for engine in self._engines:
            engine.close()
        for each in (self._engines, self._optimizers, self._schedulers, self._loaders, self._registered):
            each.clear()
        release_cached(self.device)
        return [None for _ in objects]

    clear = free_memory

    @property
    def mixed_precision(self) -> str:
        """``"no"``, ``"fp16"`` or ``"bf16"``."""
        return {mode: word for word, mode in PRECISIONS.items()}.get(self.plan.precision.mode, "no")

    @property
    def distributed_type(self) -> str:
        """``"NO"``, ``"MULTI_CPU"``, ``"MULTI_GPU"`` or ``"FSDP"``, which are values of Accelerate's
        ``DistributedType``."""
        if self.ranks.is_alone:
            return "NO"
        if self.plan.parallel.strategy != "ddp":
            return "FSDP"
        return f"MULTI_{'CPU' if self.device.type == 'cpu' else 'GPU'}"

    @property
    def state(self) -> Accelerator:
        """This Accelerator, because it has the members of Accelerate's state, such as ``num_processes``."""
        return self

    def __repr__(self) -> str:
        place = f"rank {self.process_index} of {self.num_processes} on {self.device}"
        return f"Accelerator({self.distributed_type}, {place}, mixed_precision={self.mixed_precision!r})"

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        action = MEMBERS.get(name) or did_you_mean(name, [each for each in dir(type(self)) if each[0] != "_"])
        raise UnsupportedMemberError("accelerator", name, "is not a member of roomier's Accelerator", action)


def _folder(name: str, given: str | Path | None) -> Path:
    if given is None:
        problem = "is required, because checkpoints are not named automatically"
        action = (
            "Pass a folder, such as 'checkpoints/step-100', or create the Accelerator with "
            "project_config=ProjectConfiguration(automatic_checkpoint_naming=True)"
        )
        raise RoomierError(name, None, problem, action)
    return Path(given)


def _is_new(value: Any, kind: type, prepared: type) -> bool:
    # isinstance() treats a proxy as an instance of the original class.
    return isinstance(value, kind) and type(value) is not prepared


def _shares_parameters(optimizer: Optimizer, module: nn.Module) -> bool:
    own = {id(each) for each in module.parameters()}
    return any(id(each) in own for group in optimizer.param_groups for each in group["params"])
