"""All ranks stop at the same save point, regardless of which rank receives the request, and no rank waits forever."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import roomier
from roomier.core.ranks import Ranks
from roomier.core.world import World
from roomier.run.run import Vote
from tests.covering import few

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Plain(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.num_validated = 0

    def training_step(self, batch, batch_idx):
        self.during(batch_idx)
        return self.net(batch.float().reshape(-1, 1)).mean()

    def during(self, batch_idx: int) -> None: ...

    def validation_step(self, batch, batch_idx):
        self.num_validated += 1

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module: roomier.Module, root: Any, data: Any = None, **keywords: Any) -> tuple[int, int, Any]:
    """Return the number of steps, the exit status of the process, and the checkpoints."""
    trainer = roomier.Trainer(
        **QUIET,
        **{"max_steps": 20, "enable_checkpointing": False, **keywords},
        strategy="ddp",
        devices=dist.get_world_size(),
        default_root_dir=root,
    )
    status = 0
    try:
        trainer.fit(module, [torch.ones(2)] * 100 if data is None else data, keywords.get("val"))
    except SystemExit as error:
        status = int(error.code or 0)
    dist.barrier()
    return trainer.global_step, status, sorted(path.name for path in root.glob("*/checkpoints/*"))


class Asks(Plain):
    def during(self, batch_idx: int) -> None:
        if self.global_rank == 1 and batch_idx == 4:
            self.trainer.should_stop = True


def ask_to_stop(root: Any) -> int:
    return fit(Asks(), root)[0]


def test_request_of_one_rank_takes_effect_one_step_later_on_all(on_ranks, tmp_path):
    assert on_ranks(4, ask_to_stop, tmp_path) == [6] * 4


class GetsSignal(Plain):
    def during(self, batch_idx: int) -> None:
        if self.global_rank == 1 and batch_idx == 4:
            os.kill(os.getpid(), signal.SIGTERM)


def get_signal(root: Any) -> tuple[int, int, Any]:
    return fit(GetsSignal(), root, enable_checkpointing=True)


def test_signal_to_one_rank_ends_and_saves_all(on_ranks, tmp_path):
    for steps, status, checkpoints in on_ranks(2, get_signal, tmp_path):
        assert (steps, status) == (6, 128 + signal.SIGTERM)
        assert "interrupted-step=6" in checkpoints


class Slow(Plain):
    def during(self, batch_idx: int) -> None:
        time.sleep(0.02)


def run_out_of_time(root: Any) -> int:
    # The second rank has a longer limit.
    seconds = 1 if dist.get_rank() == 0 else 3600
    return fit(Slow(), root, max_steps=1000, max_time={"seconds": seconds}, data=[torch.ones(2)] * 4000)[0]


@pytest.mark.more
def test_time_limit_of_one_rank_ends_all(on_ranks, tmp_path):
    first, second = on_ranks(2, run_out_of_time, tmp_path)
    assert first == second < 1000


class StopsWhenValidated(roomier.Callback):
    def on_validation_end(self, trainer, pl_module):
        trainer.should_stop = trainer.should_stop or (not trainer.sanity_checking and trainer.global_rank == 1)


def stop_after_validation(root: Any) -> int:
    trainer = roomier.Trainer(
        **QUIET,
        enable_checkpointing=False,
        max_steps=20,
        val_check_interval=3,
        strategy="ddp",
        devices=2,
        default_root_dir=root,
        callbacks=[StopsWhenValidated()],
    )
    trainer.fit(Plain(), [torch.ones(2)] * 20, [torch.ones(2)] * 3)
    return trainer.global_step


@pytest.mark.more
def test_request_after_a_validation_takes_effect_immediately(on_ranks, tmp_path):
    assert on_ranks(2, stop_after_validation, tmp_path) == [3, 3]


class GetsSignalInValidation(Plain):
    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        if batch_idx == 1 and self.global_rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)


def validate_and_get_signal(verb: str) -> tuple[int, int]:
    trainer = roomier.Trainer(**QUIET, enable_checkpointing=False, strategy="zero3", devices=2)
    module, status = GetsSignalInValidation(), 0
    try:
        trainer.validate(module, [torch.ones(2)] * 40)
    except SystemExit as error:
        status = int(error.code or 0)
    return module.num_validated, status


@pytest.mark.more
def test_evaluation_is_interrupted_on_all_ranks(on_ranks):
    """The first rank receives a signal in its second batch."""
    assert on_ranks(2, validate_and_get_signal, "validate") == [(3, 143)] * 2


class OfOwnLength(IterableDataset[torch.Tensor]):
    """Dataset that yields a different number of batches on each rank, and has no length."""

    shards_by_rank = True

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.ones(1)] * (5 + 4 * dist.get_rank()))


class Counts(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.num_batches: list[int] = []

    def on_train_epoch_start(self):
        self.num_batches.append(0)

    def during(self, batch_idx: int) -> None:
        self.num_batches[-1] += 1


def train_on_streams(accumulate: int, root: Any) -> tuple[list[int], int]:
    module = Counts()
    loader = DataLoader(OfOwnLength(), batch_size=1)
    steps, _, _ = fit(module, root, loader, accumulate_grad_batches=accumulate, max_epochs=2, max_steps=-1)
    return module.num_batches, steps


@pytest.mark.parametrize(("accumulate", "num_steps"), few([(1, 10), (2, 6)]))
def test_epoch_ends_with_the_shortest_stream(on_ranks, tmp_path, accumulate: int, num_steps: int):
    assert on_ranks(2, train_on_streams, accumulate, tmp_path) == [([5, 5], num_steps)] * 2


def train_on_lists(root: Any) -> int:
    # The user probably does not intend this, but no rank waits forever.
    return fit(Plain(), root, [torch.ones(1)] * (6 + 2 * dist.get_rank()), max_epochs=1, max_steps=-1)[0]


@pytest.mark.more
def test_shortest_loader_counts(on_ranks, tmp_path):
    assert on_ranks(2, train_on_lists, tmp_path) == [3, 3]


def vote() -> list[Any]:
    rank = dist.get_rank()
    ballot = Vote(Ranks(World(rank, dist.get_world_size())))
    outcomes = [ballot.cast([int(number == rank), rank]) for number in range(3)]
    return [*outcomes, ballot.settle([0, 0]), ballot.settle([rank * 5, 0])]


@pytest.mark.more
def test_vote_is_known_one_vote_later(on_ranks):
    expected = [None, [1, 2], [1, 2], [1, 2], [10, 0]]
    assert on_ranks(3, vote) == [expected] * 3
