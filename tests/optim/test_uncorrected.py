"""Adam and AdamW without bias correction."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roomier import PlanError
from roomier.techniques.optim.by_name import make_optimizer

LR, BETAS, EPS, DECAY = 0.01, (0.9, 0.99), 1e-6, 0.1
OPTIONS: dict[str, Any] = {"betas": BETAS, "eps": EPS, "bias_correction": False}
STEPS = 5


def gradients() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 4, dtype=torch.float64, generator=generator) for _ in range(STEPS)]


def by_formula(weight: Tensor, *, is_decoupled: bool) -> Tensor:
    """Return the weight after the steps of Adam (Kingma and Ba 2015, Algorithm 1) without the two corrections."""
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
    for gradient in gradients():
        if is_decoupled:
            weight = weight * (1 - LR * DECAY)
        else:
            gradient = gradient + DECAY * weight
        mean = BETAS[0] * mean + (1 - BETAS[0]) * gradient
        square = BETAS[1] * square + (1 - BETAS[1]) * gradient**2
        weight = weight - LR * mean / (square.sqrt() + EPS)
    return weight


def made(name: str, options: dict[str, Any]) -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(1)
    net = nn.Linear(4, 3, bias=False, dtype=torch.float64)
    return net, make_optimizer(name, net, lr=LR, weight_decay=DECAY, options={**OPTIONS, **options})


@pytest.mark.parametrize("name", ["adam", "adamw"])
@pytest.mark.parametrize(
    "options", [{"fused": True}, {"foreach": True}, {"foreach": False}, {"amsgrad": True}], ids=str
)
def test_steps_equal_the_formula_and_a_resumed_optimizer_continues(name: str, options: dict[str, Any]) -> None:
    net, optimizer = made(name, options)
    expected = by_formula(net.weight.detach().clone(), is_decoupled=name == "adamw")
    for index, gradient in enumerate(gradients()):
        if index == 2:
            saved, weight = optimizer.state_dict(), net.weight.detach().clone()
            net, optimizer = made(name, options)
            optimizer.load_state_dict(saved)
            net.load_state_dict({"weight": weight})

        def closure(parameter: nn.Parameter = net.weight, gradient: Tensor = gradient) -> float:
            parameter.grad = gradient.clone()
            return 2.0

        assert optimizer.step(closure) == 2.0
    if not options.get("amsgrad"):  # the maximum of the second moments has another formula
        # each of the steps rounds about ten times to 53 bits, relative to weights of at most 1
        torch.testing.assert_close(net.weight.detach(), expected, rtol=0, atol=1e-13)
    state = optimizer.state[net.weight]
    assert ("max_exp_avg_sq" in state) == bool(options.get("amsgrad"))


def test_hooks_of_the_step_run_once() -> None:
    made("adamw", {"bias_correction": True})[1].step()  # torch wraps the step of the base class in the first instance
    net, optimizer = made("adamw", {})
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    net.weight.grad = torch.ones_like(net.weight)
    optimizer.step()
    assert calls == ["before", "after"]


def test_bias_correction_true_is_the_optimizer_of_torch() -> None:
    assert type(made("adamw", {"bias_correction": True})[1]) is torch.optim.AdamW


@pytest.mark.parametrize(("name", "options"), [("adamw8bit", {}), ("sgd", {}), ("adamw", {"bias_correction": 3})])
def test_other_optimizers_and_values_are_rejected(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="'bias_correction': is not an option of"):
        make_optimizer(name, nn.Linear(4, 3), options={"bias_correction": False, **options})
