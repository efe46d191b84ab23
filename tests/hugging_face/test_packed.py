"""Training with padded and with packed batches of similar length: the weights are equal, because both have the same
target tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from roomier import Module, Trainer
from roomier.data import LengthGroupedBatchSampler, PackedCollate
from tests.covering import few
from tests.hugging_face.models import KINDS, VOCABULARY
from tests.ranks.pool import RankPool

LENGTHS = (3, 8, 2, 5, 7, 4, 6, 8, 3, 2, 5, 6, 1, 4, 7, 2)
MAX_TOKENS = 16
PAD_TOKEN = 2
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def documents() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(3, VOCABULARY, (each,), generator=generator).tolist()} for each in LENGTHS]


def padded(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return a batch in the form of transformers' collators."""
    longest = max(len(each["input_ids"]) for each in samples)
    rows = [each["input_ids"] + [PAD_TOKEN] * (longest - len(each["input_ids"])) for each in samples]
    masks = [[1] * len(each["input_ids"]) + [0] * (longest - len(each["input_ids"])) for each in samples]
    tokens, mask = torch.tensor(rows), torch.tensor(masks)
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def packed(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return PackedCollate()(samples)


def packed_to_a_length(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return PackedCollate(MAX_TOKENS, pad_token_id=PAD_TOKEN)(samples)


def loader_of(collate: Callable[[Any], Any]) -> DataLoader[Any]:
    sampler = LengthGroupedBatchSampler(LENGTHS, max_tokens=MAX_TOKENS, batches_per_step=2, seed=4)
    return DataLoader(documents(), batch_sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]


def weights_of(model: nn.Module) -> list[Tensor]:
    return [getattr(each, "full_tensor", each.detach)().detach() for each in model.parameters()]


def trained(model: Any, collate: Callable[[Any], Any], folder: Path, **keywords: Any) -> list[Tensor]:
    optimizer = {"name": "adamw", "lr": 1e-2, "eps": 1e-4, "weight_decay": 0.0}
    flags = {"accelerator": "cpu", "max_epochs": 2, "optimizer": optimizer, **QUIET}
    Trainer(**{**flags, "default_root_dir": folder, **keywords}).fit(model, loader_of(collate))
    return weights_of(model)


def apart(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


def of_mean_losses(model: Any) -> list[Tensor]:
    """Train in plain PyTorch with equal weights for the two micro-batches of a step, which yields different results."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.0)
    loader = loader_of(padded)
    for epoch in range(2):
        loader.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]
        batches = list(loader)
        for first in range(0, len(batches), 2):
            step = batches[first : first + 2]
            sum(model(**each).loss / len(step) for each in step).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights_of(model)


@pytest.mark.parametrize("name", few(["gpt2", "llama"]))
@pytest.mark.parametrize("accumulated", [1, 2])
def test_packed_batches_train_like_padded_batches(name: str, accumulated: int, tmp_path: Path) -> None:
    found = [
        trained(KINDS[name].model(dropout=False), collate, tmp_path, accumulate_grad_batches=accumulated)
        for collate in (padded, packed, packed_to_a_length)
    ]
    assert apart(found[0], found[1]) < 2e-5
    assert apart(found[0], found[2]) < 2e-5
    if accumulated == 2:
        assert apart(found[0], of_mean_losses(KINDS[name].model(dropout=False))) > 1e-3


def fit_on_ranks(folder: Path, strategy: str) -> list[list[Tensor]]:
    flags = {"devices": 2, "strategy": strategy}
    return [trained(KINDS["llama"].model(dropout=False), each, folder, **flags) for each in (padded, packed)]


@pytest.mark.parametrize("strategy", few(["zero3", "ddp"]))
def test_two_ranks_equal_one_rank_that_accumulates(on_ranks: RankPool, strategy: str, tmp_path: Path) -> None:
    assert len(loader_of(packed)) % 2 == 0  # no batch is dropped
    model = KINDS["llama"].model(dropout=False)
    alone = trained(model, padded, tmp_path, accumulate_grad_batches=2)
    for of_padded, of_packed in on_ranks(2, fit_on_ranks, tmp_path, strategy):
        assert apart(of_padded, alone) < 2e-5
        assert apart(of_packed, alone) < 2e-5


class Blocks(Module):
    """Custom language model, in which the cumulative lengths limit attention to one sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.tokens = nn.Embedding(VOCABULARY, 16)
        self.places = nn.Embedding(max(LENGTHS), 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: Tensor, position_ids: Tensor, ends: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.places(position_ids)
        count = torch.arange(input_ids.shape[1])
        sample = torch.searchsorted(ends, count, right=True)
        hidden = (sample[:, None] != sample[None, :]) | (count[:, None] < count[None, :])
        attended, _ = self.attention(x, x, x, attn_mask=hidden, need_weights=False)
        return self.head(x + attended)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch["input_ids"], batch["position_ids"], batch["cu_seq_lens_q"])
        return nn.functional.cross_entropy(logits[0, :-1], batch["labels"][0, 1:])


def one_by_one(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return PackedCollate(cumulative_lengths=True)(samples)


def test_cumulative_lengths_limit_the_attention_of_a_users_model(tmp_path: Path) -> None:
    own = trained(Blocks(), one_by_one, tmp_path, max_epochs=1)
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.0)
    data = documents()
    for batch in loader_of(packed).batch_sampler:  # type: ignore[union-attr]
        samples = [one_by_one([data[index]]) for index in batch]
        counts = [each["labels"].shape[1] - 1 for each in samples]
        losses = [model.training_step(each, 0) * count for each, count in zip(samples, counts, strict=True) if count]
        (torch.stack(losses).sum() / sum(counts)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert apart(own, weights_of(model)) < 2e-5
