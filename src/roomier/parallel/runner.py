"""The step of a user as the forward of a module: what wraps modules can then wrap steps."""

from collections.abc import Callable
from typing import Any

from torch import nn

from roomier.core.errors import TrainingError


class StepRunner(nn.Module):
    """Holds ``network``; its forward runs any function that uses it.

    ``DistributedDataParallel`` and ``fully_shard`` act around a forward. What trains is ``training_step``, which is
    none; run through this it is.

    Raises:
        TrainingError: the step reads a weight that is cut among ranks and was not gathered.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, step: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return step(*arguments)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise TrainingError(
                "training_step",
                getattr(step, "__qualname__", step),
                "uses the weight of a layer, or of a part of the model, without calling it; its forward gathers it",
                "Call the layer; or let the model name as a block the module whose forward reads the weight: "
                "def model_blocks(self): return [self.decoder]",
            ) from error
