"""Chunked loss, which computes the logits in chunks and requires no change to the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from roomier.core.errors import RoomierError
from roomier.core.log import notice
from roomier.core.wrapped_forward import WrappedForward, install
from roomier.techniques.loss.lazy_logits import LazyLogits, Output, Rows, Use


class LazyForward(WrappedForward):
    """Replacement for the ``forward`` method of an output layer. It returns lazy logits; see [Note: lazy logits].

    Args:
        layer: output layer whose ``forward`` method is replaced.
        chunk_tokens: number of rows of logits in a chunk; None uses the default.
        group: ranks that call the layer with the same input; see :class:`LossOfLinear`.

    Attributes:
        reads_weights_later: True, because the weights of the layer are read after its forward pass. The weights must
            remain unsharded until then.
        use: record of the operations that use the logits.
    """

    reads_weights_later = True

    def __init__(self, layer: nn.Linear, chunk_tokens: int | None, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(layer)
        # A function, because a copy of the model cannot copy a process group.
        self._group: Callable[[], dist.ProcessGroup | None] = lambda: group
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
        output = Output(input, layer.weight, layer.bias, dtype, self.chunk_tokens, self.use, self._group())
        return LazyLogits.of(Rows(output, input, (dtype,)))


def apply_chunked_loss(
    network: nn.Module,
    blocks: Sequence[nn.Module],
    chunk_tokens: int | None,
    group: dist.ProcessGroup | None = None,
) -> nn.Linear:
    """Replace the ``forward`` method of the output layer of ``network``, so that the cross-entropy of its logits runs
    in chunks.

    Args:
        network: the model.
        blocks: blocks of the model, which do not contain the output layer.
        chunk_tokens: number of rows of logits in a chunk; None uses as many rows as fit into 64 MiB in float32.
        group: ranks that call the layer with the same input and compute the same loss. Each of them computes a share of
            the rows; see :class:`LossOfLinear`.

    Returns:
        The output layer.

    Raises:
        RoomierError: no output layer is found.
    """
    layer = find_output_layer(network, blocks)
    install(layer, LazyForward(layer, chunk_tokens, group))
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


_FIELD = "chunked_loss"
_ACTION = "Define get_output_embeddings(self) on the model to return this layer, or set chunked_loss=False"


def find_output_layer(network: nn.Module, blocks: Sequence[nn.Module]) -> nn.Linear:
    """Return the linear layer of ``network`` that maps the hidden states to the logits.

    The function returns the first of these layers that exists:

    - the layer that ``get_output_embeddings()`` of the network or of a submodule returns, as in Hugging Face's models;
    - the linear layer outside the blocks whose weight is tied to an embedding;
    - the linear layer outside the blocks that has as many outputs as an embedding has entries;
    - the last linear layer outside the blocks, if no other linear layer outside the blocks has more outputs.

    Args:
        network: the model.
        blocks: the repeated layers of ``network``, which do not contain the output layer.

    Raises:
        RoomierError: no layer was found, several layers match, or the layer is not a plain ``nn.Linear``.
    """
    names = {module: name for name, module in network.named_modules()}
    for found in (_declared(network), *_guesses(network, blocks)):
        if len(found) > 1:
            received = ", ".join(names[each] for each in found)
            raise RoomierError(_FIELD, received, "any of these layers may compute the logits", _ACTION)
        if found:
            layer = found[0]
            break
    else:
        problem = "the model has no linear layer that computes logits"
        raise RoomierError(_FIELD, type(network).__name__, problem, _ACTION)
    if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
        problem = f"{names[layer]}, which computes the logits, is a {type(layer).__name__} with another forward method"
        raise RoomierError(_FIELD, True, problem, "Use a plain torch.nn.Linear, or set chunked_loss=False")
    return layer


def _declared(network: nn.Module) -> list[nn.Module]:
    getters = (getattr(each, "get_output_embeddings", None) for each in network.modules())
    found = [getter() for getter in getters if callable(getter)]
    return [each for each in network.modules() if any(each is layer for layer in found)]


def _guesses(network: nn.Module, blocks: Sequence[nn.Module]) -> tuple[list[nn.Module], ...]:
    in_blocks = {part for block in blocks for part in block.modules()}
    linear = [each for each in network.modules() if isinstance(each, nn.Linear) and each not in in_blocks]
    embeddings = [each for each in network.modules() if isinstance(each, nn.Embedding)]
    tied = [each for each in linear if any(each.weight is embedding.weight for embedding in embeddings)]
    sizes = {each.num_embeddings for each in embeddings}
    same_size = [each for each in linear if each.out_features in sizes]
    is_last_widest = linear and linear[-1].out_features == max(each.out_features for each in linear)
    return list(tied), list(same_size), list(linear[-1:] if is_last_widest else linear)
