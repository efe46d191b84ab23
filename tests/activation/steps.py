"""One step with and without a policy, and its results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from roomier.api.blocks import find_blocks
from roomier.core.ranks import Ranks
from roomier.core.world import World
from roomier.core.wrapped_forward import unwrap
from roomier.plan.parts import ActivationPlan, OffloadPlan
from roomier.techniques.activation.recompute import apply_recompute
from tests.activation.kinds import Loss

CPU = torch.device("cpu")
ALONE = Ranks(World(0, 1, 0, 0, 1))
WAYS = [("full", "none"), ("every_n", "none"), ("selective", "none"), ("none", "cpu"), ("full", "cpu")]
WAYS += [("every_n", "cpu"), ("selective", "cpu")]
"""Policies, and the place of the saved activations."""


@dataclass
class Step:
    """Results of one step: its loss, the gradients, the buffers, and the state of the generator."""

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


def use_no_cache(network: nn.Module) -> None:
    """Disable the key-value cache of a Hugging Face ``network``, as recomputed blocks do.

    Keys from a cache have a different memory layout, so a matrix product can run a different kernel.
    """
    for module in network.modules():  # the decoder of T5 has a copy of the config
        if hasattr(config := getattr(module, "config", None), "use_cache"):
            config.use_cache = False


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
