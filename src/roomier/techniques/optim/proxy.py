"""Base class of the optimizer proxies that custom loops and manual optimization receive."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

_STATE = ("param_groups", "state", "defaults")


class OptimizerProxy:
    """Proxy for ``optimizer``. Attributes that a subclass does not define are read from the optimizer.

    ``isinstance`` treats the proxy as an instance of the optimizer's class, so schedulers accept the proxy. Copying or
    pickling the proxy copies or pickles the optimizer.

    Args:
        optimizer: optimizer to wrap.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.optimizer)

    def __repr__(self) -> str:
        return repr(self.optimizer)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.optimizer.__reduce_ex__(protocol)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _STATE:  # attributes of the optimizer
            setattr(self.optimizer, name, value)
        else:
            super().__setattr__(name, value)
