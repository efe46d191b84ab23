"""What is computed again is what was computed: the same gradients to the last bit, for every kind of model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from roomier.activation import recompute
from roomier.activation.offload import Offload
from roomier.activation.recompute import apply_recompute
from roomier.api.blocks import find_blocks
from roomier.core.ranks import Ranks
from roomier.core.wrapped_forward import unwrap
from roomier.core.world import World
from roomier.plan.parts import ActivationPlan, OffloadPlan
from tests.activation.kinds import KINDS, Loss

CPU = torch.device("cpu")
ALONE = Ranks(World(0, 1, 0, 0, 1))
WAYS = [("full", "none"), ("every_n", "none"), ("selective", "none"), ("none", "cpu"), ("full", "cpu")]
WAYS += [("every_n", "cpu"), ("selective", "cpu")]


@dataclass
class Step:
    """What one step left: its loss, the gradients, the buffers, and where the generator stands."""

    loss: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    generator: Tensor


def step_of(network: nn.Module, loss: Loss, seed: int = 3) -> Step:
    network.zero_grad()
    torch.manual_seed(seed)
    value = loss()
    value.backward()
    gradients = {name: each.grad.clone() for name, each in network.named_parameters() if each.grad is not None}
    buffers = {name: each.clone() for name, each in network.named_buffers()}
    return Step(value.detach(), gradients, buffers, torch.get_rng_state())


def assert_equal(one: Step, other: Step) -> None:
    assert torch.equal(one.loss, other.loss)
    for ours, theirs in ((one.gradients, other.gradients), (one.buffers, other.buffers)):
        assert ours.keys() == theirs.keys()
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert torch.equal(one.generator, other.generator)


@contextmanager
def recomputed(network: nn.Module, policy: str, offload: str = "none") -> Iterator[None]:
    plans = ActivationPlan(policy=policy), OffloadPlan(activations=offload)
    apply_recompute(find_blocks(network), *plans, CPU, ALONE)
    try:
        yield
    finally:
        unwrap(network)


@pytest.fixture(autouse=True)
def moves_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "Offload", partial(Offload, min_bytes=1))


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_without(kind: str, autocast: bool) -> None:
    plain = two_steps(kind, autocast, None)
    assert not torch.equal(plain[0].loss, two_steps(kind, autocast, None, seed=4)[0].loss), "dropout"
    for way in WAYS:
        for ours, theirs in zip(two_steps(kind, autocast, way), plain, strict=True):
            assert_equal(ours, theirs)


def two_steps(kind: str, autocast: bool, way: tuple[str, str] | None, seed: int = 3) -> list[Step]:
    torch.manual_seed(0)
    network, loss = KINDS[kind]()
    network.train()

    def autocast_loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return loss()

    with nullcontext() if way is None else recomputed(network, *way):
        return [step_of(network, autocast_loss, seed) for _ in range(2)]
