"""An optimizer that the user passed to the Trainer, for a model without ``configure_optimizers``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from roomier.core.errors import RoomierError

FIELD = "optimizer"


def own_optimizer_of(value: Any) -> Any:
    """Return ``value`` if it is an optimizer, a subclass of Optimizer, or a function; otherwise None."""
    is_class = isinstance(value, type)
    is_function = issubclass(value, Optimizer) if is_class else callable(value)
    return value if isinstance(value, Optimizer) or is_function else None


class OwnOptimizer:
    """Optimizer that the user passed for the model ``network``, or function that creates it. The strategy and the
    precision can replace the parameters of the model, so :meth:`configure` passes the final parameters to it.

    Args:
        network: the model as the user passed it.
        given: an optimizer with parameters of ``network``, or a function that receives the list of parameters and
            returns a value that ``configure_optimizers`` can return.
    """

    def __init__(self, network: nn.Module, given: Optimizer | Callable[..., Any]) -> None:
        self._given = given
        self._names = {id(each): name for name, each in network.named_parameters()}

    def configure(self, network: nn.Module) -> Any:
        """Return the optimizer of the final parameters of ``network``.

        Raises:
            RoomierError: the optimizer has parameters of a different model, or it has states of parameters that the
                strategy or the precision replaced.
        """
        if not isinstance(self._given, Optimizer):
            return self._given([each for each in network.parameters() if each.requires_grad])
        now = dict(network.named_parameters())
        groups = self._given.param_groups
        if any(id(each) not in self._names for group in groups for each in group["params"]):
            problem = "has parameters that do not belong to the model"
            raise RoomierError(FIELD, self._given, problem, "Create it with model.parameters() of this model")
        replaced = [[now[self._names[id(each)]] for each in group["params"]] for group in groups]
        if all(one is other for group, new in zip(groups, replaced, strict=True) for one, other in _pairs(group, new)):
            return self._given
        if self._given.state:
            problem = "has states of parameters that the strategy or the precision replaced"
            raise RoomierError(FIELD, self._given, problem, "Pass a function: optimizer=lambda parameters: ...")
        for group, new in zip(groups, replaced, strict=True):
            group["params"] = new
        return self._given


def _pairs(group: dict[str, Any], new: list[nn.Parameter]) -> Any:
    return zip(group["params"], new, strict=True)
