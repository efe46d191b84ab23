"""On several ranks, training with recomputation is bit-identical to training without recomputation, including dropout.

``tests/parallel`` compares runs on several ranks, without recomputation, with a plain loop.
"""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from roomier.techniques.parallel.collectives import PairwiseAllGather
from tests.covering import covering, few
from tests.parallel.parity import Setup, train_on_ranks
from tests.parallel.tasks import Language
from tests.ranks.pool import RankPool

CALLS: list[nn.Module] = []
"""Calls of the last block."""


class Dropping(Language):
    dropout = 0.2

    def make_network(self) -> nn.Module:
        network = super().make_network()
        network.blocks[-1].norm_attention.register_forward_hook(lambda norm, *_: CALLS.append(norm))
        return network


class TiedDropping(Dropping):
    tied_head = True


FULL: dict[str, Any] = {"activation_checkpointing": "full"}
SELECTIVE: dict[str, Any] = {"activation_checkpointing": "selective"}
MOVED: dict[str, Any] = {"activation_checkpointing": "every_n", "offload": {"activations": "cpu"}}
SETUP = Setup(accumulate=2, clip=0.5, num_steps=2, terms="none on one")
UNUSED = {"find_unused_parameters": True}
BF16 = {"precision": "bf16-mixed"}


def apart(setup: Setup, task: type[Language] = Dropping) -> list[str]:
    """Return the differences after some steps, for each setting that saves fewer activations."""
    plain = train_on_ranks(task, setup)
    num_calls = len(CALLS)
    found = []
    for levers in (FULL, SELECTIVE, MOVED):
        CALLS.clear()
        ours = train_on_ranks(task, dataclasses.replace(setup, levers=levers))
        if len(CALLS) != 2 * num_calls:
            found.append(f"{levers}: called {len(CALLS)} times instead of two times {num_calls}")
        if ours.losses != plain.losses or ours.norms != plain.norms:
            found.append(f"{levers}: losses {ours.losses} instead of {plain.losses}")
        differ = [name for name, weight in plain.weights.items() if not torch.equal(ours.weights[name], weight)]
        found += [f"{levers}: {name}" for name in differ]
    return found


@pytest.mark.parametrize(
    ("strategy", "precision"), few(covering(["zero3", "zero2", "ddp", "zero1"], ["bf16-mixed", "32-true"]))
)
def test_two_ranks(on_ranks: RankPool, strategy: str, precision: str) -> None:
    setup = dataclasses.replace(SETUP, strategy=strategy, precision=precision)
    assert on_ranks(2, apart, setup) == [[], []]


def gathers_of_a_step(setup: Setup) -> list[float]:
    """Return the number of collectives without recomputation and with each setting."""
    counts = []
    gather = PairwiseAllGather.__call__
    for levers in ({}, FULL, SELECTIVE):
        with patch.object(PairwiseAllGather, "__call__", autospec=True, side_effect=gather) as counted:
            train_on_ranks(Dropping, dataclasses.replace(setup, levers=levers))
        counts.append(counted.call_count / setup.num_steps)
    return counts


@pytest.mark.more
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_a_second_forward_runs_no_additional_all_gather(on_ranks: RankPool, strategy: str) -> None:
    """The block is already unsharded for its backward, including norms and weights of matmuls."""
    setup = Setup(strategy, precision="bf16-mixed", num_steps=2)
    for none, full, selective in on_ranks(2, gathers_of_a_step, setup):
        assert none == full == selective > 0


@pytest.mark.more
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_parameters_that_may_be_unused(on_ranks: RankPool, strategy: str) -> None:
    setup = dataclasses.replace(SETUP, strategy=strategy, options=UNUSED, precision="bf16-mixed")
    assert on_ranks(2, apart, setup, TiedDropping) == [[], []]


@pytest.mark.more
def test_four_ranks_in_groups(on_ranks: RankPool) -> None:
    setup = dataclasses.replace(SETUP, strategy="hsdp", num_ranks=4, shard_size=2, precision="bf16-mixed")
    assert on_ranks(4, apart, setup) == [[]] * 4
