"""A loss whose logits are never whole in memory, for models as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from roomier.core.log import notice
from roomier.core.wrapped_forward import WrappedForward, install
from roomier.loss.lazy_logits import LazyLogits, Output, Rows, Use
from roomier.loss.output_layer import find_output_layer


class LazyForward(WrappedForward):
    """Of an output layer: returns logits that are computed when somebody reads them."""

    reads_weights_later = True

    def __init__(self, layer: nn.Linear, chunk_tokens: int | None) -> None:
        super().__init__(layer)
        self.layer = layer
        self.chunk_tokens = chunk_tokens
        self.use = Use()

    def __call__(self, input: Tensor) -> Any:
        layer, device_type = self.layer, input.device.type
        is_cast = torch.is_autocast_enabled(device_type) and input.dtype is not torch.float64
        is_wrong = not is_cast and input.dtype is not layer.weight.dtype  # torch says so
        if is_wrong or torch.compiler.is_compiling():  # the compiler needs real tensors
            return self.forward(input)
        dtype = torch.get_autocast_dtype(device_type) if is_cast else input.dtype
        output = Output(input, layer.weight, layer.bias, dtype, self.chunk_tokens, self.use)
        return LazyLogits.of(Rows(output, input, (dtype,)))


def apply_chunked_loss(network: nn.Module, blocks: Sequence[nn.Module], chunk_tokens: int | None) -> nn.Linear:
    """Let the output layer of ``network`` and the cross-entropy after it compute in chunks.

    Args:
        chunk_tokens: rows of logits at a time; None takes as many as have 64 MiB in float32.

    Returns:
        That layer.

    Raises:
        RoomierError: no output layer is found.
    """
    layer = find_output_layer(network, blocks)
    install(layer, LazyForward(layer, chunk_tokens))
    return layer


class LossWatch:
    """A context around the first forward: tells where no loss was computed in chunks.

    Args:
        layer: from :func:`apply_chunked_loss`.
    """

    def __init__(self, layer: nn.Linear) -> None:
        forward = layer.__dict__["forward"]
        assert isinstance(forward, LazyForward)
        self._use = forward.use

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None and not self._use.is_chunked:
            notice(
                "chunked loss: nothing is saved: the first training step gave no logits to cross_entropy as the output "
                "layer made them, [tokens, classes]; compute the loss from them directly, or leave chunked_loss out"
            )
