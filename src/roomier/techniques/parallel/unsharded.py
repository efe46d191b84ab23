"""Base class of model wrappers that do not shard parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from roomier.core import torch_private


class Unsharded:
    """Base class of implementations of :class:`roomier.engine.parallel.Parallel` that do not shard parameters.

    Attributes:
        allows_inference_mode: True.
        trace: 0, because the ranks may run different parts of the model.
        late_parameters: empty, because no parameter is reduced separately.
        root_parameters: empty.
        units: empty.
        gathers_ahead: False.
    """

    allows_inference_mode = True
    trace = 0
    late_parameters: Sequence[nn.Parameter] = ()
    root_parameters: Sequence[nn.Parameter] = ()
    units: Sequence[nn.Module] = ()
    gathers_ahead = False

    def begin_backward(self) -> None:
        """This method is a no-op."""

    def release(self) -> None:
        """This method is a no-op, because no parameter is sharded."""

    def check_reduced(self, field: str, value: object) -> None:
        """This method is a no-op, because backward reduces the gradients."""

    def join_norms(self, norms: Mapping[Tensor, Tensor]) -> Tensor:
        return torch_private.join_norms(list(norms.values()))
