"""A plain ``nn.Module`` whose ``forward`` method returns a loss, wrapped as a Module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from roomier.api.loss_terms import (
    compares_samples,
    count_loss_terms,
    counts_samples,
    ignored_label,
    is_shifted_inside,
    num_objects,
    reduction_of,
    weights_classes,
)
from roomier.api.module import WrappedModule
from roomier.core.errors import RoomierError
from roomier.core.log import notice
from roomier.core.tree import batch_size_of


class ForwardModule(WrappedModule):
    """Module that wraps a plain ``nn.Module``.

    The wrapper calls ``network(**batch)`` for a mapping, ``network(*batch)`` for a list or tuple, and
    ``network(batch)`` otherwise. The loss is the output itself if the output is a 0-dim tensor. Otherwise, the loss is
    the entry or attribute ``loss`` of the output (as in Hugging Face models), or the first or last item of the output
    if that item is a 0-dim tensor. The loss is logged as ``train_loss``, ``val_loss`` and ``test_loss``. Checkpoints
    contain the parameter names of ``network``, without a prefix.

    Args:
        network: the module to wrap.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        self.loss_reduction = reduction_of(network)
        self._is_shifted_inside = is_shifted_inside(network)
        self._ignored_label = ignored_label(network)
        self._counts_samples = counts_samples(network)
        self._has_reported = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the network."""
        return self.network(*args, **kwargs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of the network and log it as ``train_loss``."""
        loss = self._loss(batch)
        if not self._has_reported:
            self._report_inseparable_loss(batch, loss)
        self.log("train_loss", loss.detach(), prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log the loss as ``val_loss``."""
        self._log_loss("val_loss", batch)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log the loss as ``test_loss``."""
        self._log_loss("test_loss", batch)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Return the output of the network."""
        return call_with_batch(self.network, batch)

    def num_loss_terms(self, batch: Any) -> int | Tensor:
        """Return the number of terms of the loss, according to the class and configuration of the network."""
        if self._counts_samples:
            return batch_size_of(batch)
        objects = num_objects(batch)
        if objects is not None:
            return objects
        return count_loss_terms(batch, is_shifted_inside=self._is_shifted_inside, ignored_label=self._ignored_label)

    def _report_inseparable_loss(self, batch: Any, loss: Tensor) -> None:
        self._has_reported = True
        num_parts = self.trainer.accumulate_grad_batches * self.trainer.num_data_ranks if self.is_attached else 1
        reason = None
        if compares_samples(batch):
            reason = "compares the samples of a batch with each other", "Samples are compared only within a part"
        elif weights_classes(loss):
            reason = "divides by the class weights of the targets", "Each part is divided by the weights of its targets"
        if num_parts > 1 and reason is not None:
            notice(
                f"the loss of {type(self.network).__name__} {reason[0]}, but a global batch is split into {num_parts} "
                f"parts. {reason[1]}, so the mean of the gradients over the parts differs from the gradient of the "
                "full batch"
            )

    def _log_loss(self, name: str, batch: Any) -> None:
        # With this weighting, the value of an epoch is the mean over all terms, even if batch sizes differ.
        self.log(name, self._loss(batch), prog_bar=True, batch_size=self.num_loss_terms(batch))

    def _loss(self, batch: Any) -> Tensor:
        output = call_with_batch(self.network, batch)
        loss = find_loss(output)
        if loss is None:
            raise RoomierError(
                "model",
                type(self.network).__name__,
                f"its forward method returned a {type(output).__name__} without a scalar loss",
                "Return the loss (pass `labels` to Hugging Face models), or use a roomier.Module with training_step",
            )
        if loss.is_complex():
            problem = "its forward method returned a complex loss, but a loss must be real"
            raise RoomierError(
                "model", type(self.network).__name__, problem, "Return a real loss, for example loss.abs()"
            )
        return loss


def call_with_batch(network: nn.Module, batch: Any) -> Any:
    """Call ``network`` with ``batch`` as keyword arguments, as positional arguments, or as one argument, depending on
    the type of ``batch``."""
    try:
        if isinstance(batch, Mapping):
            return network(**batch)
        if isinstance(batch, (list, tuple)):
            return network(*batch)
        return network(batch)
    except TypeError as error:
        error.add_note(_how_it_was_called(network, batch))
        raise


def _how_it_was_called(network: nn.Module, batch: Any) -> str:
    name, kind = type(network).__name__, type(batch).__name__
    if isinstance(batch, Mapping):
        return f"roomier called {name}(**batch) with the keys {sorted(map(str, batch))} of a {kind}"
    if isinstance(batch, (list, tuple)):
        return f"roomier called {name}(*batch) with the {len(batch)} items of a {kind}"
    return f"roomier called {name}(batch) with a {kind}"


def find_loss(output: Any) -> Tensor | None:
    """Return the scalar loss in the output of a forward pass; None if no loss is found."""
    if isinstance(output, Mapping):
        candidates = [output.get("loss")]
    elif isinstance(output, (list, tuple)):
        candidates = [output[0], output[-1]] if output else []
    else:
        candidates = [output, getattr(output, "loss", None)]
    return next((c for c in candidates if isinstance(c, Tensor) and c.numel() == 1), None)
