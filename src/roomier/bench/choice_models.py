"""Random models of several kinds for ``roomier bench choice``. A number and a seed define each model."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roomier.api.module import Module
from roomier.bench.step_time import MLP
from roomier.bench.strategy_ranks import TrainedGPT
from roomier.models.gpt import GPTConfig

KINDS = ("gpt", "mlp", "conv", "bert")


class Encoder(Module):
    """A bidirectional Transformer encoder, like BERT."""

    def __init__(self, vocab_size: int, width: int, num_layers: int, seq_len: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.positions = nn.Parameter(torch.zeros(seq_len, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, activation="gelu", batch_first=True)
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int = 0) -> Tensor:
        tokens, labels = batch
        hidden = self.embedding(tokens) + self.positions
        for layer in self.layers:
            hidden = layer(hidden)
        scores = self.head(self.norm(hidden))
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


class ConvNet(Module):
    """Residual blocks of two convolutions with group norms."""

    def __init__(self, num_channels: int, num_blocks: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, num_channels, 4, stride=4)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.GroupNorm(8, num_channels),
                nn.ReLU(),
                nn.Conv2d(num_channels, num_channels, 3, padding=1),
                nn.GroupNorm(8, num_channels),
                nn.ReLU(),
                nn.Conv2d(num_channels, num_channels, 3, padding=1),
            )
            for _ in range(num_blocks)
        )
        self.classes = nn.Linear(num_channels, 100)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int = 0) -> Tensor:
        images, labels = batch
        hidden = self.stem(images)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return F.cross_entropy(self.classes(hidden.mean((2, 3))), labels)


@dataclass(frozen=True)
class Drawn:
    """A model, the batch of each rank, and a memory budget.

    Attributes:
        kind: one of :data:`KINDS`.
        num_ranks: number of ranks.
        sizes: mapping from names to sizes of the model and of one sample.
        batch_size: number of samples per rank.
        tightness: position of the budget between the smallest peak (0) and the largest peak (1) of all plans.
    """

    kind: str
    num_ranks: int
    sizes: dict[str, int]
    batch_size: int
    tightness: float

    @property
    def name(self) -> str:
        """Kind, sizes and batch size, as text."""
        return " ".join([self.kind, *(f"{name}={size}" for name, size in self.sizes.items()), f"x{self.batch_size}"])

    def module(self) -> Module:
        """Return a new module with the same initial weights in every call."""
        torch.manual_seed(0)
        sizes = dict(self.sizes)
        if self.kind == "gpt":
            depth, width = sizes["layers"], sizes["width"]
            config = GPTConfig(sizes["vocab"], sizes["tokens"], num_layers=depth, num_heads=4, width=width, dropout=0.0)
            return TrainedGPT(config)
        if self.kind == "bert":
            return Encoder(sizes["vocab"], sizes["width"], sizes["layers"], sizes["tokens"])
        if self.kind == "mlp":
            return MLP(sizes["width"], sizes["layers"])
        return ConvNet(sizes["channels"], sizes["layers"])

    def batch(self, num_samples: int) -> tuple[Tensor, Tensor]:
        """Return random inputs and targets of ``num_samples`` samples."""
        if self.kind == "mlp":
            shape = (num_samples, self.sizes["rows"], self.sizes["width"])
            return torch.randn(shape), torch.randn(shape)
        if self.kind == "conv":
            return torch.randn(num_samples, 3, 32, 32), torch.randint(100, (num_samples,))
        tokens = torch.randint(self.sizes["vocab"], (num_samples, self.sizes["tokens"]))
        return tokens, tokens.roll(-1, 1)


def drawn(number: int, seed: int) -> Drawn:
    """Return the model and budget that ``number`` and ``seed`` define. Kinds and numbers of ranks alternate."""
    draw = random.Random(f"{seed}, {number}")
    kind = KINDS[number // 2 % len(KINDS)]
    sizes: dict[str, Any]
    if kind == "mlp":
        sizes = {"width": draw.choice([256, 384, 512]), "layers": draw.choice([2, 3, 4]), "rows": draw.choice([8, 32])}
    elif kind == "conv":
        sizes = {"channels": draw.choice([128, 160, 192]), "layers": draw.choice([2, 3, 4])}
    else:
        sizes = {
            "vocab": draw.choice([512, 2048, 4096]),
            "width": draw.choice([128, 192, 256]),
            "layers": draw.choice([3, 4]),
            "tokens": draw.choice([32, 64]),
        }
    return Drawn(kind, 1 + number % 2, sizes, draw.choice([2, 4, 6]), draw.uniform(0, 1))
