"""Tests that unsupported models are rejected on every rank, with an error that contains an action and without a
hang."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from roomier.core.errors import RoomierError, TrainingError
from tests.parallel.parity import Batch, Setup, batches_of, engine_of
from tests.parallel.test_shapes import WIDTH, Regression
from tests.ranks.pool import RankFailed, RankPool

pytestmark = pytest.mark.more

SHARDED = ["zero1", "zero2", "zero3"]


class Mixed(Regression):
    def make_network(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(18, 4), nn.Linear(4, 1, dtype=torch.bfloat16))


class Linear(Regression):
    def make_network(self) -> nn.Module:
        return nn.Linear(WIDTH, 1)


class Complex(Regression):
    """A model whose parameters are all complex."""

    def make_network(self) -> nn.Module:
        return nn.Linear(WIDTH, 1, dtype=torch.complex64)


def message_of_build(task: type[Regression], strategy: str) -> str:
    try:
        engine_of(task(), Setup(strategy).plan())
    except RoomierError as error:
        return str(error)
    return "built"


@pytest.mark.parametrize("strategy", SHARDED)
def test_trained_parameters_of_two_dtypes_are_rejected(on_ranks: RankPool, strategy: str) -> None:
    for message in on_ranks(2, message_of_build, Mixed, strategy):
        assert "float32" in message
        assert "bfloat16" in message
        assert "strategy='ddp'" in message


def test_complex_parameters_are_rejected(on_ranks: RankPool) -> None:
    for message in on_ranks(2, message_of_build, Complex, "zero2"):
        assert "weight" in message
        assert "complex64" in message
        assert "strategy='ddp'" in message


def messages_of_second_builds() -> list[str]:
    messages = []
    for second in ("zero1", "ddp"):
        task = Linear()
        engine_of(task, Setup("zero3").plan())
        with pytest.raises(RoomierError) as caught:
            engine_of(task, Setup(second).plan())
        messages.append(str(caught.value))
    return messages


def test_model_sharded_differently_by_an_earlier_run_is_rejected(on_ranks: RankPool) -> None:
    for messages in on_ranks(2, messages_of_second_builds):
        for message in messages:
            assert "was sharded in a different way by an earlier run" in message


class NoLoss(Regression):
    """Module that returns no loss on rank 1."""

    def make_network(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(18, 1))

    def training_step(self, batch: Batch) -> Tensor | None:  # type: ignore[override]
        return None if dist.get_rank() == 1 else self.loss(batch)


def run_one_step(task: type[Regression], strategy: str) -> None:
    module, setup = task(), Setup(strategy, num_steps=1)
    engine, ranks = engine_of(module, setup.plan())
    engine.forward_backward(
        lambda batch, _: module.training_step(batch), batches_of(module, setup)[0][ranks.world.rank]
    )


@pytest.mark.parametrize("strategy", ["ddp", *SHARDED])
def test_missing_loss_on_one_rank_raises(on_ranks: RankPool, strategy: str) -> None:
    begin = time.perf_counter()
    with pytest.raises(RankFailed, match=r"(?s)rank 1 failed first.*returned no loss on rank 1.*0\.0 \* loss"):
        on_ranks(2, run_one_step, NoLoss, strategy)
    assert time.perf_counter() - begin < 60


class ReadsWeight(Regression):
    """Module that multiplies by the weight of a layer without calling the layer."""

    def make_network(self) -> nn.Module:
        return nn.ModuleDict({"read": nn.Linear(6, 6), "head": nn.Linear(6, 1)})

    def predict(self, x: Tensor) -> Tensor:
        assert isinstance(self.network, nn.ModuleDict)
        prediction: Tensor = self.network["head"]((x @ self.network["read"].weight).mean(dim=1))
        return prediction


def message_of_step(task: type[Regression], strategy: str) -> str:
    try:
        run_one_step(task, strategy)
    except TrainingError as error:
        return str(error)
    return "ran"


@pytest.mark.parametrize("strategy", SHARDED)
def test_reading_a_weight_without_calling_its_layer_raises(on_ranks: RankPool, strategy: str) -> None:
    for message in on_ranks(2, message_of_step, ReadsWeight, strategy):
        assert "training_step" in message
        assert "model_blocks" in message
