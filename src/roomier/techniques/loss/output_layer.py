"""Finds the layer of a model that computes the logits."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from roomier.core.errors import RoomierError

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
