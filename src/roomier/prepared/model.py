"""Prepared model, which calls the network through the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from roomier.engine.model_engine import ModelEngine
from roomier.engine.optimizer_state import shard_like


class PreparedModel(nn.Module):
    """Model whose forward pass runs in the precision and with the strategy of a Plan.

    The attributes and methods of the network that ``nn.Module`` does not have are available on the prepared model.
    Calls to these methods do not use the engine.

    Attributes:
        module: network that was prepared.
        engine: the engine that runs the network.
        accelerator: the Accelerator that prepared the network.
    """

    module: nn.Module

    def __init__(self, engine: ModelEngine, accelerator: Any) -> None:
        super().__init__()
        self.module = engine.module
        self.engine = engine
        self.accelerator = accelerator
        self.training = engine.module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the network."""
        return self.engine.call(args, kwargs)

    def train(self, mode: bool = True) -> PreparedModel:
        """Set the mode of the network, and reshard parameters that an evaluation unsharded."""
        self.engine.settle()
        super().train(mode)
        return self

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which gradients accumulate and are not reduced over the ranks."""
        before, self.engine.reduces = self.engine.reduces, False
        try:
            yield
        finally:
            self.engine.reduces = before

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict of the network, with the keys of the original network. Sharded parameters are
        DTensors."""
        self.engine.settle()
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict that contains full or sharded tensors into the network."""
        own = self.state_dict()
        sharded = {name: shard_like(own.get(name), each) for name, each in state_dict.items()}
        return self.module.load_state_dict(sharded, strict=strict, assign=assign)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)
