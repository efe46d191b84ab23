"""Base class of the wrappers that distribute a model across ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from roomier.core import torch_private
from roomier.core.errors import TrainingError


class Parallel:
    """Wrapper that distributes a module across ranks, with the methods that the engine calls in each step. This base
    class is the wrapper for a single rank, which neither shards nor reduces.

    Attributes:
        runner: module that calls the step and unshards its parameters if necessary. None on a single rank. The module
            can change between two steps.
        loss_factor: factor by which losses are multiplied, so that the reduced gradients are the sum over the ranks.
        allows_inference_mode: whether parameters can be trained after they were unsharded in inference mode.
        late_parameters: parameters whose gradients are complete only after :meth:`end_backward`.
        root_parameters: parameters of blocks whose gradients are reduced after the gradients of all blocks.
        units: modules that each all-gather their parameters together, in forward order; empty without sharding.
        gathers_ahead: whether the forward pass of a unit starts the all-gather of the next unit's parameters.
    """

    runner: nn.Module | None = None
    loss_factor = 1.0
    allows_inference_mode = True
    late_parameters: Sequence[nn.Parameter] = ()
    root_parameters: Sequence[nn.Parameter] = ()
    units: Sequence[nn.Module] = ()
    gathers_ahead = False

    @property
    def trace(self) -> int:
        """Hash of the collectives of the units that have run so far. The hash must be equal on all ranks. If the hashes
        differ, a rank received parameters or gradients of the wrong unit. The hash is 0 if no parameter is sharded,
        because the ranks may then run different parts of the model."""
        return 0

    def begin_micro_batch(self, *, is_first: bool, is_last: bool) -> None:
        """Prepare the forward pass of the next micro-batch of a step."""

    def set_last(self, *, is_last: bool) -> None:
        """Set whether the next backward pass is the last one of its step."""

    def begin_backward(self) -> None:
        """Prepare for a backward pass, whose gradients are added to the existing gradients."""

    def end_backward(self) -> None:
        """Finish a backward pass."""

    def end_update(self) -> None:
        """Finish an update of the parameters."""

    def release(self) -> None:
        """Free unsharded parameters. Call this after an evaluation, or before reading parameters by name."""

    def trained_parameters_changed(self) -> None:
        """Account for parameters that were frozen or unfrozen since the last step. Every rank must call this method."""

    def check_reduced(self, field: str, value: object) -> None:
        """Check that the gradients on each rank are the gradients of the full batch, so that they can be changed.

        Raises:
            TrainingError: the optimizer reduces the gradients. The error names ``field`` and its ``value``.
        """

    def join_norms(self, norms: Mapping[Tensor, Tensor]) -> Tensor:
        """Return the norm of all gradients, over all ranks (0-dim).

        Args:
            norms: norm of this rank's shard of each gradient, by parameter.
        """
        return torch_private.join_norms(list(norms.values()))


class StepRunner(nn.Module):
    """Module that contains ``network`` and whose ``forward`` runs any function that uses the network.

    ``DistributedDataParallel`` and ``fully_shard`` act before and after a forward pass. ``training_step`` is not a
    forward pass, so the engine calls it through this module.

    Args:
        network: model that the steps use.

    Raises:
        TrainingError: the step reads a sharded weight that was not all-gathered.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, step: Callable[..., Any], *arguments: Any) -> Any:
        """Return ``step(*arguments)``."""
        try:
            return step(*arguments)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise TrainingError(
                "training_step",
                getattr(step, "__qualname__", step),
                "reads the weight of a layer without calling the layer, whose forward pass would all-gather the weight",
                "Call the layer, or declare the module whose forward method reads the weight as a block: "
                "def model_blocks(self): return [self.decoder]",
            ) from error
