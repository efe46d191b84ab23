"""Classification of parameters for optimizers that are selected by a string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from roomier.api.blocks import find_blocks
from roomier.techniques.optim.block_codes import can_be_coded

_NORMS = (nn.LayerNorm, nn.RMSNorm)  # the scales of other norms have one dimension
_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True)
class Trait:
    """Classification of one parameter.

    Attributes:
        decays: whether weight decay applies to the parameter. Weight decay does not apply to biases and the scales of
            norms.
        is_looked_up: whether the parameter is an embedding, or tied to an embedding.
        is_large_matrix: whether the parameter is a large weight that is not looked up. Such a parameter can have
            low-bit states.
        is_hidden: whether the parameter is a matrix of a block.
    """

    decays: bool
    is_looked_up: bool
    is_large_matrix: bool
    is_hidden: bool


def trained_parameters(
    network: nn.Module, blocks: Sequence[nn.Module] | None = None
) -> list[tuple[nn.Parameter, Trait]]:
    """Return the parameters that require gradients and their traits, in the order of the network. Tied parameters
    appear once.

    Args:
        blocks: the blocks of ``network``. None searches for blocks.
    """
    norms = {p for part in network.modules() if isinstance(part, _NORMS) for p in part.parameters(recurse=False)}
    looked_up = {p for part in network.modules() if isinstance(part, _LOOKUPS) for p in part.parameters(recurse=False)}
    of_blocks = {p for block in (find_blocks(network) if blocks is None else blocks) for p in block.parameters()}
    found = []
    for name, parameter in network.named_parameters():
        if not parameter.requires_grad:
            continue
        # T5's relative_attention_bias and Swin's relative_position_bias_table are tables of biases.
        decays = parameter.dim() >= 2 and parameter not in norms and "bias" not in name
        is_matrix = decays and parameter not in looked_up
        trait = Trait(
            decays=decays,
            is_looked_up=parameter in looked_up,
            is_large_matrix=is_matrix and can_be_coded(parameter.shape),
            is_hidden=is_matrix and parameter.dim() == 2 and parameter in of_blocks,
        )
        found.append((parameter, trait))
    return found
