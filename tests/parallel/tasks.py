"""Small language models for the tests of strategies."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roomier.models.gpt import GPT, GPTConfig
from tests.parallel.parity import Batch, Task

VOCABULARY = 13
CONTEXT = 6


class Language(Task):
    """A GPT with sizes that are not divisible by the number of ranks. Labels may be -100."""

    width = 10
    tied_head = False
    dropout = 0.0

    def make_network(self) -> nn.Module:
        config = GPTConfig(
            vocab_size=VOCABULARY,
            context=CONTEXT,
            num_layers=2,
            num_heads=2,
            width=self.width,
            dropout=self.dropout,
            tied_head=self.tied_head,
        )
        network = GPT(config)
        with torch.no_grad():
            for each in network.parameters():
                # With the small initial values of GPT-2, gradients of attention are mostly rounding errors.
                each.mul_(4)
        return network

    def make_batch(self, num_samples: int, generator: torch.Generator) -> Batch:
        first = torch.randint(VOCABULARY, (num_samples, 1), generator=generator)
        tokens = (first + 3 * torch.arange(CONTEXT + 1)) % VOCABULARY  # the next token is predictable
        return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:].clone()}

    def loss(self, batch: Batch) -> Tensor:
        loss: Tensor = self.network(batch["input_ids"], batch["labels"])[1]
        return loss


class TiedLanguage(Language):
    tied_head = True


class WideLanguage(Language):
    """A GPT whose norms are such a small fraction of each block that they belong to the root unit."""

    width = 192


class SummedLanguage(Language):
    """A language model whose loss is a sum over tokens."""

    loss_reduction = "sum"

    def loss(self, batch: Batch) -> Tensor:
        logits = self.network(batch["input_ids"])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum") / 50
