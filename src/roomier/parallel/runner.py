"""The step of a user as the forward of a module: what wraps modules can then wrap steps."""

from collections.abc import Callable
from typing import Any

from torch import nn


class StepRunner(nn.Module):
    """Holds ``network``; its forward runs any function that uses it.

    ``DistributedDataParallel`` and ``fully_shard`` act around a forward. What trains is ``training_step``, which is
    none; run through this it is.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, step: Callable[[Any], Any], batch: Any) -> Any:
        return step(batch)
