"""Small models without dropout, for the tests of adapters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from roomier import Module
from roomier.models.gpt import GPT, GPTConfig

VOCABULARY = 61
TOKENS = 8


def make_gpt(width: int = 32, num_layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return GPT(GPTConfig(VOCABULARY, context=TOKENS, num_layers=num_layers, num_heads=2, width=width, dropout=0.0))


def make_transformer(kind: str) -> Any:
    """Return a tiny Hugging Face model: ``"gpt2"``, ``"llama"`` or ``"bert"``."""
    from tests.hugging_face.small import small  # late import: skips only tests that need transformers

    torch.manual_seed(0)
    class_name = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "bert": "BertForMaskedLM"}[kind]
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": TOKENS}
    return small(class_name, **sizes)


MODELS = {
    "gpt": make_gpt,
    "gpt2": lambda: make_transformer("gpt2"),
    "llama": lambda: make_transformer("llama"),
    "bert": lambda: make_transformer("bert"),
}


def token_batches(num_batches: int = 4, batch_size: int = 4) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(num_batches):
        first = torch.randint(VOCABULARY, (batch_size, 1), generator=generator)
        tokens = (first + 3 * torch.arange(TOKENS + 1)) % VOCABULARY
        batches.append({"input_ids": tokens[:, :-1], "labels": tokens[:, 1:].clone()})
    return batches


def loss_of(network: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    if isinstance(network, GPT):
        loss: Tensor = network(batch["input_ids"], batch["labels"])[1]
        return loss
    return network(**batch).loss  # type: ignore[no-any-return]


class Adaptable(Module):
    """Module that wraps any of :data:`MODELS`."""

    def __init__(self, kind: str = "gpt") -> None:
        super().__init__()
        self.kind = kind
        self.save_hyperparameters()
        self.net = MODELS[kind]()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int = 0) -> Tensor:
        loss = loss_of(self.net, batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int = 0) -> None:
        self.log("val_loss", loss_of(self.net, batch))

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int = 0) -> Tensor:
        return loss_of(self.net, batch)
