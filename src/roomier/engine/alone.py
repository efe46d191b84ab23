"""A model on a single rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from roomier.core import torch_private


class Alone:
    """:class:`Parallel` for a single rank, which neither shards nor reduces."""

    runner = None
    loss_factor = 1.0
    allows_inference_mode = True
    trace = 0
    late_parameters: Sequence[nn.Parameter] = ()
    root_parameters: Sequence[nn.Parameter] = ()
    units: Sequence[nn.Module] = ()
    gathers_ahead = False

    def begin_micro_batch(self, *, is_first: bool, is_last: bool) -> None: ...
    def begin_backward(self) -> None: ...
    def end_backward(self) -> None: ...
    def end_update(self) -> None: ...
    def release(self) -> None: ...
    def trained_parameters_changed(self) -> None: ...

    def clip_grad_norm_(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    def clip_grad_value_(self, parameters: Sequence[Tensor], max_value: float) -> None:
        nn.utils.clip_grad_value_(parameters, max_value)

    def join_norms(self, norms: Mapping[Tensor, Tensor]) -> Tensor:
        return torch_private.join_norms(list(norms.values()))
