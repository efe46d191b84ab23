"""Six kinds of models with dropout. Their blocks, block arguments and block outputs differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roomier.models.gpt import GPT, GPTConfig
from tests.hugging_face.small import VOCABULARY, small

DROPOUT = 0.2
TOKENS = torch.arange(24).view(2, 12) * 7 % VOCABULARY

Loss = Callable[[], Tensor]


def make_gpt() -> tuple[nn.Module, Loss]:
    config = GPTConfig(vocab_size=VOCABULARY, context=12, num_layers=4, num_heads=2, width=16, dropout=DROPOUT)
    network = GPT(config)
    return network, lambda: network(TOKENS, TOKENS)[1]


def make_bert() -> tuple[nn.Module, Loss]:
    network = small("BertForMaskedLM", num_hidden_layers=3, intermediate_size=32, dropout=DROPOUT)
    mask = torch.ones_like(TOKENS)
    mask[0, 9:] = 0
    return network, lambda: network(input_ids=TOKENS, attention_mask=mask, labels=TOKENS).loss


def make_vit() -> tuple[nn.Module, Loss]:
    network = small("ViTForImageClassification", num_hidden_layers=3, intermediate_size=32, dropout=DROPOUT)
    images = torch.linspace(-1, 1, 2 * 3 * 8 * 8).sin().view(2, 3, 8, 8)
    return network, lambda: network(pixel_values=images, labels=torch.tensor([0, 2])).loss


def make_t5() -> tuple[nn.Module, Loss]:
    """T5, whose first block computes the position bias of attention and passes it to the other blocks."""
    network = small("T5ForConditionalGeneration", intermediate_size=32, dropout=DROPOUT)
    return network, lambda: network(input_ids=TOKENS, labels=TOKENS[:, :7].contiguous()).loss


def make_mixtral() -> tuple[nn.Module, Loss]:
    """Mixture of experts, whose active experts depend on the tokens."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    network = small("MixtralForCausalLM", num_hidden_layers=3, router_jitter_noise=0.1, dropout=DROPOUT, **experts)
    return network, lambda: network(input_ids=TOKENS, labels=TOKENS).loss


class Down(nn.Module):
    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(width_in, width_out, 3, padding=1)
        self.norm = nn.BatchNorm2d(width_out)
        self.activation = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout2d(DROPOUT)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        skip = self.dropout(self.activation(self.norm(self.convolution(x))))
        return {"skip": skip, "smaller": F.max_pool2d(skip, 2)}


class Up(nn.Module):
    def __init__(self, width_in: int, width_skip: int, width_out: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(width_in + width_skip, width_out, 3, padding=1)
        self.activation = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor, *, skip: Tensor) -> Tensor:
        x = torch.cat([F.interpolate(x, scale_factor=2), skip], dim=1)
        return self.dropout(self.activation(self.convolution(x)))


class UNet(nn.Module):
    """U-Net with skip connections. ReLU modifies the results of the convolutions in place."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Down(3, 4), Down(4, 8), Down(8, 8)])
        self.up = nn.ModuleList([Up(8, 8, 8), Up(8, 8, 4), Up(4, 4, 4)])
        self.last = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Any:
        skips = []
        for block in self.down:
            output = block(x)
            x = output["smaller"]
            skips.append(output["skip"])
        for block, skip in zip(self.up, reversed(skips), strict=True):
            x = block(x, skip=skip)
        return self.last(x)


def make_unet() -> tuple[nn.Module, Loss]:
    network = UNet()
    images = torch.linspace(-1, 1, 2 * 3 * 16 * 16).sin().view(2, 3, 16, 16)
    return network, lambda: network(images).square().mean()


KINDS: dict[str, Callable[[], tuple[nn.Module, Loss]]] = {
    "GPT": make_gpt,
    "BERT": make_bert,
    "ViT": make_vit,
    "T5": make_t5,
    "U-Net": make_unet,
    "mixture of experts": make_mixtral,
}
