"""BERT with a classifier for sequences (Devlin et al. 2018, arXiv 1810.04805).

The suffix of a tensor's name is its shape:

    B  sequences in the batch      H  attention heads
    T  tokens in a sequence        K  width of one head, D / H
    D  width of the model          C  classes
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.transformer_lm import Block, draw_weights


@dataclass(frozen=True)
class BertConfig:
    """Configuration of a :class:`Bert`. The defaults describe ``bert-large-uncased`` with two classes.

    Attributes:
        vocab_size: number of different tokens.
        context: maximum length of a sequence in tokens.
        num_layers: number of blocks.
        num_heads: number of attention heads per block.
        width: size of the hidden states.
        dropout: probability of dropout on embeddings, attention weights and both residual branches.
        num_classes: number of classes.
        fused_attention: True to compute attention without materializing the scores. If False, the scores are
            materialized, as in Transformers until 2023.
    """

    vocab_size: int = 30_522
    context: int = 512
    num_layers: int = 24
    num_heads: int = 16
    width: int = 1024
    dropout: float = 0.1
    num_classes: int = 2
    fused_attention: bool = True


class Attention(nn.Module):
    """Multi-head self-attention over all tokens."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the attention output, ``[B, T, D]``."""
        dropout = self.config.dropout if self.training else 0.0
        q_BHTK, k_BHTK, v_BHTK = (self._split(each(x_BTD)) for each in (self.query, self.key, self.value))
        if self.config.fused_attention:
            y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, dropout_p=dropout)
        else:
            scores_BHTT = q_BHTK @ k_BHTK.transpose(2, 3) / math.sqrt(q_BHTK.shape[-1])
            y_BHTK = F.dropout(scores_BHTT.softmax(dim=-1), dropout) @ v_BHTK
        y_BTD: Tensor = self.out(y_BHTK.transpose(1, 2).flatten(2))
        return y_BTD

    def _split(self, x_BTD: Tensor) -> Tensor:
        B, T, _ = x_BTD.shape
        return x_BTD.view(B, T, self.config.num_heads, -1).transpose(1, 2)


class Bert(nn.Module):
    """BERT with a classifier for the first token. ``blocks`` contains the identical layers.

    Args:
        config: sizes of the model.

    Example:
        >>> model = Bert(BertConfig(num_layers=12, num_heads=12, width=768))
        >>> logits, loss = model(input_ids, labels)
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.segments = nn.Embedding(2, config.width)
        self.norm = nn.LayerNorm(config.width, eps=1e-12)
        self.dropout = nn.Dropout(config.dropout)
        sizes: dict[str, Any] = {"dropout": config.dropout, "activation": F.gelu, "eps": 1e-12}
        self.blocks = nn.ModuleList(
            Block(Attention(config), config.width, 4 * config.width, **sizes) for _ in range(config.num_layers)
        )
        self.pooler = nn.Linear(config.width, config.width)
        self.classifier = nn.Linear(config.width, config.num_classes)
        draw_weights(self, std=0.02)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return the logits ``[B, C]``. If ``labels`` is given, also return the mean cross-entropy.

        All tokens belong to the first segment.

        Args:
            input_ids: tokens ``[B, T]``, with ``T`` at most ``config.context``. Sequences have no padding.
            labels: class of each sequence, ``[B]``.
        """
        T = input_ids.shape[1]
        positions_T = torch.arange(T, device=input_ids.device)
        x_BTD = self.tokens(input_ids) + self.segments(torch.zeros_like(input_ids)) + self.positions(positions_T)
        x_BTD = self.dropout(self.norm(x_BTD))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BC: Tensor = self.classifier(self.dropout(self.pooler(x_BTD[:, 0]).tanh()))
        if labels is None:
            return logits_BC
        return logits_BC, F.cross_entropy(logits_BC, labels)
