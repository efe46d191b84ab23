"""Transformer language model from NeMo (2020): causal attention and LayerNorm after each residual connection.

The suffix of a tensor's name is its shape:

    B  sequences in the batch      H  attention heads
    T  tokens in a sequence        K  width of one head, D / H
    D  width of the model          V  tokens in the vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roomier.models.gpt import Attention


@dataclass(frozen=True)
class TransformerLMConfig:
    """Configuration of a :class:`TransformerLM`. The defaults describe the model of Lightning Sharded with 1.2 billion
    parameters.

    The article about Lightning Sharded states the number of layers and the width. The other values are from
    ``transformer_lm_config.yaml`` of NeMo.

    Attributes:
        vocab_size: number of different tokens.
        context: maximum length of a sequence in tokens.
        num_layers: number of blocks.
        num_heads: number of attention heads per block.
        width: size of the hidden states.
        inner_width: hidden size of the feed-forward network.
        dropout: probability of dropout on embeddings, attention weights and both residual branches.
    """

    vocab_size: int = 30_000
    context: int = 256
    num_layers: int = 22
    num_heads: int = 8
    width: int = 3072
    inner_width: int = 2048
    dropout: float = 0.0


class Block(nn.Module):
    """Attention and feed-forward network, each followed by a residual connection and LayerNorm."""

    def __init__(
        self,
        attention: nn.Module,
        width: int,
        inner_width: int,
        *,
        dropout: float,
        activation: Callable[[Tensor], Tensor] = F.relu,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.norm_attention = nn.LayerNorm(width, eps=eps)
        self.up = nn.Linear(width, inner_width)
        self.down = nn.Linear(inner_width, width)
        self.norm_mlp = nn.LayerNorm(width, eps=eps)
        self.dropout = nn.Dropout(dropout)
        self._activation = activation

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the hidden states after the block, ``[B, T, D]``."""
        x_BTD = self.norm_attention(x_BTD + self.dropout(self.attention(x_BTD)))
        y_BTD: Tensor = self.norm_mlp(x_BTD + self.dropout(self.down(self._activation(self.up(x_BTD)))))
        return y_BTD


class TransformerLM(nn.Module):
    """Transformer language model. ``blocks`` contains the identical layers. The output layer uses the weights of the
    token embedding.

    Args:
        config: sizes of the model.

    Example:
        >>> model = TransformerLM(TransformerLMConfig(num_layers=2, num_heads=4, width=64))
        >>> logits, loss = model(input_ids, targets)
    """

    sinusoids: Tensor

    def __init__(self, config: TransformerLMConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.register_buffer("sinusoids", sinusoids(config.context, config.width), persistent=False)
        self.norm = nn.LayerNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            Block(Attention(config), config.width, config.inner_width, dropout=config.dropout)  # type: ignore[arg-type]
            for _ in range(config.num_layers)
        )
        self.head = nn.Linear(config.width, config.vocab_size)
        self.head.weight = self.tokens.weight
        draw_weights(self, std=1 / math.sqrt(config.width))

    def forward(self, input_ids: Tensor, targets: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return the logits ``[B, T, V]``. If ``targets`` is given, also return the mean cross-entropy in nats per
        target token.

        Args:
            input_ids: tokens ``[B, T]``, with ``T`` at most ``config.context``.
            targets: next token at each position, ``[B, T]``; -100 is ignored.
        """
        T = input_ids.shape[1]
        embedded_BTD = self.tokens(input_ids)
        x_BTD = self.dropout(self.norm(embedded_BTD + self.sinusoids[:T].to(embedded_BTD.dtype)))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV: Tensor = self.head(x_BTD)
        if targets is None:
            return logits_BTV
        return logits_BTV, F.cross_entropy(logits_BTV.flatten(0, 1), targets.flatten())


def draw_weights(network: nn.Module, std: float) -> None:
    """Draw the weights of linear layers and embeddings from a normal distribution, and set biases to zero."""
    for each in network.modules():
        if isinstance(each, (nn.Linear, nn.Embedding)):
            nn.init.normal_(each.weight, std=std)
        if isinstance(each, nn.Linear):
            nn.init.zeros_(each.bias)


def sinusoids(context: int, width: int) -> Tensor:
    """Return position encodings, ``[context, width]`` (Vaswani et al. 2017, section 3.5). The encodings are divided by
    the square root of the width, so that they have the scale of the token embedding."""
    rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    angles = torch.arange(context)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1) / math.sqrt(width)
