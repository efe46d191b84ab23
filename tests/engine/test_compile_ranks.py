"""On several ranks, compiled blocks train like uncompiled blocks. Unsharding runs outside of the compiled code."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from typing import Any

import pytest
import torch

from tests.parallel.parity import Setup, distance, train_on_ranks
from tests.parallel.tasks import Language
from tests.ranks.pool import RankPool

SETUP = Setup(accumulate=2, clip=0.5, num_steps=2, terms="none on one")


def apart(setup: Setup, levers: list[dict[str, Any]], backend: str) -> list[tuple[float, float, int]]:
    """For each lever, return the differences of losses and weights from an uncompiled run, and the number of graphs."""
    from roomier.core import torch_private

    warnings.simplefilter("ignore")  # warnings of the compiler
    torch.compile = functools.partial(torch.compile, backend=backend)  # the process exits after the test
    plain = train_on_ranks(Language, setup)
    found = []
    for each in levers:
        before = torch_private.num_compiled_graphs()
        compiled = train_on_ranks(Language, dataclasses.replace(setup, levers={**each, "compile": True}))
        how_far = distance(compiled, plain)
        found.append((how_far.losses, how_far.weights, torch_private.num_compiled_graphs() - before))
    return found


@pytest.mark.more
@pytest.mark.parametrize(("strategy", "recompute"), [("ddp", ["full"]), ("zero3", ["selective"])], ids=str)
def test_two_ranks(on_ranks: RankPool, strategy: str, recompute: list[str]) -> None:
    levers = [{"activation_checkpointing": each} for each in recompute]
    for found in on_ranks(2, apart, dataclasses.replace(SETUP, strategy=strategy), levers, "aot_eager"):
        for losses, weights, num_graphs in found:
            assert losses < 1e-5
            assert weights < 1e-4
            assert num_graphs == 1


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_every_recomputation_on_two_ranks(on_ranks: RankPool, strategy: str) -> None:
    test_two_ranks(on_ranks, strategy, ["none", "full", "selective"])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_code_on_two_ranks(on_ranks: RankPool, strategy: str) -> None:
    for ((losses, weights, _),) in on_ranks(
        2, apart, dataclasses.replace(SETUP, strategy=strategy), [{}], "inductor", timeout_s=240
    ):
        assert losses < 1e-5
        assert weights < 1e-4
