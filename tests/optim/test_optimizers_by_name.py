"""Optimizers by name: the class, the groups, the options."""

import pytest
import torch
from torch import nn

from roomier import PlanError
from roomier.optim.by_name import OPTIMIZERS, make_optimizer


@pytest.fixture
def net():
    return nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3), nn.Conv1d(3, 2, 1))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_name_steps(net, name):
    optimizer = make_optimizer(name, net.named_parameters(), lr=0.01)
    assert type(optimizer) is OPTIMIZERS[name]
    net[2](torch.ones(1, 4)).sum().backward()
    before = net[2].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, net[2].weight)
    assert optimizer.param_groups[0]["lr"] == 0.01


def test_weights_decay_and_biases_and_norms_do_not(net):
    optimizer = make_optimizer("adamw", net.named_parameters(), weight_decay=0.3)
    groups = {group["weight_decay"]: {id(p) for p in group["params"]} for group in optimizer.param_groups}
    decayed = {id(net[0].weight), id(net[2].weight), id(net[3].weight)}
    assert groups == {0.3: decayed, 0.0: {id(p) for p in net.parameters()} - decayed}


@pytest.mark.parametrize(("name", "default"), [("adamw", 0.01), ("sgd", 0), ("adam", 0)])
def test_the_default_decay_is_that_of_the_class(net, name, default):
    optimizer = make_optimizer(name, net.named_parameters())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [default, 0.0]


def test_a_group_without_parameters_is_left_out():
    net = nn.Linear(2, 2, bias=False)
    assert len(make_optimizer("adamw", net.named_parameters()).param_groups) == 1


def test_frozen_parameters_are_left_out(net):
    net[0].requires_grad_(False)
    optimizer = make_optimizer("sgd", net.named_parameters())
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in net.parameters() if p.requires_grad}


def test_a_tied_parameter_is_in_one_group_once():
    net = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False))
    net[1].weight = net[0].weight
    [group] = make_optimizer("adamw", net.named_parameters()).param_groups
    assert len(group["params"]) == 1


def test_options_reach_the_class(net):
    optimizer = make_optimizer("adamw", net.named_parameters(), lr=0.1, options={"betas": (0.8, 0.9), "eps": 1e-5})
    assert optimizer.defaults["betas"] == (0.8, 0.9)
    assert optimizer.defaults["eps"] == 1e-5


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_fused_kernels_are_the_default_and_may_be_turned_off(net, name):
    assert make_optimizer(name, net.named_parameters()).defaults["fused"] is True
    assert make_optimizer(name, net.named_parameters(), options={"fused": False}).defaults["fused"] is False
    assert not make_optimizer(name, net.named_parameters(), options={"foreach": True}).defaults["fused"]


def test_an_unknown_option_is_refused(net):
    with pytest.raises(PlanError, match=r"betta.*AdamW has no such option.*Did you mean 'betas'"):
        make_optimizer("adamw", net.named_parameters(), options={"betta": 1})


def test_nothing_to_train_is_refused(net):
    net.requires_grad_(False)
    with pytest.raises(PlanError, match="no parameter requires a gradient"):
        make_optimizer("adamw", net.named_parameters())
