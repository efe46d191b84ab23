"""A module that is no roomier.Module, and the Module around it."""

from __future__ import annotations

from torch import nn

from roomier.api.module import Module


class WrappedModule(Module):
    """Stands for ``network``: checkpoints hold its names, without a prefix.

    Attributes:
        network: what the user made.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network


def network_of(module: Module) -> nn.Module:
    """The module whose parameters are trained and stored by name."""
    return module.network if isinstance(module, WrappedModule) else module
