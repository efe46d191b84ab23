"""Ranks that exit during a run, or hang while the process group is created."""

import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import roomier
from roomier.launch import failure, group
from tests.ranks.pool import RankFailed, RankPool


class Leaving(roomier.Module):
    """Module that exits in the second step on the given ranks."""

    def __init__(self, ranks: list[int]) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
        self.ranks = ranks

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == 1 and self.trainer.global_rank in self.ranks:
            sys.exit(0)
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


def fit(root: Path, ranks: list[int]) -> str:
    failure._EXIT_S = 0.5 if len(ranks) == 1 else 60.0
    trainer = roomier.Trainer(
        strategy="ddp",
        devices="auto",
        accelerator="cpu",
        max_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
    )
    try:
        trainer.fit(Leaving(ranks), [torch.ones(2, 4)] * 8)
    except SystemExit as exit:
        return f"exit code {exit.code} at step {trainer.global_step}"
    return "complete"


def test_an_exit_of_one_rank_with_code_0_is_an_error(on_ranks: RankPool, tmp_path: Path) -> None:
    text = (
        r"TrainingError: rank=1: exited with code 0 at step 1 of fit, but ranks \[0\] did not exit. Exit on all ranks"
    )
    with pytest.raises(RankFailed, match=text) as caught:
        on_ranks(2, fit, tmp_path, [1], joins=False)
    assert caught.value.rank == 1


@pytest.mark.more
def test_all_ranks_can_exit_with_code_0_in_the_same_step(on_ranks: RankPool, tmp_path: Path) -> None:
    assert on_ranks(2, fit, tmp_path, [0, 1], joins=False) == ["exit code 0 at step 1"] * 2


def hang_while_the_ranks_connect(root: Path, rank: int) -> str:
    """Make ``rank`` hang after the rendezvous."""
    connect = group._connect

    def connect_or_hang(world: Any, device_type: str, store: Any, news: Any, timeout_s: float) -> None:
        if world.rank == rank:
            time.sleep(600)
        connect(world, device_type, store, news, 0.5)

    group._connect = connect_or_hang
    return fit(root, [])


@pytest.mark.more
def test_ranks_end_if_the_process_group_is_not_created_in_time(on_ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as caught:
        on_ranks(3, hang_while_the_ranks_connect, tmp_path, 1, joins=False)
    problem = "the process group was not created within 0.5 s after the rendezvous"
    text = f"roomier: {problem}; these ranks have ended or cannot be reached: [1]"
    assert text in caught.value.reports[0]


def fail_while_the_ranks_connect(root: Path, rank: int) -> str:
    """Raise an error on ``rank`` after the rendezvous. No process watches the ranks."""
    connect, failure._END_S = group._connect, 0.2

    def connect_or_fail(world: Any, device_type: str, store: Any, news: Any, timeout_s: float) -> None:
        if world.rank == rank:
            error = RuntimeError("[gloo/transport/tcp/socket.cc:24] socket: Too many open files")
            sys.excepthook(RuntimeError, error, None)
            raise error
        connect(world, device_type, store, news, timeout_s)

    group._connect = connect_or_fail
    return fit(root, [])


@pytest.mark.more
@pytest.mark.timeout(60)
def test_ranks_end_if_a_rank_fails_before_the_process_group_exists(on_ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as caught:
        on_ranks(2, fail_while_the_ranks_connect, tmp_path, 1, joins=False)
    assert "rank 1 failed before the process group was created, so the run ends" in caught.value.reports[0]


def fit_with_few_open_files_on_rank_1(root: Path) -> str:
    failure._END_S = 0.2
    if os.environ["RANK"] == "1":
        resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
    try:
        return fit(root, [])
    except roomier.RoomierError as error:
        sys.excepthook(type(error), error, None)
        raise


@pytest.mark.more
@pytest.mark.timeout(60)
def test_a_limit_on_open_files_is_an_error_that_names_the_limit(on_ranks: RankPool, tmp_path: Path) -> None:
    """Rank 0 ends, too, although it has no such limit and no process watches the ranks."""
    with pytest.raises(RankFailed, match=r"ulimit -n=20: is too small a limit.*Run `ulimit -n 1024` before") as caught:
        on_ranks(2, fit_with_few_open_files_on_rank_1, tmp_path, joins=False)
    assert "rank 1 failed before the process group was created, so the run ends" in caught.value.reports[0]
