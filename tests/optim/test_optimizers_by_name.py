"""Optimizers that are selected by name: classes, parameter groups and options."""

import pytest
import torch
from torch import nn

from roomier import PlanError
from roomier.models.gpt import GPT, GPTConfig
from roomier.techniques.optim.adamw import BlockwiseAdamW
from roomier.techniques.optim.by_name import make_optimizer
from tests.optim.named import CLASSES


@pytest.fixture
def net():
    return nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3), nn.Conv1d(3, 2, 1))


@pytest.mark.parametrize("name", [name for name in CLASSES if name != "muon"])
def test_every_name_steps(net, name):
    optimizer = make_optimizer(name, net, lr=0.01)
    assert type(optimizer) is CLASSES[name]
    net[2](torch.ones(1, 4)).sum().backward()
    before = net[2].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, net[2].weight)
    assert optimizer.param_groups[0]["lr"] == 0.01


def test_weight_decay_excludes_biases_and_norms(net):
    optimizer = make_optimizer("adamw", net, weight_decay=0.3)
    groups = {group["weight_decay"]: {id(p) for p in group["params"]} for group in optimizer.param_groups}
    decayed = {id(net[0].weight), id(net[2].weight), id(net[3].weight)}
    assert groups == {0.3: decayed, 0.0: {id(p) for p in net.parameters()} - decayed}


@pytest.mark.parametrize(("name", "default"), [("adamw", 0.01), ("sgd", 0), ("adam", 0)])
def test_the_default_decay_is_that_of_the_class(net, name, default):
    optimizer = make_optimizer(name, net)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [default, 0.0]


def test_a_group_without_parameters_is_left_out():
    net = nn.Linear(2, 2, bias=False)
    assert len(make_optimizer("adamw", net).param_groups) == 1


def test_frozen_parameters_are_left_out(net):
    net[0].requires_grad_(False)
    optimizer = make_optimizer("sgd", net)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in net.parameters() if p.requires_grad}


def test_a_tied_parameter_is_in_one_group_once():
    net = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False))
    net[1].weight = net[0].weight
    [group] = make_optimizer("adamw", net).param_groups
    assert len(group["params"]) == 1


def test_options_reach_the_class(net):
    optimizer = make_optimizer("adamw", net, lr=0.1, options={"betas": (0.8, 0.9), "eps": 1e-5})
    assert optimizer.defaults["betas"] == (0.8, 0.9)
    assert optimizer.defaults["eps"] == 1e-5


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_fused_kernels_are_the_default_and_can_be_disabled(net, name):
    assert make_optimizer(name, net).defaults["fused"] is True
    assert make_optimizer(name, net, options={"fused": False}).defaults["fused"] is False
    assert not make_optimizer(name, net, options={"foreach": True}).defaults["fused"]


def test_scales_of_norms_and_biases_of_any_shape_do_not_decay():
    net = nn.Sequential(nn.LayerNorm((3, 4)), nn.Linear(4, 4))
    net.expert_bias = nn.Parameter(torch.zeros(2, 4))
    optimizer = make_optimizer("adamw", net)
    held = {group["holds"]: {id(p) for p in group["params"]} for group in optimizer.param_groups}
    assert held == {
        "weights": {id(net[1].weight)},
        "biases, norms": {id(p) for p in net.parameters()} - held["weights"],
    }


@pytest.mark.parametrize(("name", "bits"), [("adamw8bit", 8), ("adamw4bit", 4)])
@pytest.mark.parametrize("tied", [True, False])
def test_low_bit_states_are_used_for_large_matrices(name, bits, tied):
    net = GPT(GPTConfig(vocab_size=100, context=100, num_layers=1, num_heads=2, width=96, tied_head=tied))
    optimizer = make_optimizer(name, net, weight_decay=0.1)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    names = {parameter: name for name, parameter in net.named_parameters()}
    coded = {names[parameter] for parameter, state in optimizer.state.items() if "exp_avg" not in state}
    matrices = {name for name, each in net.named_parameters() if name.startswith("blocks") and each.dim() == 2}
    assert coded == matrices | (set() if tied else {"head.weight"})
    groups = [(group["holds"], group["weight_decay"], group["state_bits"]) for group in optimizer.param_groups]
    embeddings = ("embeddings, small weights", 0.1, 32)
    assert groups == [("large matrices", 0.1, bits), embeddings, ("biases, norms", 0.0, 32)]


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "adamw4bit", "lion"])
@pytest.mark.parametrize("rounding", ["split", "stochastic"])
def test_bfloat16_weights_use_the_requested_rounding(net, name, rounding):
    optimizer = make_optimizer(name, net.bfloat16(), weight_rounding=rounding)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert {group["weight_rounding"] for group in optimizer.param_groups} == {rounding}
    assert {"low_bits" in state for state in optimizer.state.values()} == {rounding == "split"}


def test_a_bfloat16_model_keeps_its_low_bits(net):
    assert type(make_optimizer("adamw", net.bfloat16())) is BlockwiseAdamW
    assert type(make_optimizer("adamw", net.bfloat16(), weight_rounding="nearest")) is torch.optim.AdamW
    assert type(make_optimizer("adamw", net.float())) is torch.optim.AdamW


@pytest.mark.parametrize("option", ["state_bits", "weight_rounding"])
def test_arguments_with_a_separate_field_are_not_options(net, option):
    with pytest.raises(PlanError, match=f"{option}.*not an option"):
        make_optimizer("adamw8bit", net, options={option: 8})


def test_an_unknown_option_is_rejected(net):
    with pytest.raises(PlanError, match=r"betta.*is not an option of AdamW.*Did you mean 'betas'"):
        make_optimizer("adamw", net, options={"betta": 1})


def test_a_model_without_trained_parameters_is_rejected(net):
    net.requires_grad_(False)
    with pytest.raises(PlanError, match="no parameter requires a gradient"):
        make_optimizer("adamw", net)
