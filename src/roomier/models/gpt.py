"""GPT-2 as in minGPT, with learned positions, pre-LayerNorm, GELU and causal attention.

The suffix of a tensor's name is its shape:

    B  sequences in the batch      H  attention heads
    T  tokens in a sequence        K  width of one head, D / H
    D  width of the model          V  tokens in the vocabulary
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roomier.core.errors import RoomierError, did_you_mean

# Mapping from each name to (num_layers, num_heads, width), as in minGPT.
SIZES = {
    "openai-gpt": (12, 12, 768),
    "gpt2": (12, 12, 768),
    "gpt2-medium": (24, 16, 1024),
    "gpt2-large": (36, 20, 1280),
    "gpt2-xl": (48, 25, 1600),
    "gopher-44m": (8, 16, 512),
    "gpt-mini": (6, 6, 192),
    "gpt-micro": (4, 4, 128),
    "gpt-nano": (3, 3, 48),
}


@dataclass(frozen=True)
class GPTConfig:
    """Configuration of a :class:`GPT`. The defaults describe ``gpt2``.

    Attributes:
        vocab_size: number of different tokens.
        context: maximum length of a sequence in tokens, and number of learned positions.
        num_layers: number of blocks.
        num_heads: number of attention heads per block.
        width: size of the hidden states.
        dropout: probability of dropout on embeddings, attention weights and both residual branches.
        tied_head: True to use the weights of the token embedding in the output layer. In minGPT, the output layer has
            separate weights.

    Raises:
        RoomierError: a size is not positive, ``width`` is not a multiple of ``num_heads``, or ``dropout`` is outside
            ``[0, 1)``.
    """

    vocab_size: int = 50257
    context: int = 1024
    num_layers: int = 12
    num_heads: int = 12
    width: int = 768
    dropout: float = 0.1
    tied_head: bool = False

    def __post_init__(self) -> None:
        for field in ("vocab_size", "context", "num_layers", "num_heads", "width"):
            if getattr(self, field) < 1:
                raise RoomierError(field, getattr(self, field), "must be at least 1", "Use a positive integer")
        if self.width % self.num_heads:
            problem = f"must be divisible by the {self.num_heads} heads"
            raise RoomierError("width", self.width, problem, "Make the width a multiple of num_heads")
        if not 0.0 <= self.dropout < 1.0:
            raise RoomierError("dropout", self.dropout, "must be in [0, 1)", "Use a probability below 1")

    @classmethod
    def named(cls, name: str, **changes: Any) -> GPTConfig:
        """Return the configuration ``name`` (a key of ``SIZES``), with the fields in ``changes`` replaced.

        Raises:
            RoomierError: the name is unknown.

        Example:
            >>> GPT(GPTConfig.named("gpt-mini", vocab_size=256))
        """
        if name not in SIZES:
            raise RoomierError("name", name, "is not the name of a configuration", did_you_mean(name, SIZES))
        num_layers, num_heads, width = SIZES[name]
        return cls(**{"num_layers": num_layers, "num_heads": num_heads, "width": width, **changes})


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the attention output, ``[B, T, D]``."""
        B, T, D = x_BTD.shape
        qkv_3BHTK = self.query_key_value(x_BTD).view(B, T, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q_BHTK, k_BHTK, v_BHTK = qkv_3BHTK.unbind(0)
        dropout = self.dropout if self.training else 0.0
        y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, dropout_p=dropout, is_causal=True)
        y_BTD: Tensor = self.out(y_BHTK.transpose(1, 2).reshape(B, T, D))
        return y_BTD


class MLP(nn.Module):
    """Feed-forward network with four times the width. The network uses the tanh form of GELU, like GPT-2."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.out = nn.Linear(4 * config.width, config.width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the output for each token, ``[B, T, D]``."""
        y_BTD: Tensor = self.out(F.gelu(self.up(x_BTD), approximate="tanh"))
        return y_BTD


class Block(nn.Module):
    """Attention and MLP, each with a normalized input and a residual connection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm_mlp = nn.LayerNorm(config.width)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the hidden states after the block, ``[B, T, D]``."""
        x_BTD = x_BTD + self.dropout(self.attention(self.norm_attention(x_BTD)))
        y_BTD: Tensor = x_BTD + self.dropout(self.mlp(self.norm_mlp(x_BTD)))
        return y_BTD


class GPT(nn.Module):
    """GPT-2 language model. ``blocks`` contains the identical layers.

    Args:
        config: sizes of the model.

    Example:
        >>> model = GPT(GPTConfig.named("gpt-nano"))
        >>> logits, loss = model(input_ids, targets)
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.tied_head:
            self.head.weight = self.tokens.weight
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize the model as in GPT-2. The weights of linear layers and embeddings are sampled from a normal
        distribution with standard deviation 0.02, and biases are 0.

        The standard deviation of the last layer of each residual branch is divided by ``sqrt(2 * num_layers)``, so the
        scale of the residual stream does not depend on the depth.
        """
        for name, module in self.named_modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, (nn.Linear, nn.Embedding)):
                is_branch_end = name.endswith(("attention.out", "mlp.out"))
                scale = math.sqrt(2 * self.config.num_layers) if is_branch_end else 1.0
                nn.init.normal_(module.weight, mean=0.0, std=0.02 / scale)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, input_ids: Tensor, targets: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return the logits ``[B, T, V]``. If ``targets`` is given, also return the mean cross-entropy in nats per
        target token.

        The argument names are the keys of the items of :class:`roomier.data.tokens.TokenDataset`.

        Args:
            input_ids: tokens ``[B, T]``, with ``T`` at most ``config.context``.
            targets: next token at each position, ``[B, T]``; -100 is ignored.

        Raises:
            RoomierError: the sequences are longer than the context.
        """
        T = input_ids.shape[1]
        if self.config.context < T:
            problem = f"must have at most {self.config.context} positions, the context of the model"
            raise RoomierError("input_ids", tuple(input_ids.shape), problem, "Shorten the sequences or raise context")
        positions_T = torch.arange(T, device=input_ids.device)
        x_BTD = self.dropout(self.tokens(input_ids) + self.positions(positions_T))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV: Tensor = self.head(self.norm(x_BTD))
        if targets is None:
            return logits_BTV
        return logits_BTV, F.cross_entropy(logits_BTV.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return ``input_ids`` with ``max_new_tokens`` sampled tokens appended. Dropout is disabled.

        Args:
            input_ids: tokens ``[B, T]``.
            max_new_tokens: number of tokens to sample.
            temperature: values below 1 sharpen the distribution; 0 always selects the most likely token.
            top_k: sample only from the ``top_k`` most likely tokens.
            generator: random number generator, on the device of ``input_ids``; None uses the default generator.

        Returns:
            Tokens ``[B, T + max_new_tokens]``.
        """
        tokens_BT = input_ids
        was_training = self.training
        self.eval()
        try:
            for _ in range(max_new_tokens):
                logits_BTV = self(tokens_BT[:, -self.config.context :])
                next_B1 = draw(logits_BTV[:, -1].float(), temperature, top_k, generator)
                tokens_BT = torch.cat([tokens_BT, next_B1], dim=1)
        finally:
            self.train(was_training)
        return tokens_BT


def draw(logits_BV: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """Sample one token per row from logits ``[B, V]`` and return the tokens, ``[B, 1]``."""
    if temperature == 0.0:
        return logits_BV.argmax(dim=-1, keepdim=True)
    if top_k is not None:
        threshold_B1 = logits_BV.topk(min(top_k, logits_BV.shape[-1])).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < threshold_B1, -math.inf)
    return torch.multinomial((logits_BV / temperature).softmax(dim=-1), 1, generator=generator)
