"""If another module reads a layer's weight without calling the layer, the layer is unsharded when the weight is
read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roomier
from roomier.techniques.parallel.read_weights import layers_read_by_others
from tests.ranks.pool import RankPool

transformers = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "type_vocab_size": 0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
MODELS = {
    "v2": ("DebertaV2", {}),
    "v2 without the legacy head": ("DebertaV2", {"legacy": False}),
    "v1": ("Deberta", {}),
}


def train(name: str, strategy: str, num_ranks: int) -> dict[str, Tensor]:
    family, options = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **options)
    model = getattr(transformers, f"{family}ForMaskedLM")(config).train()
    ids = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": each, "labels": each} for each in ids.repeat(3, 1)]
    trainer = roomier.Trainer(
        max_steps=3,
        strategy=strategy,
        devices=num_ranks,
        accelerator="cpu",
        precision="64-true",
        optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.9},
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, torch.utils.data.DataLoader(rows, batch_size=4 // num_ranks))  # type: ignore[arg-type]
    return {key: getattr(each, "full_tensor", lambda e=each: e)().detach() for key, each in model.named_parameters()}


@pytest.mark.more
@pytest.mark.parametrize(("name", "strategy"), list(zip(MODELS, ["zero3", "zero1", "zero2"], strict=True)))
def test_deberta_trains_with_sharded_parameters(on_ranks: RankPool, name: str, strategy: str) -> None:
    single = on_ranks(1, train, name, "single", 1)[0]
    for sharded in on_ranks(2, train, name, strategy, 2):
        assert sharded.keys() == single.keys()
        for key, value in single.items():
            torch.testing.assert_close(sharded[key], value, rtol=1e-9, atol=1e-12, msg=key)


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.called, self.described = nn.Embedding(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.called.weight

    def forward(self, x: Tensor) -> Any:
        return self.described(self.called(x.to(self.described.weight.dtype))) @ self._all_rows()

    def _all_rows(self) -> Tensor:
        return self.table.weight

    def unused(self) -> Tensor:
        return self.tied.weight


def test_only_values_that_a_forward_reads_count() -> None:
    network = nn.Sequential(Reader(), nn.MultiheadAttention(4, 2))
    assert layers_read_by_others(network) == {network[0].table}
