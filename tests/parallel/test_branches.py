"""Steps that do not use the whole model."""

import pytest
import torch
from torch import Tensor, nn

from tests.parallel.parity import Setup, distance, train_bare, train_on_ranks
from tests.parallel.test_shapes import WIDTH, Mean, Regression, Residual
from tests.ranks.pool import RankFailed, RankPool


class Branching(Regression):
    """Three blocks, of which the second is left out now and then."""

    def make_network(self) -> nn.Module:
        return nn.Sequential(Residual(), Residual(), Residual(), Mean(), nn.Linear(WIDTH, 1))

    def leaves_out(self, x: Tensor) -> bool:
        raise NotImplementedError

    def predict(self, x: Tensor) -> Tensor:
        assert isinstance(self.network, nn.Sequential)
        leaves_out = self.leaves_out(x)
        for index, layer in enumerate(self.network):
            if not (leaves_out and index == 1):
                x = layer(x)
        return x


class EverySecondStep(Branching):
    """The same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def leaves_out(self, x: Tensor) -> bool:
        self.num_calls += 1
        return self.num_calls % 2 == 0


class ByData(Branching):
    """As the micro-batch says, another on each rank."""

    def leaves_out(self, x: Tensor) -> bool:
        return bool(x[0, 0, 0] > 0)


class NeverFirst(EverySecondStep):
    def leaves_out(self, x: Tensor) -> bool:
        return not super().leaves_out(x)


FINDS_UNUSED = {"find_unused_parameters": True}


@pytest.mark.parametrize("task", [EverySecondStep, NeverFirst], ids=lambda task: task.__name__)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_a_block_that_some_steps_leave_out_on_all_ranks(
    on_ranks: RankPool, strategy: str, task: type[Branching]
) -> None:
    """In such a step its optimizer states rest, as in one process."""
    setup = Setup(strategy, 2, num_steps=6, options=FINDS_UNUSED if strategy == "ddp" else {})
    [trained, *_] = on_ranks(2, train_on_ranks, task, setup)
    apart = distance(trained, train_bare(task, setup))
    assert max(apart.losses, apart.weights) < 1e-5, apart


def test_ddp_may_take_another_way_on_each_rank(on_ranks: RankPool) -> None:
    setup = Setup("ddp", 2, accumulate=2, num_steps=8, options=FINDS_UNUSED)
    [trained, *_] = on_ranks(2, train_on_ranks, ByData, setup)
    apart = distance(trained, train_bare(ByData, setup, in_parts=True))
    assert max(apart.losses, apart.weights) < 1e-5, apart


def test_ddp_refuses_a_parameter_that_is_left_out_later(on_ranks: RankPool) -> None:
    with pytest.raises(RankFailed, match=r"(?s)got no gradient in this step.*find_unused_parameters"):
        on_ranks(2, train_on_ranks, EverySecondStep, Setup("ddp", 2, num_steps=3))


def test_batches_of_this_file_take_both_ways() -> None:
    generator = torch.Generator().manual_seed(1)
    task = ByData()
    ways = {task.leaves_out(task.make_batch(2, generator)["x"]) for _ in range(32)}
    assert ways == {True, False}
