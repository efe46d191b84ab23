"""A small GPT and its training loop, for comparisons of the simulated device with the CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

VOCABULARY = 64
CONTEXT = 16


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        q, k, v = (each.view(B, T, 4, D // 4).transpose(1, 2) for each in self.qkv(self.norm1(x_BTD)).split(D, -1))
        with sdpa_kernel(SDPBackend.MATH):  # the kernel of the simulated device
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.dropout(self.out(attended.transpose(1, 2).reshape(B, T, D)))
        return x_BTD + self.mlp(self.norm2(x_BTD))


class GPT(nn.Module):
    """Tied embeddings, ``num_blocks`` blocks. ``forward`` returns the loss of the next token."""

    def __init__(self, *, width: int = 32, num_blocks: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        inputs, targets = tokens_BT[:, :-1], tokens_BT[:, 1:]
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def batches(num_batches: int, size: int = 4) -> list[Tensor]:
    """Return batches of tokens [size, CONTEXT + 1] on the CPU, the same in each call."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (size, CONTEXT + 1), generator=generator) for _ in range(num_batches)]
