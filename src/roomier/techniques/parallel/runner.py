"""Module that runs a training step in its ``forward``, so that module wrappers apply to the step."""

from collections.abc import Callable
from typing import Any

from torch import nn

from roomier.core.errors import TrainingError


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
