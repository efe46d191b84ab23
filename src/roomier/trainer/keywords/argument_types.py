"""Types of Trainer arguments that the command line and Python code accept in different forms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.optim import Optimizer

    OptimizerArgument = dict[str, Any] | str | Optimizer | Callable[[list[nn.Parameter]], Optimizer] | None
else:  # the command line reads this type, and accepts a name or a dict
    OptimizerArgument = dict[str, Any] | str | None
