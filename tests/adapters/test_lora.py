"""Adapters: the layers to which they are added, and training compared with a plain PyTorch loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roomier import RoomierError, Trainer
from roomier.api.blocks import find_blocks
from roomier.plan.parts import AdapterPlan
from roomier.techniques.adapters.layers import Adapted, is_adapter, is_transposed
from roomier.techniques.adapters.lora import adapter_state, apply_lora, merge_lora, quantise_base
from tests.adapters.models import MODELS, Adaptable, loss_of, make_gpt, make_transformer, token_batches


def adapted(network: nn.Module, **settings: Any) -> nn.Module:
    plan = AdapterPlan(**{"lora_rank": 4, **settings})
    apply_lora(network, find_blocks(network), plan)
    if plan.frozen_base != "as_is":
        quantise_base(network, plan)
    return network


def names_of(network: nn.Module) -> list[str]:
    return [name for name, each in network.named_modules() if isinstance(each, Adapted)]


class ByHand(nn.Module):
    """Layer with LoRA as in the paper, in plain PyTorch."""

    def __init__(self, layer: nn.Module, a: Tensor, b: Tensor, scale: float) -> None:
        super().__init__()
        self.layer, self.scale = layer, scale
        self.a, self.b = nn.Parameter(a.clone()), nn.Parameter(b.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + F.linear(F.linear(x, self.a), self.b) * self.scale  # type: ignore[no-any-return]


def train_by_hand(network: nn.Module, like: nn.Module, scale: float, num_steps: int) -> tuple[list[float], nn.Module]:
    """Train ``network`` with the adapters of ``like``, from the same initial values."""
    network.requires_grad_(False)
    for name, layer in [(name, each) for name, each in like.named_modules() if isinstance(each, Adapted)]:
        a, b = (layer.lora_A, layer.lora_B) if not is_transposed(layer) else (layer.lora_A.T, layer.lora_B.T)
        network.set_submodule(name, ByHand(network.get_submodule(name), a.detach(), b.detach(), scale))
    trained = [each for each in network.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0)
    losses = []
    for batch in token_batches(num_steps):
        optimizer.zero_grad()
        loss = loss_of(network, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, network


class Losses(Adaptable):
    def on_train_start(self) -> None:
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int = 0) -> Tensor:
        loss = super().training_step(batch)
        self.losses.append(loss.item())
        return loss


OPTIMIZER = {"name": "adamw", "lr": 1e-2, "weight_decay": 0.0}


@pytest.mark.parametrize("kind", MODELS)
def test_a_fit_is_equal_to_a_plain_loop(make_trainer: Callable[..., Trainer], kind: str) -> None:
    module = Losses(kind)
    plain = copy.deepcopy(module.net)
    like = copy.deepcopy(plain)
    torch.manual_seed(7)
    adapted(like, lora_alpha=8)
    torch.manual_seed(7)
    trainer = make_trainer(lora={"rank": 4, "alpha": 8}, optimizer=OPTIMIZER, max_steps=6)
    before = {name: each.clone() for name, each in plain.state_dict().items()}
    trainer.fit(module, token_batches(6))
    losses, by_hand = train_by_hand(plain, like, scale=2.0, num_steps=6)
    assert module.losses == pytest.approx(losses, rel=1e-5)
    assert losses[-1] < losses[0]
    for name in names_of(module.net):
        layer, other = module.net.get_submodule(name), by_hand.get_submodule(name)
        assert isinstance(layer, Adapted)
        turned = is_transposed(layer)
        torch.testing.assert_close(layer.lora_B.T if turned else layer.lora_B, other.b, rtol=1e-3, atol=1e-5)
    for name, each in module.net.state_dict().items():
        assert is_adapter(name) or torch.equal(each, before[name]), name


@pytest.mark.parametrize("kind", MODELS)
def test_adapters_do_not_change_the_output_and_the_names(kind: str) -> None:
    network = MODELS[kind]()
    plain, batch = copy.deepcopy(network), token_batches(1)[0]
    adapted(network)
    assert torch.equal(loss_of(network, batch), loss_of(plain, batch))
    state = network.state_dict()
    assert {name for name in state if not is_adapter(name)} == set(plain.state_dict())
    assert all(each.requires_grad == is_adapter(name) for name, each in network.named_parameters())
    assert all(isinstance(network.get_submodule(name), type(plain.get_submodule(name))) for name in names_of(network))
    assert all(each.training for each in network.modules()) == all(each.training for each in plain.modules())


def test_targets_are_suffixes_patterns_or_the_linear_layers_of_blocks() -> None:
    assert len(names_of(adapted(make_transformer("llama")))) == 2 * 7
    assert len(names_of(adapted(make_transformer("gpt2")))) == 2 * 4
    some = names_of(adapted(make_transformer("llama"), lora_targets="q_proj,layers.1.*.v_proj"))
    assert some == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.self_attn.v_proj",
    ]
    assert "cls.predictions.decoder" in names_of(adapted(make_transformer("bert"), lora_targets="*"))


@pytest.mark.parametrize(
    ("targets", "problem"),
    [
        ("q_prj", "Did you mean 'q_proj'"),
        ("embed_tokens", "embed_tokens of type Embedding, which is not a linear layer"),
        ("q_proj,proj", "lora.targets='proj'"),
        (" ,", "contains no layer name. Pass names of layers; available are"),
    ],
)
def test_unknown_targets_are_rejected_with_similar_names(targets: str, problem: str) -> None:
    with pytest.raises(RoomierError, match=problem):
        adapted(make_transformer("llama"), lora_targets=targets)


def test_a_model_without_blocks_is_rejected_with_the_available_layers() -> None:
    with pytest.raises(RoomierError, match=r"has no blocks with linear layers.*available are 0, 2"):
        adapted(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)))


def test_layers_whose_weights_other_modules_read_are_not_adapted() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 2)
    assert names_of(adapted(encoder)) == [f"layers.{n}.linear{m}" for n in (0, 1) for m in (1, 2)]
    with pytest.raises(RoomierError, match="the attention module reads its weight"):
        adapted(encoder, lora_targets="out_proj")
    x = torch.randn(2, 3, 16)
    with torch.no_grad():
        for name, each in encoder.named_parameters():
            if name.endswith("lora_B"):
                each.normal_()
        trained = encoder(x)
        # The evaluation does not use a kernel that reads only the weights.
        assert torch.allclose(encoder.eval()(x), trained, atol=1e-5)


def test_dropout_applies_to_the_input_of_adapters_in_training_only() -> None:
    layer = adapted(nn.Sequential(nn.Linear(64, 64)), lora_dropout=0.5, lora_targets="0")[0]  # type: ignore[index]
    nn.init.normal_(layer.lora_B)
    x = torch.randn(2, 64)
    expected = F.linear(x, layer.weight, layer.bias) + F.linear(F.linear(x, layer.lora_A), layer.lora_B)
    assert not torch.allclose(layer(x), expected)
    assert torch.allclose(layer.eval()(x), expected, atol=1e-5)


def test_adapters_compute_in_the_autocast_dtype_and_are_float32_for_16_bit_weights() -> None:
    layer = adapted(nn.Sequential(nn.Linear(8, 8)), lora_targets="0")[0]  # type: ignore[index]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.randn(2, 8)).dtype == torch.bfloat16
    layer = adapted(nn.Sequential(nn.Linear(8, 8)).bfloat16(), lora_targets="0")[0]  # type: ignore[index]
    assert layer.lora_A.dtype == torch.float32
    output = layer(torch.randn(2, 8, dtype=torch.bfloat16))
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    assert layer.lora_B.grad.abs().sum() > 0


def test_existing_adapters_stay_and_other_ranks_are_rejected() -> None:
    network = adapted(make_gpt())
    first = adapter_state(network)
    adapted(network, lora_dropout=0.1)
    assert all(torch.equal(each, first[name]) for name, each in adapter_state(network).items())
    for other in ({"lora_rank": 8}, {"lora_alpha": 32}):
        with pytest.raises(RoomierError, match="has an adapter of rank 4 and scale 1"):
            adapted(network, **other)


def test_all_adapters_of_a_model_have_the_same_rank() -> None:
    network = adapted(make_gpt(), lora_targets="mlp.up")
    with pytest.raises(RoomierError, match="has an adapter of rank 4 and scale 1"):
        adapted(network, lora_targets="mlp.out", lora_rank=2)


def test_a_parametrized_weight_is_rejected() -> None:
    network = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    with pytest.raises(RoomierError, match=r"lora\.targets='0': has a weight that is not a parameter"):
        adapted(network, lora_targets="0")


@pytest.mark.parametrize("base", ["as_is", "int8", "nf4"])
@pytest.mark.parametrize("kind", MODELS)
def test_merged_weights_give_the_same_output(kind: str, base: str) -> None:
    network = MODELS[kind]()
    names, classes = set(network.state_dict()), [type(each) for each in network.modules()]
    adapted(network, lora_alpha=8, frozen_base=base)
    for each in adapter_state(network).values():
        each.normal_(std=0.1)
    batch = token_batches(1)[0]
    before = loss_of(network, batch)
    assert merge_lora(network) is network
    torch.testing.assert_close(loss_of(network, batch), before, rtol=1e-5, atol=1e-6)
    assert set(network.state_dict()) == names
    assert [type(each) for each in network.modules()] == classes
    with pytest.raises(RoomierError, match="has no adapters"):
        merge_lora(network)


def test_the_state_of_adapters_is_small_and_can_be_loaded() -> None:
    network = adapted(make_gpt())
    for each in adapter_state(network).values():
        each.normal_()
    state = adapter_state(network)
    other = adapted(make_gpt())
    assert not other.load_state_dict(state, strict=False).unexpected_keys
    batch = token_batches(1)[0]
    assert torch.equal(loss_of(other, batch), loss_of(network, batch))
    assert sum(each.numel() for each in state.values()) < 0.2 * sum(each.numel() for each in network.parameters())


def test_a_weight_of_two_layers_is_not_merged() -> None:
    network = adapted(make_transformer("gpt2"), lora_targets="lm_head")
    with pytest.raises(RoomierError, match="another layer has the same weight"):
        merge_lora(network)


def test_gradients_of_an_earlier_fit_are_freed_for_frozen_parameters() -> None:
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    network(torch.ones(2, 4)).sum().backward()
    apply_lora(network, [], AdapterPlan(lora_rank=2, lora_targets="0"))
    assert all(each.grad is None for each in network.parameters() if not each.requires_grad)
