"""GPT: number of parameters, outputs compared with a reference, and causality."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from roomier import Trainer
from roomier.core.errors import RoomierError
from roomier.data.tokens import TokenDataset, write_tokens
from roomier.models.gpt import GPT, SIZES, GPTConfig

SMALL = GPTConfig(vocab_size=97, context=16, num_layers=2, num_heads=4, width=32)


def small_model(**changes: object) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(**{**vars(SMALL), **changes})).eval()  # type: ignore[arg-type]


def random_tokens(num_sequences: int = 3, num_tokens: int = 16) -> Tensor:
    return torch.randint(97, (num_sequences, num_tokens), generator=torch.Generator().manual_seed(1))


def expected_num_parameters(config: GPTConfig) -> int:
    D = config.width
    attention = D * 3 * D + 3 * D + D * D + D
    mlp = D * 4 * D + 4 * D + 4 * D * D + D
    block = attention + mlp + 2 * 2 * D
    head = 0 if config.tied_head else config.vocab_size * D
    return (config.vocab_size + config.context) * D + config.num_layers * block + 2 * D + head


def num_parameters(config: GPTConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(config).parameters())


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("tied_head", [False, True])
def test_number_of_parameters_of_each_named_size(name: str, tied_head: bool) -> None:
    config = GPTConfig.named(name, tied_head=tied_head)
    assert num_parameters(config) == expected_num_parameters(config)


def test_gpt2_has_the_published_number_of_parameters() -> None:
    assert num_parameters(GPTConfig.named("gpt2", tied_head=True)) == 124_439_808
    assert num_parameters(GPTConfig.named("gpt2")) == 124_439_808 + 50257 * 768


def test_outputs_equal_the_reference() -> None:
    model = small_model().double()
    idx_BT = random_tokens()
    torch.testing.assert_close(model(idx_BT), plain_gpt(model, idx_BT), rtol=1e-10, atol=1e-12)


def plain_gpt(model: GPT, idx_BT: Tensor) -> Tensor:
    """Compute GPT-2 from its parameters, with a loop over heads and an explicit softmax and mask."""
    p = dict(model.named_parameters())
    D, H = model.config.width, model.config.num_heads
    T = idx_BT.shape[1]
    causal_TT = torch.ones(T, T, dtype=torch.bool).tril()
    x = p["tokens.weight"][idx_BT] + p["positions.weight"][:T]
    for layer in range(model.config.num_layers):
        own = {name.removeprefix(f"blocks.{layer}."): value for name, value in p.items()}
        h = plain_norm(x, own["norm_attention.weight"], own["norm_attention.bias"])
        q, k, v = (h @ own["attention.query_key_value.weight"].T + own["attention.query_key_value.bias"]).split(
            D, dim=-1
        )
        heads = []
        for columns in torch.arange(D).chunk(H):
            scores = q[..., columns] @ k[..., columns].transpose(1, 2) / math.sqrt(D // H)
            weights = scores.masked_fill(~causal_TT, -math.inf).exp()
            heads.append(weights / weights.sum(-1, keepdim=True) @ v[..., columns])
        x = x + torch.cat(heads, dim=-1) @ own["attention.out.weight"].T + own["attention.out.bias"]
        h = plain_norm(x, own["norm_mlp.weight"], own["norm_mlp.bias"])
        h = h @ own["mlp.up.weight"].T + own["mlp.up.bias"]
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        x = x + h @ own["mlp.out.weight"].T + own["mlp.out.bias"]
    return plain_norm(x, p["norm.weight"], p["norm.bias"]) @ p["head.weight"].T


def plain_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias


@pytest.mark.parametrize("position", [1, 8, 15])
def test_token_does_not_change_earlier_outputs(position: int) -> None:
    model = small_model()
    idx_BT = random_tokens()
    changed_BT = idx_BT.clone()
    changed_BT[:, position] = (changed_BT[:, position] + 1) % 97
    before, after = model(idx_BT), model(changed_BT)
    assert torch.equal(before[:, :position], after[:, :position])
    assert not torch.allclose(before[:, position:], after[:, position:])


def test_initial_loss_equals_uniform_guessing() -> None:
    _, loss = small_model()(random_tokens(32), random_tokens(32).roll(1, 0))
    assert abs(loss.item() - math.log(97)) < 0.05


def test_loss_is_the_mean_over_valid_targets() -> None:
    model = small_model()
    idx_BT, targets_BT = random_tokens(), random_tokens().roll(-1, 1)
    targets_BT[0, 4:] = -100
    logits_BTV, loss = model(idx_BT, targets_BT)
    chosen = logits_BTV.log_softmax(-1).gather(-1, targets_BT.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(loss, -chosen[targets_BT != -100].mean())


def test_last_layers_of_branches_have_smaller_initial_values() -> None:
    model = small_model(width=256, num_layers=8)
    assert model.blocks[0].mlp.up.weight.std().item() == pytest.approx(0.02, rel=0.03)
    for end in (model.blocks[3].attention.out, model.blocks[7].mlp.out):
        assert end.weight.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.03)
    assert all(not p.any() for name, p in model.named_parameters() if name.endswith("bias"))


def test_model_created_on_meta_has_the_usual_initialization() -> None:
    with torch.device("meta"):
        model = GPT(SMALL)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.reset_parameters()
    torch.manual_seed(0)
    usual = GPT(SMALL)
    # The constructor first samples torch's default initialization, so only the standard deviations are equal.
    for (name, value), (_, usual_value) in zip(model.named_parameters(), usual.named_parameters(), strict=True):
        assert value.std().item() == pytest.approx(usual_value.std().item(), rel=0.2), name


def test_tied_head_is_one_parameter_with_both_gradients() -> None:
    model = small_model(tied_head=True)
    assert model.head.weight is model.tokens.weight
    model(random_tokens(), random_tokens())[1].backward()
    rows_without_input = torch.ones(97, dtype=torch.bool).index_fill(0, random_tokens().flatten(), False)
    assert model.tokens.weight.grad[rows_without_input].any()


def test_dropout_is_disabled_in_evaluation() -> None:
    model = small_model(dropout=0.5)
    assert torch.equal(model(random_tokens()), model(random_tokens()))
    model.train()
    assert not torch.equal(model(random_tokens()), model(random_tokens()))


def test_generate_is_reproducible_and_does_not_use_the_global_generator() -> None:
    model = small_model().train()
    start_BT = random_tokens(2, 5)
    state = torch.get_rng_state()

    def run(seed: int) -> Tensor:
        return model.generate(start_BT, 30, top_k=20, generator=torch.Generator().manual_seed(seed))

    first = run(7)
    assert first.shape == (2, 35)
    assert torch.equal(first[:, :5], start_BT)
    assert torch.equal(first, run(7))
    assert not torch.equal(first, run(8))
    assert torch.equal(state, torch.get_rng_state())
    assert model.training


def test_generate_with_temperature_zero_or_top_1_selects_the_most_likely_token() -> None:
    model = small_model()
    idx_BT = random_tokens(2, 4)
    greedy = model.generate(idx_BT, 8, temperature=0.0)
    assert torch.equal(greedy, model.generate(idx_BT, 8, top_k=1))
    for step in range(4, 12):
        assert torch.equal(greedy[:, step], model(greedy[:, :step])[:, -1].argmax(-1))


def test_model_memorizes_a_sequence() -> None:
    torch.manual_seed(0)
    model = small_model(dropout=0.0).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    text_BT = random_tokens(1)
    for _ in range(60):
        _, loss = model(text_BT[:, :-1], text_BT[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05
    assert torch.equal(model.generate(text_BT[:, :1], 15, temperature=0.0), text_BT)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"width": 30}, "width"),
        ({"num_layers": 0}, "num_layers"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"dropout": 1.0}, "dropout"),
    ],
)
def test_invalid_config_is_rejected(changes: dict[str, object], field: str) -> None:
    with pytest.raises(RoomierError) as caught:
        small_model(**changes)
    assert caught.value.field == field


def test_unknown_size_suggests_the_nearest() -> None:
    with pytest.raises(RoomierError, match="Did you mean 'gpt2-large'"):
        GPTConfig.named("gpt2-larg")


def test_sequence_longer_than_the_context_is_rejected() -> None:
    with pytest.raises(RoomierError, match="16 positions"):
        small_model()(random_tokens(1, 17))


def test_loss_in_half_precision_equals_torch_cross_entropy() -> None:
    model = small_model()
    idx_BT = random_tokens()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits_BTV, loss = model(idx_BT, idx_BT)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(logits_BTV.float().flatten(0, 1), idx_BT.flatten()))


def test_trains_on_a_token_file(tmp_path: Path) -> None:
    """The keys of the dataset's items are the names of forward's arguments, so no adapter is needed."""
    path = tmp_path / "text.tokens"
    write_tokens(path, [list(range(97)) * 20], vocab_size=97, end_of_document=None)
    torch.manual_seed(0)
    trainer = Trainer(
        optimizer="adamw", learning_rate=1e-3, max_steps=40, accelerator="cpu", default_root_dir=tmp_path / "runs"
    )
    data = DataLoader(TokenDataset(path, block_size=16), batch_size=8, shuffle=True)
    trainer.fit(GPT(SMALL), data, DataLoader(TokenDataset(path, block_size=16), batch_size=8))
    assert trainer.global_step == 40
    assert float(trainer.callback_metrics["train_loss"]) < 0.9 * math.log(97)
    assert float(trainer.callback_metrics["val_loss"]) < 0.9 * math.log(97)
