"""Hooks: methods of a Module and a DataModule that are called at defined points of a run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roomier.core.tree import to_device


class DataHooks:
    """Methods that provide the data of a run, which :class:`roomier.DataModule` and :class:`roomier.Module` share. A
    loader that is passed to the Trainer replaces the data of both, and a DataModule replaces the data of the module.

    Attributes:
        prepare_data_per_node: if True, run ``prepare_data`` in one process per node, for files on local disks. If
            False, run ``prepare_data`` in only one process across all nodes, for files on shared storage.
    """

    prepare_data_per_node: bool = True

    def prepare_data(self) -> None:
        """Prepare files, for example by downloading and tokenizing them. Do not set attributes here.

        Called before ``setup``, in one process per node, or in only one process across all nodes (see
        ``prepare_data_per_node``).
        """

    def setup(self, stage: str) -> None:
        """Create the datasets, or parts of the model that depend on them. Called in every process at the start of
        ``fit``, ``validate``, ``test`` or ``predict``.

        Args:
            stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        """

    def teardown(self, stage: str) -> None:
        """Release resources. Called in every process when a Trainer method ends, even after an error. See :meth:`setup`
        for ``stage``."""

    def train_dataloader(self) -> Any:
        """Return the training data: a ``DataLoader``, an iterable of batches, or a list of batches."""
        return None

    def val_dataloader(self) -> Any:
        """Return the validation data: a loader as in :meth:`train_dataloader`, or a list or dict of loaders."""
        return None

    def test_dataloader(self) -> Any:
        """Return the test data in the same form as :meth:`val_dataloader`."""
        return None

    def predict_dataloader(self) -> Any:
        """Return the data for ``predict`` in the same form as :meth:`val_dataloader`."""
        return None

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Modify ``batch`` on the host and return it.

        If a module and a DataModule override a transfer hook, only the hook of the DataModule is called.
        """
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move ``batch`` to ``device`` and return it."""
        return to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Modify ``batch`` on the device and return it."""
        return batch


class ModuleHooks(DataHooks, nn.Module):
    """Hooks of :class:`roomier.Module`. By default, a hook does nothing, unless its docstring describes a default.

    Callbacks have the same hooks, with the Trainer and the module as additional first arguments. Hooks of callbacks are
    called first.
    """

    def on_fit_start(self) -> None:
        """Called at the start of a fit, after checkpoints are restored and before the sanity check."""

    def on_fit_end(self) -> None:
        """Called at the end of a fit that was not interrupted."""

    def on_train_start(self) -> None:
        """Called before the first training step."""

    def on_train_end(self) -> None:
        """Called after the last training step."""

    def on_train_epoch_start(self) -> None:
        """Called before the first batch of an epoch, but not if the run resumes within an epoch."""

    def on_train_epoch_end(self) -> None:
        """Called at the end of an epoch, before metrics of the epoch are reduced and logged."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Called before the forward pass of a micro-batch. Return -1 to skip the rest of the epoch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after a micro-batch. For the last micro-batch of a step, this hook is called after the update.

        Args:
            outputs: dict with the output of ``training_step``. The value of ``"loss"`` is the loss that was
                backpropagated.
        """

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Called before gradients are zeroed, after the first forward pass of a step."""

    def on_before_backward(self, loss: Tensor) -> None:
        """Called with the loss (0-dim tensor) before each backward pass."""

    def on_after_backward(self) -> None:
        """Called after each backward pass."""

    def on_gradient(self, name: str, gradient: Tensor) -> None:
        """Called with each gradient of a step; see :meth:`roomier.Callback.on_gradient`."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called after the gradients of a step are computed, before clipping and the update."""

    def on_validation_model_zero_grad(self) -> None:
        """Called before a validation during a fit. By default, free the gradients."""
        self.zero_grad()

    def on_validation_model_eval(self) -> None:
        """Called before a validation. By default, set evaluation mode."""
        self.eval()

    def on_validation_model_train(self) -> None:
        """Called after a validation if the module overrides this method, as in :meth:`on_test_model_train`."""

    def on_test_model_eval(self) -> None:
        """Called before a test. By default, set evaluation mode."""
        self.eval()

    def on_test_model_train(self) -> None:
        """Called after a test if the module overrides this method. By default, each submodule returns to its previous
        mode."""

    def on_predict_model_eval(self) -> None:
        """Called before a prediction run. By default, set evaluation mode."""
        self.eval()

    def on_predict_model_train(self) -> None:
        """Called after a prediction run if the module overrides this method, as in :meth:`on_test_model_train`."""

    def on_validation_start(self) -> None:
        """Called at the start of a validation run."""

    def on_validation_end(self) -> None:
        """Called at the end of a validation run, after its metrics are reduced and logged."""

    def on_validation_epoch_start(self) -> None:
        """Called before the first validation batch."""

    def on_validation_epoch_end(self) -> None:
        """Called after the last validation batch, before metrics are reduced and logged."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before a validation batch."""

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after a validation batch with the output of ``validation_step``."""

    def on_test_start(self) -> None:
        """Called at the start of a test run."""

    def on_test_end(self) -> None:
        """Called at the end of a test run, after its metrics are reduced and logged."""

    def on_test_epoch_start(self) -> None:
        """Called before the first test batch."""

    def on_test_epoch_end(self) -> None:
        """Called after the last test batch, before metrics are reduced and logged."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before a test batch."""

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after a test batch with the output of ``test_step``."""

    def on_predict_start(self) -> None:
        """Called at the start of a prediction run."""

    def on_predict_end(self) -> None:
        """Called at the end of a prediction run, after its metrics are reduced and logged."""

    def on_predict_epoch_start(self) -> None:
        """Called before the first prediction batch."""

    def on_predict_epoch_end(self) -> None:
        """Called after the last prediction batch, before metrics are reduced and logged."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before a prediction batch."""

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after a prediction batch with the output of ``predict_step``."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Called before a checkpoint is saved. Add tensors or plain data to ``checkpoint``."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Called before a checkpoint is loaded. Changes that this hook makes to ``checkpoint`` are loaded."""
