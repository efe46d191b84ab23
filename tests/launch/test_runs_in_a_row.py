"""Several runs in the same processes: repeated fits of one model, seeds, and ranks with different models."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import roomier
from tests.covering import few
from tests.ranks.pool import RankFailed, RankPool

BATCHES = [torch.linspace(0, 1, 8).reshape(2, 4) * number for number in range(1, 9)]


class Model(roomier.Module):
    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        layers = [torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(width, 1)]
        self.net = torch.nn.Sequential(*layers)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).pow(2).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch).pow(2).mean(), batch_size=len(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05)


def trainer_of(root: Path, strategy: str, num_ranks: int, **keywords: Any) -> roomier.Trainer:
    return roomier.Trainer(
        strategy=strategy,
        devices=num_ranks,
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
        **keywords,
    )


def fit_and_look_twice(root: Path, strategy: str, num_ranks: int) -> list[float]:
    torch.manual_seed(3)
    model = Model()
    found = []
    for _ in range(2):
        trainer = trainer_of(root, strategy, num_ranks, accumulate_grad_batches=2 // num_ranks)
        trainer.fit(model, BATCHES)
        found.append(trainer.validate(model, BATCHES)[0]["val_loss"])
    return found


@pytest.mark.parametrize("strategy", few(["ddp", "zero1", "zero2", "zero3"]))
def test_a_model_can_be_fitted_and_validated_repeatedly(on_ranks: RankPool, tmp_path: Path, strategy: str) -> None:
    [expected] = on_ranks(1, fit_and_look_twice, tmp_path, "single", 1)
    first, second = on_ranks(2, fit_and_look_twice, tmp_path, strategy, 2)
    assert first == second
    assert expected[1] < expected[0]
    assert first == pytest.approx(expected, rel=1e-5)


def fit_with_two_strategies(root: Path) -> None:
    model = Model()
    trainer_of(root, "zero3", 2).fit(model, BATCHES)
    trainer_of(root, "zero2", 2).fit(model, BATCHES)


@pytest.mark.more
def test_a_sharded_model_cannot_be_sharded_differently(on_ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="was sharded in a different way by an earlier run"):
        on_ranks(2, fit_with_two_strategies, tmp_path)


def weights_without_seeds(root: Path, strategy: str) -> tuple[float, float]:
    torch.manual_seed(100 + dist.get_rank())
    model = Model()
    own = float(model.net[0].bias.detach().sum())
    trainer = trainer_of(root, strategy, 2, limit_train_batches=1)
    model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), 0.0)  # type: ignore[method-assign]
    trainer.fit(model, BATCHES)
    bias = model.net[0].bias.detach()
    return own, float((bias.full_tensor() if hasattr(bias, "full_tensor") else bias).sum())


@pytest.mark.parametrize("strategy", few(["ddp", "zero2", "zero3"]))
def test_every_rank_starts_with_the_weights_of_rank_0(on_ranks: RankPool, tmp_path: Path, strategy: str) -> None:
    zero, one = on_ranks(2, weights_without_seeds, tmp_path, strategy)
    assert zero[0] != one[0]
    assert zero[1] == pytest.approx(zero[0])
    assert one[1] == pytest.approx(zero[0])


class Draws(roomier.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.seen.append(float(torch.rand(())))


def drawn(root: Path, strategy: str, num_ranks: int) -> list[float]:
    roomier.seed_everything(11)
    draws = Draws()
    trainer_of(root, strategy, num_ranks, callbacks=[draws]).fit(Model(), BATCHES)
    return draws.seen


def test_ranks_have_different_random_numbers_and_rank_0_those_of_a_single_process(
    on_ranks: RankPool, tmp_path: Path
) -> None:
    [alone] = on_ranks(1, drawn, tmp_path, "single", 1)
    zero, one = on_ranks(2, drawn, tmp_path, "ddp", 2)
    again = on_ranks(2, drawn, tmp_path, "ddp", 2)
    assert zero == alone[: len(zero)]
    assert not set(zero) & set(one)
    assert again == [zero, one]


def fit_different_models(root: Path) -> None:
    trainer_of(root, "zero2", 2).fit(Model(width=8 + dist.get_rank()), BATCHES)


@pytest.mark.more
def test_different_models_on_the_ranks_are_reported(on_ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"rank 1 built a different model than rank 0\. 6 tensors differ"):
        on_ranks(2, fit_different_models, tmp_path)


def prepared(num_steps: int) -> float:
    torch.manual_seed(0)
    network = torch.nn.Linear(4, 1)
    parallel = {"strategy": "ddp", "devices": dist.get_world_size(), "accelerator": "cpu"}
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    engine = roomier.prepare(network, optimizer, plan={"parallel": parallel} if dist.get_world_size() > 1 else None)
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(num_steps):
        shares = BATCHES[step].split(2 // size)
        engine.forward_backward(lambda batch: network(batch).pow(2).mean(), [shares[rank]])
        engine.step()
    return float(network.weight.detach().sum())


def test_a_custom_loop_joins_the_ranks(on_ranks: RankPool) -> None:
    [alone] = on_ranks(1, prepared, 5)
    assert on_ranks(2, prepared, 5) == pytest.approx([alone, alone], rel=1e-5)
