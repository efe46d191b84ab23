"""Optimizers that step during backward compute bit for bit the same weights as optimizers that step after backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import roomier
from roomier.core import torch_private
from roomier.engine.prepared import PreparedEngine
from roomier.models.gpt import GPT, GPTConfig
from roomier.plan import plan_from_flags
from tests.covering import few
from tests.optim.named import CLASSES
from tests.parallel.parity import Setup, train_on_ranks
from tests.parallel.tasks import Language, TiedLanguage
from tests.ranks.pool import RankPool

NUM_STEPS = 10
CLIPS: dict[str, dict[str, Any]] = {
    "unclipped": {},
    "norm": {"gradient_clip_val": 0.5},
    "value": {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
}
ADAMW = {"name": "adamw", "lr": 3e-3}


@dataclass
class Trained:
    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor | None] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    states: list[Any] = field(default_factory=list)


def make_network(tied: bool = False, dropout: float = 0.1) -> GPT:
    torch.manual_seed(0)
    network = GPT(GPTConfig(61, context=8, num_layers=3, num_heads=2, width=16, dropout=dropout, tied_head=tied))
    with torch.no_grad():
        for each in network.parameters():
            each.mul_(4)  # large enough to be clipped
    return network


def make_engine(network: nn.Module, way: bool | str, optimizer: Any = None, **flags: Any) -> PreparedEngine:
    given = None if isinstance(optimizer, dict) else optimizer
    by_name = {"optimizer": optimizer} if isinstance(optimizer, dict) else {}
    return roomier.prepare(
        network, given, plan=plan_from_flags(step_in_backward=way, accelerator="cpu", **by_name, **flags)
    )


def train(network: nn.Module, engine: PreparedEngine, num_steps: int = NUM_STEPS) -> Trained:
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)  # for dropout
    trained = Trained()
    for _ in range(num_steps):
        tokens = torch.randint(61, (2, 9), generator=generator)
        loss = engine.forward_backward(lambda batch: network(batch[:, :-1], batch[:, 1:])[1], [tokens])
        assert loss is not None
        trained.losses.append(loss)
        norm = engine.clip()
        trained.norms.append(None if norm is None else norm.clone())
        engine.step()
    trained.weights = {name: each.detach().clone() for name, each in network.named_parameters()}
    trained.states = engine.state()["optimizers"]
    return trained


def check_same(one: Trained, other: Trained) -> None:
    torch.testing.assert_close(one.losses, other.losses, rtol=0, atol=0)
    assert one.norms == other.norms
    torch.testing.assert_close(one.weights, other.weights, rtol=0, atol=0)
    for ours, theirs in zip(one.states, other.states, strict=True):
        torch.testing.assert_close(ours["state"], theirs["state"], rtol=0, atol=0)


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_weights_are_equal_to_steps_after_backward(clip: str, tied: bool, dropout: float) -> None:
    plain, network = make_network(tied, dropout), make_network(tied, dropout)
    expected = train(plain, make_engine(plain, False, ADAMW, **CLIPS[clip]))
    found = train(network, make_engine(network, True, ADAMW, **CLIPS[clip]))
    check_same(found, expected)
    assert all(each.grad is None for each in network.parameters())
    if clip == "norm":
        assert all(norm is not None and norm > 0.5 for norm in expected.norms)  # each step was clipped


@pytest.mark.parametrize("name", [name for name in CLASSES if name != "onebit_adam"])
def test_every_optimizer_by_name(name: str) -> None:
    plain, network = make_network(), make_network()
    expected = train(plain, make_engine(plain, False, {"name": name, "lr": 1e-3}, **CLIPS["norm"]), 6)
    check_same(train(network, make_engine(network, True, {"name": name, "lr": 1e-3}, **CLIPS["norm"]), 6), expected)


@pytest.mark.parametrize("rounding", ["split", "stochastic", "nearest"])
@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_bf16_weights(name: str, rounding: str) -> None:
    """Stochastic rounding does not depend on which parameters are updated together."""
    optimizer = {"name": name, "lr": 1e-3, "weight_rounding": rounding}
    plain, network = make_network(), make_network()
    expected = train(plain, make_engine(plain, False, optimizer, precision="bf16-true", **CLIPS["norm"]), 6)
    engine = make_engine(network, True, optimizer, precision="bf16-true", **CLIPS["norm"])
    check_same(train(network, engine, 6), expected)


@pytest.mark.parametrize("fused", [False, True])
def test_optimizers_of_the_user_and_several_of_them(fused: bool) -> None:
    def engine_of(network: GPT, way: bool) -> PreparedEngine:
        inner = list(network.blocks.parameters())
        others = [each for each in network.parameters() if not any(each is one for one in inner)]
        groups = [{"params": inner[::2], "lr": 1e-2}, {"params": inner[1::2], "weight_decay": 0.0}]
        optimizers = [torch.optim.AdamW(groups, fused=fused), torch.optim.SGD(others, lr=0.01, momentum=0.9)]
        return make_engine(network, way, optimizers, **CLIPS["norm"])

    plain, network = make_network(), make_network()
    check_same(train(network, engine_of(network, True)), train(plain, engine_of(plain, False)))


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("levers", ["full", "selective", "of the model", "bf16-mixed"])
def test_recomputed_blocks(levers: str, clip: str) -> None:
    flags: dict[str, Any] = {"activation_checkpointing": levers} if levers in ("full", "selective") else {}
    flags |= {"precision": levers} if levers == "bf16-mixed" else {}
    networks = [make_network(tied=True), make_network(tied=True)]
    if levers == "of the model":
        for network in networks:
            recompute_in(network)
    plain, network = networks
    expected = train(plain, make_engine(plain, False, ADAMW, **CLIPS[clip], **flags), 6)
    check_same(train(network, make_engine(network, True, ADAMW, **CLIPS[clip], **flags), 6), expected)


def recompute_in(network: GPT, *, use_reentrant: bool = False) -> None:
    for block in network.blocks:
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=use_reentrant)


def test_a_gradient_in_several_parts_raises() -> None:
    """Reentrant recomputation runs a separate backward for each use of a weight."""
    network = make_network()
    network.blocks[1] = network.blocks[0]
    recompute_in(network, use_reentrant=True)
    for clip in CLIPS.values():
        with pytest.raises(roomier.TrainingError, match=r"gradient='blocks.*more than one part.*use_reentrant=False"):
            train(network, make_engine(network, True, ADAMW, **clip), 1)


def test_a_stale_norm_is_the_norm_of_the_previous_step() -> None:
    plain, network = make_network(dropout=0.0), make_network(dropout=0.0)
    found = train(network, make_engine(network, "stale_norm", ADAMW, **CLIPS["norm"]), 5)
    optimizer = CLASSES["adamw"](make_engine(plain, False, ADAMW).optimizers[0].param_groups, lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    before: Tensor | None = None
    for step in range(5):
        tokens = torch.randint(61, (2, 9), generator=generator)
        optimizer.zero_grad()
        plain(tokens[:, :-1], tokens[:, 1:])[1].backward()
        norm = nn.utils.get_total_norm([each.grad for group in optimizer.param_groups for each in group["params"]])
        nn.utils.clip_grads_with_norm_(plain.parameters(), 0.5, norm if before is None else before)
        optimizer.step()
        before = norm
        assert found.norms[step] == norm
    for name, each in plain.named_parameters():
        assert torch.equal(found.weights[name], each), name


def test_parameters_without_gradient_and_unfrozen_ones() -> None:
    def trained(way: bool) -> Trained:
        network = make_network()
        network.unused = nn.Linear(2, 2)
        network.blocks[1].requires_grad_(False)
        optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
        engine = make_engine(network, way, optimizer, **CLIPS["norm"])
        train(network, engine, 3)
        network.blocks[1].requires_grad_(True)
        return train(network, engine, 3)

    check_same(trained(True), trained(False))


def test_one_step_counts_as_one() -> None:
    network = make_network()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    engine = make_engine(network, True, optimizer)
    num_calls = 0

    def count(*_: Any) -> None:
        nonlocal num_calls
        num_calls += 1

    optimizer.register_step_post_hook(count)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # the scheduler warns if it steps before the optimizer
    train(network, engine, 3)
    scheduler.step()
    assert num_calls == 3
    assert {int(state["step"]) for state in optimizer.state.values()} == {3}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(network.parameters()))


def test_unsupported_calls_raise() -> None:
    network = make_network()
    tokens = torch.randint(61, (2, 9))

    def step(batch: Tensor) -> Tensor:
        loss: Tensor = network(batch[:, :-1], batch[:, 1:])[1]
        return loss

    engine = make_engine(network, True, ADAMW)
    with pytest.raises(roomier.TrainingError, match=r"2 micro-batches.*set step_in_backward=False"):
        engine.forward_backward(step, [tokens, tokens])
    engine.forward_backward(step, [tokens])
    with pytest.raises(roomier.TrainingError, match=r"clip=1.0.*used and freed.*gradient_clip_val"):
        engine.clip(1.0)
    with pytest.raises(roomier.TrainingError, match="closure"):
        engine.step(closure=lambda: 0.0)
    with pytest.raises(roomier.TrainingError, match=r"second backward pass.*engine\.step\(\)"):
        engine.forward_backward(step, [tokens])
    engine.step()

    def leaves_gradients(batch: Tensor) -> Tensor:
        step(batch).backward()
        return step(batch)

    with pytest.raises(roomier.TrainingError, match=r"gradient='tokens.*before the backward pass"):
        engine.forward_backward(leaves_gradients, [tokens])
    engine.optimizers[0].register_step_pre_hook(lambda *_: None)
    with pytest.raises(roomier.TrainingError, match="register_step_pre_hook"):
        engine.forward_backward(step, [tokens])


def test_lbfgs_is_rejected() -> None:
    network = make_network()
    with pytest.raises(roomier.PlanError, match=r"step_in_backward.*LBFGS"):
        make_engine(network, True, torch.optim.LBFGS(network.parameters()))


class CountsInItsGroup(torch.optim.Optimizer):
    """Optimizer that counts its calls, like the optimizers of some other packages."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3, "step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad * group["lr"] / (1 - 0.9 ** group["step"]))


def test_an_optimizer_that_counts_its_calls_raises() -> None:
    network = make_network()
    engine = make_engine(network, True, CountsInItsGroup(network.parameters()))
    with pytest.raises(roomier.TrainingError, match=r"CountsInItsGroup.*'step' of a parameter group"):
        train(network, engine)


def test_a_step_without_loss_changes_nothing() -> None:
    network = make_network()
    engine = make_engine(network, True, ADAMW, **CLIPS["norm"])
    before = copy.deepcopy(network.state_dict())
    assert engine.forward_backward(lambda batch: None, [0]) is None
    engine.step()
    torch.testing.assert_close(network.state_dict(), before, rtol=0, atol=0)


def test_hooks_are_removed_with_the_engine() -> None:
    network = make_network()
    engine = make_engine(network, True, ADAMW)
    assert all(torch_private.has_gradient_hooks(each) for each in network.parameters())
    engine.close()
    assert not any(torch_private.has_gradient_hooks(each) for each in network.parameters())
    forgotten = make_engine(network, True, ADAMW)
    del engine, forgotten
    plain = make_network()
    check_same(train(network, make_engine(network, False, ADAMW), 2), train(plain, make_engine(plain, False, ADAMW), 2))


def test_a_detached_use_of_a_weight_raises() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return (self.first(x) * self.last.detach() + self.last).sum()  # complete before the backward of the matmul

    network = Gate()
    engine = make_engine(network, True, torch.optim.SGD(network.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.forward_backward(network, [torch.ones(2, 4)])


def both_ways(make_task: Callable[[], Language], setup: Setup) -> bool:
    plain = Setup(**{**vars(setup), "levers": {}})
    found, expected = train_on_ranks(make_task, setup), train_on_ranks(make_task, plain)
    assert found.losses == expected.losses
    assert found.norms == expected.norms
    torch.testing.assert_close(found.weights, expected.weights, rtol=0, atol=0)
    return bool(found.norms) == (setup.clip is not None and setup.clip_algorithm == "norm")


ON_RANKS = {
    "zero2": Setup("zero2"),
    "zero2, norm": Setup("zero2", clip=0.5),
    "zero3, norm, bf16-mixed": Setup("zero3", clip=0.5, precision="bf16-mixed"),
    "zero3, value": Setup("zero3", clip=1e-3, clip_algorithm="value"),
    "zero3, a rank without terms": Setup("zero3", clip=0.5, terms="none on one"),
    "hsdp, norm": Setup("hsdp", 4, 2, clip=0.5),
}


@pytest.mark.parametrize("every_pair", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("strategy", few(["zero3", "zero2", "hsdp"]))
def test_sharded_weights(on_ranks: RankPool, strategy: str, every_pair: bool) -> None:
    """Either every second case has a tied output layer, or each case is tested with and without a tied output layer."""
    cases = {
        (name, make_task): replace(setup, levers={"step_in_backward": True}, num_steps=4)
        for index, (name, setup) in enumerate(ON_RANKS.items())
        for make_task in ((Language, TiedLanguage) if every_pair else ((Language, TiedLanguage)[index % 2],))
        if setup.strategy == strategy
    }
    num_ranks = 4 if strategy == "hsdp" else 2
    results = on_ranks.each(num_ranks, both_ways, [(make_task, setup) for (_, make_task), setup in cases.items()])
    for case, by_rank in zip(cases, results, strict=True):
        assert all(by_rank), case


def test_a_parameter_that_was_removed_from_its_optimizer_is_not_updated() -> None:
    network = make_network()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    engine = make_engine(network, True, optimizer)
    train(network, engine, 1)
    taken = optimizer.param_groups[0]["params"].pop(0)
    before = taken.detach().clone()
    train(network, engine, 1)
    assert torch.equal(taken, before)
