"""Budgets for other models: unequal blocks, peaks outside of blocks, and blocks that run several times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roomier.techniques.activation.block_forward import Keep
from tests.activation.budgets import Language, Taken, assert_same_training, tokens, train

pytestmark = pytest.mark.more

TOLERANCE = 1.03


class Convolutions(nn.Module):
    """Block whose output is saved by its last layer, and often also by the next operation."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(num_in, num_out, 3, padding=1)
        self.norm = nn.BatchNorm2d(num_out)
        self.second = nn.Conv2d(num_out, num_out, 3, padding=1)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(self.dropout(F.relu(self.norm(self.first(x))))))


class UNet(nn.Module):
    """Blocks of unequal size with skip connections from the down path to the up path."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.downs = nn.ModuleList([Convolutions(3, 8), Convolutions(8, 16), Convolutions(16, 32)])
        self.ups = nn.ModuleList([Convolutions(32 + 16, 16), Convolutions(16 + 8, 8)])
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.downs[:-1]:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.downs[-1](x)
        for up in self.ups:
            x = up(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], dim=1))
        return self.head(x).square().mean()


class Repeated(nn.Module):
    """Two layers that run alternately, three times each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for index in range(6):
            x = self.layers[index % 2](x)
        return x.square().mean()


class HalfFrozen(Language):
    """Model whose embeddings and first blocks need no gradient, so they save no activations."""

    def __init__(self) -> None:
        super().__init__(num_layers=6)
        frozen = [self.gpt.tokens, self.gpt.positions, *self.gpt.blocks[:3]]
        for module in frozen:
            module.requires_grad_(False)


class Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(0)
        config = transformers.BertConfig(
            vocab_size=31, hidden_size=32, num_hidden_layers=6, num_attention_heads=2, intermediate_size=64
        )
        self.model = transformers.BertForMaskedLM(config)

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss


def pictures() -> tuple[Tensor]:
    return (torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0)),)


def sequences() -> tuple[Tensor]:
    return (torch.randn(8, 16, 32, generator=torch.Generator().manual_seed(0)),)


def sweep(make: Callable[[], nn.Module], batch: tuple[Tensor], fractions: Sequence[float]) -> list[Taken]:
    """Train with each of ``fractions``, from 0 to 1, and check that the results are the same as without a budget."""
    windows: list[list[Any]] = [[batch]] * 4
    plain = train(make(), "none", windows)
    found = [train(make(), fraction, windows) for fraction in fractions]
    least, most = (each.predicted_bytes or 0 for each in (found[0], found[-1]))
    for fraction, taken in zip(fractions, found, strict=True):
        assert_same_training(plain, taken)
        assert taken.predicted_bytes is not None
        assert taken.peak_bytes <= TOLERANCE * taken.predicted_bytes
        assert taken.predicted_bytes <= max(least, least + fraction * (most - least)) + 1
    return found


def test_unequal_blocks() -> None:
    least, half, most = sweep(UNet, pictures(), (0.0, 0.5, 1.0))
    assert least.peak_bytes < half.peak_bytes < most.peak_bytes
    # An output that is saved twice counts twice.
    assert most.predicted_bytes == pytest.approx(most.peak_bytes, rel=0.08)
    assert len(set(half.keeps)) > 1


def test_a_peak_at_the_loss() -> None:
    batch = tokens(vocab_size=1500)
    least, half, most = sweep(lambda: Language(vocab_size=1500, num_layers=4), batch, (0.0, 0.5, 1.0))
    for taken in (least, half, most):
        assert taken.predicted_bytes == pytest.approx(taken.peak_bytes, rel=0.01)
    assert least.keeps == [Keep.INPUT] * 4  # saving the activations of the last block would already increase this peak
    assert least.peak_bytes > 0.6 * most.peak_bytes
    assert half.keeps[-1] is Keep.ALL


def test_blocks_that_run_several_times() -> None:
    least, half, _ = sweep(Repeated, sequences(), (0.0, 0.6, 1.0))
    assert least.predicted_bytes == pytest.approx(least.peak_bytes, rel=0.01)
    assert half.flops < least.flops


def test_blocks_that_need_no_gradient_save_no_activations() -> None:
    least, most = sweep(HalfFrozen, tokens(), (0.0, 1.0))
    assert most.keeps == [Keep.INPUT] * 3 + [Keep.ALL] * 3
    assert most.flops < least.flops


def test_bert_of_hugging_face() -> None:
    found = sweep(Bert, tokens(), (0.0, 0.3, 0.7, 1.0))
    for taken in found:
        assert taken.predicted_bytes == pytest.approx(taken.peak_bytes, rel=0.01)
    assert found[0].flops > found[-1].flops
