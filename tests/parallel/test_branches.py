"""Tests of steps that use only some blocks of the model."""

import pytest
import torch
from torch import Tensor, nn

from tests.parallel.parity import Setup, distance, train_bare, train_on_ranks
from tests.parallel.test_shapes import WIDTH, Mean, Regression, Residual
from tests.ranks.pool import RankFailed, RankPool

pytestmark = pytest.mark.more


class Branching(Regression):
    """Network with three blocks. Some steps skip the second block."""

    def make_network(self) -> nn.Module:
        return nn.Sequential(Residual(), Residual(), Residual(), Mean(), nn.Linear(WIDTH, 1))

    def skips_block(self, x: Tensor) -> bool:
        raise NotImplementedError

    def predict(self, x: Tensor) -> Tensor:
        assert isinstance(self.network, nn.Sequential)
        skips_block = self.skips_block(x)
        for index, layer in enumerate(self.network):
            if not (skips_block and index == 1):
                x = layer(x)
        return x


class EverySecondStep(Branching):
    """Module that skips the block in the same steps on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def skips_block(self, x: Tensor) -> bool:
        self.num_calls += 1
        return self.num_calls % 2 == 0


class ByData(Branching):
    """Module that skips the block for some micro-batches, which differ between ranks."""

    def skips_block(self, x: Tensor) -> bool:
        return bool(x[0, 0, 0] > 0)


class NeverFirst(EverySecondStep):
    def skips_block(self, x: Tensor) -> bool:
        return not super().skips_block(x)


FINDS_UNUSED = {"find_unused_parameters": True}


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_block_skipped_on_all_ranks_in_some_steps(on_ranks: RankPool, strategy: str) -> None:
    """A step that skips the block does not change its optimizer states, as in one process."""
    setup = Setup(strategy, 2, num_steps=6, options=FINDS_UNUSED if strategy == "ddp" else {})
    tasks = [EverySecondStep, NeverFirst]
    results = on_ranks.each(2, train_on_ranks, [(task, setup) for task in tasks])
    for task, [trained, *_] in zip(tasks, results, strict=True):
        apart = distance(trained, train_bare(task, setup))
        assert max(apart.losses, apart.weights) < 1e-5, (task.__name__, apart)


def test_ddp_supports_different_blocks_on_each_rank(on_ranks: RankPool) -> None:
    setup = Setup("ddp", 2, accumulate=2, num_steps=8, options=FINDS_UNUSED)
    [trained, *_] = on_ranks(2, train_on_ranks, ByData, setup)
    apart = distance(trained, train_bare(ByData, setup, in_parts=True))
    assert max(apart.losses, apart.weights) < 1e-5, apart


def test_ddp_rejects_a_parameter_first_unused_in_a_later_step(on_ranks: RankPool) -> None:
    with pytest.raises(RankFailed, match=r"(?s)has no gradient in this step.*find_unused_parameters"):
        on_ranks(2, train_on_ranks, EverySecondStep, Setup("ddp", 2, num_steps=3))


def test_batches_both_run_and_skip_the_block() -> None:
    generator = torch.Generator().manual_seed(1)
    task = ByData()
    choices = {task.skips_block(task.make_batch(2, generator)["x"]) for _ in range(32)}
    assert choices == {True, False}
