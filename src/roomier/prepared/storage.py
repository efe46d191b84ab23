"""Members of an Accelerator that read or write weights, checkpoints and logged values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roomier.core.errors import RoomierError
from roomier.core.log import notice
from roomier.core.ranks import Ranks
from roomier.engine.model_engine import ModelEngine
from roomier.prepared.loader import PreparedLoader
from roomier.prepared.model import PreparedModel
from roomier.prepared.optimizer import PreparedScheduler
from roomier.prepared.processes import Processes
from roomier.prepared.project import last_checkpoint, next_checkpoint, project_of, remove_oldest
from roomier.prepared.saving import full_weights, load_loop, save_loop, write_file, write_weights
from roomier.prepared.trackers import NO_TRACKER, Trackers


class Storage(Processes):
    """Members of an Accelerator that read or write weights, checkpoints and logged values.

    Args:
        ranks: all ranks.
        device: device of this rank.
        log_with: names of loggers, or logger objects.
        project_dir: folder for logs and for checkpoints with automatic names, unless ``project`` sets these folders.
        project: Accelerate's ``ProjectConfiguration``, or None.

    Attributes:
        project_configuration: ``project``, or a :class:`roomier.prepared.project.Project`. The ``iteration`` attribute
            of this object is the number of the next checkpoint with an automatic name.

    Raises:
        PlanError: checkpoints are named automatically, but no project folder is set.
    """

    def __init__(
        self, ranks: Ranks, device: torch.device, *, log_with: Any, project_dir: str | Path | None, project: Any
    ) -> None:
        super().__init__(ranks, device)
        self.project_configuration = project_of(project, project_dir)
        self._trackers = Trackers(log_with, None if self.logging_dir is None else Path(self.logging_dir))
        self._engines: list[ModelEngine] = []
        self._schedulers: list[PreparedScheduler] = []
        self._loaders: list[PreparedLoader] = []
        self._registered: list[Any] = []

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
        if not project.automatic_checkpoint_naming:
            folder = _folder("output_dir", output_dir)
            save_loop(folder, self._engines, self._states(), self.ranks)
            return str(folder)
        folder = next_checkpoint(project, self.ranks)
        if output_dir is not None:
            notice(f"save_state: checkpoints are named automatically, so {folder} is written instead of {output_dir}")
        save_loop(folder, self._engines, self._states(), self.ranks)
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


def _folder(name: str, given: str | Path | None) -> Path:
    if given is None:
        problem = "is required, because checkpoints are not named automatically"
        action = (
            "Pass a folder, such as 'checkpoints/step-100', or create the Accelerator with "
            "project_config=ProjectConfiguration(automatic_checkpoint_naming=True)"
        )
        raise RoomierError(name, None, problem, action)
    return Path(given)
