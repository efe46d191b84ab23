"""Models whose stages exchange more than a hidden state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from roomier.models.gpt import GPT, GPTConfig
from tests.context.networks import LAYERS, MAX_LENGTH, VOCABULARY, hugging_face, mixtral

Batch = dict[str, Tensor]
WIDTH = 16

READS: dict[str, Callable[[Tensor], float]] = {
    "item": lambda hidden: (hidden > 0).sum().item() / 100,
    "bool": lambda hidden: 0.5 if hidden.abs().mean() > 0.1 else 0.0,
    "tolist": lambda hidden: sum(hidden[0].tolist()),
    "numpy": lambda hidden: float(np.tanh(hidden.numpy()).mean()),
    "array": lambda hidden: float(np.asarray(hidden).mean()),
    "nonzero": lambda hidden: hidden[hidden > 0].shape[0] / 100,
    "format": lambda hidden: float(f"{hidden[0, 0]:.3f}"),
}
"""Functions that read the values of a tensor in Python."""


class Glue(nn.Module):
    """Six blocks, and code between them that depends on ``kind``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embedding = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)])
        self.norm = nn.BatchNorm1d(WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, 3)
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden, factor, skips = self.embedding(x), 1.0, list[Tensor]()
        if self.kind == "output in place":
            hidden += 1.0
        if self.kind == "weight as argument":
            hidden = hidden + self.layers[0](self.scale)
        for index, layer in enumerate(self.layers):
            hidden = self._between(self._called(layer, hidden), index, skips)
            if index == 0 and self.kind in READS:
                factor = 1 + READS[self.kind](hidden.detach())
            if index == 0 and self.kind == "attribute":
                self.seen = hidden.detach().norm()
        if self.kind == "weight":
            return F.linear(hidden, self.embedding.weight.t()).pow(2).mean()
        return self.head(hidden).pow(2).mean() * factor

    def _called(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        if self.kind.endswith("reentrant"):
            called = (lambda h: layer(layer(h))) if self.kind.startswith("twice") else layer
            is_reentrant = self.kind == "reentrant"
            checkpointed: Tensor = torch.utils.checkpoint.checkpoint(called, hidden, use_reentrant=is_reentrant)
            return checkpointed
        if self.kind == "twice":
            return layer(layer(hidden))
        if self.kind == "caught":
            try:
                return layer(hidden)
            except Exception:
                return hidden
        return layer(hidden)

    def _between(self, hidden: Tensor, index: int, skips: list[Tensor]) -> Tensor:
        if self.kind == "in place":
            hidden = hidden * 1.0
            hidden += 1.0
        elif self.kind == "parameter":
            hidden = hidden * self.scale
        elif self.kind == "skips":
            hidden = hidden + skips.pop() if index > 2 else hidden
            skips += [hidden] * (index < 3)
        elif self.kind == "order":
            hidden = hidden[hidden.detach().sum(1).argsort()]
        elif self.kind == "dropout":
            hidden = F.dropout(hidden, 0.3)
        elif self.kind == "statistics" and index == 2:
            hidden = self.norm(hidden)
        elif self.kind == "noise":
            hidden = hidden + torch.randn_like(hidden) * float(np.random.rand())
        return hidden


GLUE = [
    *READS,
    "attribute",
    "weight",
    "nonreentrant",
    "twice",
    "twice nonreentrant",
    "caught",
    "in place",
    "output in place",
    "parameter",
    "weight as argument",
    "skips",
    "order",
    "dropout",
    "statistics",
    "noise",
]


class Kept(nn.Module):
    """A block that stores a tensor, which the loss reads without a call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.squares = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.squares = (x * x).mean()
        return self.linear(x).tanh()


class Escaping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(Kept(), nn.Tanh()) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        hidden = x
        for layer in self.layers:
            hidden = layer(hidden)
        squares: Any = [layer[0].squares for layer in self.layers]
        return hidden.pow(2).mean() + torch.stack(squares).sum()


class Caching(nn.Module):
    """A layer that stores a tensor when it is first called, and reads its values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.first: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.first is None:
            self.first = x.detach() * 2
        return self.linear(x) * self.first[self.first > 0].sum()


def gpt() -> nn.Module:
    return GPT(GPTConfig(VOCABULARY, MAX_LENGTH, LAYERS, 4, 32, dropout=0.1, tied_head=True))


def t5() -> nn.Module:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_decoder_layers": 3, "num_heads": 4}
    return hugging_face("T5ForConditionalGeneration", config="T5Config", decoder_start_token_id=0, **sizes)


def router() -> nn.Module:
    return mixtral(output_router_logits=True, router_aux_loss_coef=1.0)


def gpt2() -> nn.Module:
    return hugging_face("GPT2LMHeadModel", config="GPT2Config")


def opt() -> nn.Module:
    return hugging_face("OPTForCausalLM", config="OPTConfig", ffn_dim=48, word_embed_proj_dim=32)


def bert() -> nn.Module:
    return hugging_face("BertForMaskedLM", config="BertConfig")


def qwen() -> nn.Module:
    options = {"num_key_value_heads": 2, "head_dim": 4, "tie_word_embeddings": True}
    return hugging_face("Qwen3ForCausalLM", config="Qwen3Config", **options)


def albert() -> nn.Module:
    sizes = {"embedding_size": 8, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    return hugging_face("AlbertForMaskedLM", config="AlbertConfig", **sizes)


def swin() -> nn.Module:
    import transformers

    sizes: dict[str, Any] = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "window_size": 4, "num_labels": 3}
    config = transformers.SwinConfig(depths=[2, 2, 2], num_heads=[2, 2, 2], hidden_dropout_prob=0.1, **sizes)
    return transformers.SwinForImageClassification(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": gpt,
    "mixtral router": router,
    "t5": t5,
    "gpt2": gpt2,
    "opt": opt,
    "bert": bert,
    "qwen3": qwen,
    "albert": albert,
}


def loss_of(network: nn.Module, batch: Any) -> Tensor:
    """Return the loss of any of the models."""
    if isinstance(batch, Tensor):
        loss: Tensor = network(batch)
    elif isinstance(network, GPT):
        loss = network(batch["input_ids"], batch["labels"])[1]
    else:
        loss = network(**batch).loss
    return loss
