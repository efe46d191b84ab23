"""Transformer language model of NeMo: sizes, outputs compared with torch's layers, causality, and learning."""

import pytest
import torch
from torch import Tensor, nn

from benchmarks.models.transformer_lm import TransformerLM, TransformerLMConfig

SMALL = TransformerLMConfig(vocab_size=11, context=8, num_layers=2, num_heads=2, width=16, inner_width=24)


def small_model() -> TransformerLM:
    torch.manual_seed(0)
    return TransformerLM(SMALL)


def tokens() -> Tensor:
    return (torch.arange(4)[:, None] + 3 * torch.arange(9)) % 11


@pytest.mark.parametrize(("num_layers", "published"), [(22, 1.2e9), (32, 1.7e9)])
def test_number_of_parameters(num_layers: int, published: float) -> None:
    """The article reports 1.2 billion parameters for 22 layers. 32 layers have 1.7 billion parameters."""
    with torch.device("meta"):
        model = TransformerLM(TransformerLMConfig(num_layers=num_layers))
    assert sum(each.numel() for each in model.parameters()) == pytest.approx(published, rel=0.01)


def test_blocks_equal_the_encoder_layers_of_torch() -> None:
    model = small_model().double()
    x_BTD = torch.randn(3, 8, 16, dtype=torch.float64)
    mask_TT = nn.Transformer.generate_square_subsequent_mask(8, dtype=torch.float64)
    for block in model.blocks:
        layer = nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True, dtype=torch.float64)
        pairs = {
            "self_attn.in_proj_": block.attention.query_key_value,
            "self_attn.out_proj.": block.attention.out,
            "linear1.": block.up,
            "linear2.": block.down,
            "norm1.": block.norm_attention,
            "norm2.": block.norm_mlp,
        }
        for name, part in pairs.items():
            nn.init.normal_(part.bias)
            layer.get_parameter(f"{name}weight").data.copy_(part.weight)
            layer.get_parameter(f"{name}bias").data.copy_(part.bias)
        torch.testing.assert_close(block(x_BTD), layer(x_BTD, mask_TT), rtol=1e-10, atol=1e-12)


def test_token_changes_only_later_outputs_and_positions_matter() -> None:
    model, ids = small_model(), tokens()[:, :8]
    changed = ids.clone()
    changed[:, 3] = (changed[:, 3] + 1) % 11
    differs_T = (model(ids) != model(changed)).any(-1).all(0)
    assert differs_T.tolist() == [False] * 3 + [True] * 5
    same = model(torch.full((1, 8), 2))[0]
    assert not torch.allclose(same[0], same[7])


def test_model_learns_a_sequence() -> None:
    model, ids = small_model(), tokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        logits_BTV, loss = model(ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
    assert torch.equal(logits_BTV.argmax(-1), ids[:, 1:])
