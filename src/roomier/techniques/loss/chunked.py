"""Chunked loss, which computes the logits in chunks and requires no change to the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from roomier.core.log import notice
from roomier.core.wrapped_forward import WrappedForward, install
from roomier.techniques.loss.lazy_logits import LazyLogits, Output, Rows, Use
from roomier.techniques.loss.output_layer import find_output_layer


class LazyForward(WrappedForward):
    """Replacement for the ``forward`` method of an output layer. It returns lazy logits; see [Note: lazy logits].

    Args:
        layer: output layer whose ``forward`` method is replaced.
        chunk_tokens: number of rows of logits in a chunk; None uses the default.

    Attributes:
        reads_weights_later: True, because the weights of the layer are read after its forward pass. The weights must
            remain unsharded until then.
        use: record of the operations that use the logits.
    """

    reads_weights_later = True

    def __init__(self, layer: nn.Linear, chunk_tokens: int | None) -> None:
        super().__init__(layer)
        self.layer = layer
        self.chunk_tokens = chunk_tokens
        self.use = Use()

    def __call__(self, input: Tensor) -> Any:
        layer, device_type = self.layer, input.device.type
        is_cast = torch.is_autocast_enabled(device_type) and input.dtype is not torch.float64
        is_wrong = not is_cast and input.dtype is not layer.weight.dtype  # If the dtypes differ, torch raises an error.
        if is_wrong or torch.compiler.is_compiling():  # The compiler requires real tensors.
            return self.forward(input)
        dtype = torch.get_autocast_dtype(device_type) if is_cast else input.dtype
        output = Output(input, layer.weight, layer.bias, dtype, self.chunk_tokens, self.use)
        return LazyLogits.of(Rows(output, input, (dtype,)))


def apply_chunked_loss(network: nn.Module, blocks: Sequence[nn.Module], chunk_tokens: int | None) -> nn.Linear:
    """Replace the ``forward`` method of the output layer of ``network``, so that the cross-entropy of its logits runs
    in chunks.

    Args:
        network: the model.
        blocks: blocks of the model, which do not contain the output layer.
        chunk_tokens: number of rows of logits in a chunk; None uses as many rows as fit into 64 MiB in float32.

    Returns:
        The output layer.

    Raises:
        RoomierError: no output layer is found.
    """
    layer = find_output_layer(network, blocks)
    install(layer, LazyForward(layer, chunk_tokens))
    return layer


class LossWatch:
    """Context manager around the first training step. It prints a notice if no loss was computed in chunks.

    Args:
        layer: the result of :func:`apply_chunked_loss`.

    Attributes:
        is_of_loss: True, because the watch must include the computation of the loss.
    """

    is_of_loss = True

    def __init__(self, layer: nn.Linear) -> None:
        forward = layer.__dict__["forward"]
        assert isinstance(forward, LazyForward)
        self._use = forward.use

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self.report()

    def report(self) -> None:
        """Print a notice if no loss was computed in chunks."""
        if not self._use.is_chunked:
            notice(
                "chunked loss: no memory is saved, because the first training step passed no logits of the shape "
                "[tokens, classes] from the output layer directly to cross_entropy. Compute the loss directly from "
                "these logits, or set chunked_loss=False"
            )
