"""A model that is divided among ranks trains with a chunked loss as a bare loop does without."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch

from roomier.plan import Plan
from roomier.plan.parts import LossPlan
from tests.parallel.parity import Setup, distance, train_bare, train_on_ranks
from tests.parallel.tasks import Language, TiedLanguage
from tests.ranks.pool import RankPool


@dataclass(frozen=True)
class Chunked(Setup):
    """Five tokens at a time, which divide no batch."""

    chunk_tokens: int | None = 5

    def plan(self) -> Plan:
        return dataclasses.replace(super().plan(), loss=LossPlan(chunked=True, chunk_tokens=self.chunk_tokens))


LAYOUTS = [("ddp", 2, None), ("zero1", 2, None), ("zero2", 2, None), ("zero3", 2, None), ("hsdp", 4, 2)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout[0])
@pytest.mark.parametrize("task", [Language, TiedLanguage])
def test_each_strategy(on_ranks: RankPool, task: type[Language], layout: tuple[str, int, int | None]) -> None:
    setup = Chunked(*layout, accumulate=2, clip=0.5, terms="none on one", num_steps=6)
    trained = on_ranks(setup.num_ranks, train_on_ranks, task, setup)
    assert distance(trained[1], trained[0]).weights == 0.0
    apart = distance(trained[0], train_bare(task, setup))
    assert max(apart.losses, apart.norms, apart.weights) < 1e-5, apart


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("task", [Language, TiedLanguage])
def test_each_strategy_in_bf16(on_ranks: RankPool, task: type[Language], strategy: str) -> None:
    """One step has no past in which roundings grow."""
    setup = Chunked(strategy, 2, precision="bf16-mixed", num_steps=1)
    [trained, *_] = on_ranks(2, train_on_ranks, task, setup)
    apart = distance(trained, train_bare(task, setup, in_parts=True))
    assert apart.losses < 1e-5, apart
    assert apart.weights < 2**-8, apart
