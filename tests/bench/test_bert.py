"""BERT: number of parameters, outputs compared with Transformers, and learning."""

import pytest
import torch
from torch import Tensor, nn

from benchmarks.models.bert import Bert, BertConfig

SMALL = BertConfig(vocab_size=50, context=12, num_layers=2, num_heads=4, width=32)


def small_model(**changes: object) -> Bert:
    torch.manual_seed(0)
    return Bert(BertConfig(**{**vars(SMALL), **changes}))  # type: ignore[arg-type]


def tokens() -> Tensor:
    return torch.randint(50, (6, 12), generator=torch.Generator().manual_seed(1))


def test_bert_large_has_the_number_of_parameters_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    with torch.device("meta"):
        theirs = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes))
        ours = Bert(BertConfig())
    assert num_parameters(ours) == num_parameters(theirs) == 335_143_938


def num_parameters(model: nn.Module) -> int:
    return sum(each.numel() for each in model.parameters())


NAMES = {
    "bert.embeddings.word_embeddings": "tokens",
    "bert.embeddings.position_embeddings": "positions",
    "bert.embeddings.token_type_embeddings": "segments",
    "bert.embeddings.LayerNorm": "norm",
    "bert.encoder.layer": "blocks",
    "attention.self": "attention",
    "attention.output.dense": "attention.out",
    "attention.output.LayerNorm": "norm_attention",
    "intermediate.dense": "up",
    "output.LayerNorm": "norm_mlp",
    "output.dense": "down",
    "bert.pooler.dense": "pooler",
}


@pytest.mark.parametrize("fused_attention", [True, False])
def test_outputs_equal_transformers(fused_attention: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, max_position_embeddings=12, num_hidden_layers=2, num_attention_heads=4, hidden_size=32,
        intermediate_size=128,
    )  # fmt: skip
    theirs = transformers.BertForSequenceClassification(config).eval().double()
    ours = small_model(fused_attention=fused_attention).eval().double()
    weights = {}
    for name, value in theirs.named_parameters():
        for before, after in NAMES.items():
            name = name.replace(before, after)
        weights[name] = value
    ours.load_state_dict(weights)
    labels = torch.arange(6) % 2
    logits_BC, loss = ours(tokens(), labels)
    expected = theirs(tokens(), labels=labels)
    torch.testing.assert_close(logits_BC, expected.logits, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(loss, expected.loss, rtol=1e-10, atol=1e-12)


def test_model_learns_to_classify() -> None:
    model, ids = small_model(dropout=0.0), tokens()
    labels = (ids == 7).any(dim=1).long()
    labels[:3], ids[:3, 5], ids[3:, 5] = 1, 7, 8
    labels[3:] = 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(30):
        logits_BC, loss = model(ids, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
    assert torch.equal(logits_BC.argmax(dim=1), labels)
