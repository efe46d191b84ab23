"""Lion equals its formula for float32 and bfloat16 weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from roomier.core.errors import RoomierError
from roomier.techniques.optim.lion import Lion
from roomier.techniques.optim.rounding import read

LR, BETAS, DECAY = 1e-2, (0.9, 0.99), 0.1


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 300), nn.Tanh(), nn.Linear(300, 3))


def gradients(step: int, like: nn.Module) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(each.shape, generator=generator).to(each.dtype) for each in like.parameters()]


def run(net: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 20, first: int = 0) -> None:
    for step in range(first, first + num_steps):
        for parameter, gradient in zip(net.parameters(), gradients(step, net), strict=True):
            parameter.grad = gradient
        optimizer.step()


def by_the_paper(weights: list[Tensor], steps: list[list[Tensor]]) -> list[Tensor]:
    """Compute algorithm 2 of the paper in float64."""
    found = []
    for index, weight in enumerate(weights):
        theta, m = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
        for gradients_ in steps:
            g = gradients_[index].double()
            c = BETAS[0] * m + (1 - BETAS[0]) * g
            theta = theta - LR * (torch.sign(c) + DECAY * theta)
            m = BETAS[1] * m + (1 - BETAS[1]) * g
        found.append(theta)
    return found


def test_steps_equal_the_algorithm_of_the_paper() -> None:
    net = network()
    expected = by_the_paper([each.detach() for each in net.parameters()], [gradients(step, net) for step in range(20)])
    run(net, Lion(net.parameters(), LR, BETAS, DECAY))
    for parameter, wanted in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.double(), wanted, rtol=1e-5, atol=1e-6)


def test_a_zero_gradient_applies_weight_decay_only() -> None:
    weight = nn.Parameter(torch.full((3,), 2.0))
    weight.grad = torch.zeros(3)
    Lion([weight], LR, BETAS, DECAY).step()
    assert weight.tolist() == pytest.approx([2 - LR * DECAY * 2] * 3)


def test_split_weights_equal_float32_weights_bit_for_bit() -> None:
    low = network().bfloat16()
    full = copy.deepcopy(low).float()
    optimizer, reference = Lion(low.parameters(), LR, BETAS, DECAY), Lion(full.parameters(), LR, BETAS, DECAY)
    for step in range(20):
        of_low = gradients(step, low)
        for one, other, gradient in zip(low.parameters(), full.parameters(), of_low, strict=True):
            one.grad, other.grad = gradient, gradient.float()
        optimizer.step()
        reference.step()
    for one, other in zip(low.parameters(), full.parameters(), strict=True):
        assert torch.equal(read(one.detach(), optimizer.state[one]["low_bits"]), other)
        assert one.dtype is torch.bfloat16


def test_small_steps_are_lost_by_nearest_and_kept_by_stochastic_rounding() -> None:
    """A weight starts at 1 and takes 100 steps of 1e-4. The next bfloat16 value is 1/128 away."""
    ends = {}
    for rounding in ("nearest", "stochastic", "split"):
        weight = nn.Parameter(torch.ones(100_000, dtype=torch.bfloat16))
        optimizer = Lion([weight], 1e-4, weight_rounding=rounding)
        weight.grad = -torch.ones_like(weight)
        for _ in range(100):
            optimizer.step()
        low_bits = optimizer.state[weight].get("low_bits")
        ends[rounding] = read(weight.detach(), low_bits).double().mean().item()
    assert ends["nearest"] == 1
    assert ends["stochastic"] == pytest.approx(1.01, abs=2e-4)  # standard error 3e-5
    assert ends["split"] == pytest.approx(1.01, abs=1e-5)


@pytest.mark.parametrize("rounding", ["split", "stochastic"])
def test_a_resume_is_bit_identical(rounding: str) -> None:
    one = network().bfloat16()
    other = copy.deepcopy(one)
    optimizer = Lion(one.parameters(), LR, BETAS, DECAY, weight_rounding=rounding)
    run(one, optimizer)
    before = Lion(other.parameters(), LR, BETAS, DECAY, weight_rounding=rounding)
    run(other, before, 8)
    resumed = Lion(other.parameters(), LR, BETAS, DECAY, weight_rounding=rounding)
    resumed.state.update(before.state)
    run(other, resumed, 12, first=8)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_noise_depends_on_the_parameter_and_not_on_the_order() -> None:
    """Updates in the backward call the optimizer for a few parameters at a time."""
    one = network().bfloat16()
    other = copy.deepcopy(one)
    whole = Lion(one.parameters(), LR, BETAS, DECAY, weight_rounding="stochastic")
    narrowed = Lion(other.parameters(), LR, BETAS, DECAY, weight_rounding="stochastic")
    run(one, whole, 3)
    group, parameters = narrowed.param_groups[0], list(other.parameters())
    for step in range(3):
        for parameter, gradient in zip(parameters, gradients(step, other), strict=True):
            parameter.grad = gradient
        for parameter in reversed(parameters):
            group["params"] = [parameter]
            narrowed.step()
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_any_layout_in_memory_gets_the_same_update() -> None:
    plain = nn.Parameter(torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0)).bfloat16())
    last = nn.Parameter(plain.detach().clone(memory_format=torch.channels_last))
    gradient = torch.randn(4, 3, 5, 5).bfloat16()
    for weight in (plain, last):
        weight.grad = gradient.clone()
        Lion([weight], LR, weight_rounding="stochastic").step()
    assert torch.equal(plain, last)
    assert last.is_contiguous(memory_format=torch.channels_last)


def test_sparse_gradients_are_rejected() -> None:
    table = nn.Embedding(5, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RoomierError, match="sparse=False"):
        Lion(table.parameters()).step()


def test_float64_stays_float64() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
    weight.grad = torch.ones_like(weight)
    optimizer = Lion([weight], 1e-12)
    optimizer.step()
    assert optimizer.state[weight]["momentum"].dtype is torch.float64
    assert weight[0].item() == 1 - 1e-12


def test_a_deep_copy_rounds_the_same_way() -> None:
    net = network().bfloat16()
    optimizer = Lion(net.parameters(), lr=LR, weight_rounding="stochastic")
    run(net, optimizer, 3)
    other, again = copy.deepcopy((net, optimizer))
    run(net, optimizer, 3, first=3)
    run(other, again, 3, first=3)
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
