"""Optimizers on several ranks equal one rank, and resume from a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from roomier.core.errors import RoomierError
from roomier.plan import plan_from_flags
from roomier.plan.choices import OPTIMIZERS as BY_NAME
from roomier.plan.choices import Kind
from tests.covering import few
from tests.parallel.parity import Setup, Trained, distance, engine_of, train_on_ranks
from tests.parallel.tasks import Language
from tests.ranks.pool import RankPool

OPTIMIZERS = ["lion", "muon"]
TESTED_ELSEWHERE = {"adamw", "sgd", "adafactor", *OPTIMIZERS}  # tests/parallel, and test_adafactor.py
OTHERS = [name for name, each in BY_NAME.items() if each.kind is Kind.EXACT and name not in TESTED_ELSEWHERE]
NUM_STEPS = 6
LAYOUTS = [("zero3", 2, None), ("zero1", 2, None), ("zero2", 2, None), ("ddp", 2, None), ("hsdp", 4, 2)]
# The gradient of an attention key bias is zero up to rounding, and Lion uses its sign.
UNDETERMINED = "query_key_value.bias"


@cache
def on_one_rank(pool: RankPool, optimizer: str, num_samples: int) -> Trained:
    setup = Setup("single", 1, micro_batch=num_samples, precision="64-true", optimizer=optimizer, num_steps=NUM_STEPS)
    trained: Trained = pool(1, train_on_ranks, Language, setup)[0]
    return trained


@pytest.mark.parametrize("layout", few(map(pytest.param, LAYOUTS)), ids=lambda layout: f"{layout[0]} on {layout[1]}")
def test_ranks_train_as_one_process(on_ranks: RankPool, layout: tuple[str, int, int | None]) -> None:
    check_ranks(on_ranks, layout, OPTIMIZERS)


@pytest.mark.more
def test_ranks_train_as_one_process_with_the_other_optimizers(on_ranks: RankPool) -> None:
    check_ranks(on_ranks, ("zero2", 2, None), OTHERS)


def check_ranks(on_ranks: RankPool, layout: tuple[str, int, int | None], optimizers: list[str]) -> None:
    """Use float64, in which the order of sums cannot change the values that Muon rounds to bfloat16."""
    strategy, num_ranks, shard_size = layout
    setup = Setup(strategy, num_ranks, shard_size, micro_batch=2, precision="64-true", num_steps=NUM_STEPS)
    calls = [(Language, replace(setup, optimizer=optimizer)) for optimizer in optimizers]
    for optimizer, by_rank in zip(optimizers, on_ranks.each(num_ranks, train_on_ranks, calls), strict=True):
        single = on_one_rank(on_ranks, optimizer, 2 * num_ranks)
        for trained in by_rank:
            for each in (single, trained):
                each.weights = {name: value for name, value in each.weights.items() if UNDETERMINED not in name}
            apart = distance(trained, single)
            assert apart.losses < 1e-9, (optimizer, apart)
            assert apart.weights < 1e-8, (optimizer, apart)
        assert single.losses[-1] < single.losses[0], f"{optimizer}: nothing was learned"


@pytest.mark.more
def test_losses_in_float32_are_near(on_ranks: RankPool) -> None:
    setups = [Setup("zero2", 2, micro_batch=2, optimizer=optimizer) for optimizer in OPTIMIZERS]
    alone = [replace(setup, strategy="single", num_ranks=1, micro_batch=4) for setup in setups]
    expected = on_ranks.each(1, train_on_ranks, [(Language, setup) for setup in alone])
    results = on_ranks.each(2, train_on_ranks, [(Language, setup) for setup in setups])
    for optimizer, [single], by_rank in zip(OPTIMIZERS, expected, results, strict=True):
        for trained in by_rank:
            near = pytest.approx(single.losses, rel=1e-3 if optimizer == "lion" else 1e-2)
            assert trained.losses == near, optimizer


class Own(Language):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        # A class at module level would exist in other tests of the process, where its module cannot be imported.
        kind = type("LikeBitsandbytes", (torch.optim.SGD,), {"__module__": "bitsandbytes.optim.adamw"})
        made: torch.optim.Optimizer = kind(self.parameters(), lr=0.1)
        return made


def build_own(strategy: str, kind: type[Own] = Own) -> str:
    plan = plan_from_flags(strategy=strategy, devices=2, accelerator="cpu")
    try:
        engine_of(kind(), plan)
    except RoomierError as error:
        return str(error)
    return "built"


@pytest.mark.more
def test_bitsandbytes_is_rejected_if_parameters_are_sharded(on_ranks: RankPool) -> None:
    assert on_ranks(2, build_own, "ddp") == ["built"] * 2
    for said in on_ranks(2, build_own, "zero2"):
        assert said.startswith("configure_optimizers='LikeBitsandbytes'")
        assert "optimizer='adamw8bit'" in said


class WithFusedSGD(Own):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, fused=True)


class WithAdafactor(Own):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(self.parameters())


def build_all(strategy: str) -> list[str]:
    return [build_own(strategy, kind) for kind in (WithFusedSGD, WithAdafactor)]


@pytest.mark.more
def test_optimizers_that_require_unsharded_tensors_are_rejected_before_their_first_step(on_ranks: RankPool) -> None:
    assert on_ranks(2, build_all, "ddp") == [["built"] * 2] * 2
    for fused, adafactor in on_ranks(2, build_all, "zero3"):
        assert fused.startswith("configure_optimizers='SGD': with fused=True requires unsharded tensors")
        assert "Remove fused=True" in fused
        assert adafactor.startswith("configure_optimizers='Adafactor'")
        assert "Use roomier.techniques.optim.adafactor.Adafactor" in adafactor
