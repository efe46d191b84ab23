"""Wrapper for a model that is not a roomier.Module."""

from __future__ import annotations

from torch import nn

from roomier.api.module import Module


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
