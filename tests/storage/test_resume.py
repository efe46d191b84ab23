"""Runs whose checkpoints are in remote storage resume bit-equal after server faults, on any machine."""

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roomier.core.errors import CheckpointError
from tests.ranks.pool import RankPool
from tests.storage.runs import check_storage, journal_of, train
from tests.storage.servers import TEMPORARY, Fault, Proxy, Request

# Each rank is a fork of a process that has imported this file, so the clients are not imported again in each rank.
pytest.importorskip("s3fs", reason="requires the extra services")
pytestmark = pytest.mark.services

NewMachine = Callable[[], None]


@pytest.mark.parametrize(("strategy", "first", "then"), [("single", 1, 1), ("zero3", 2, 2), ("zero3", 2, 1)])
def test_a_new_machine_resumes_bit_equal(
    strategy: str, first: int, then: int, tmp_path: Path, s3: Proxy, on_ranks: RankPool, new_machine: NewMachine
) -> None:
    """The run continues like a local run: like an uninterrupted run if the number of ranks is the same."""
    on_ranks(first, train, "s3://bucket/runs", tmp_path / "remote", 3, strategy=strategy)
    new_machine()
    on_ranks(then, train, "s3://bucket/runs", tmp_path / "remote", 6, strategy=strategy)
    assert check_storage("s3://bucket/runs", at_least=6) == 6
    on_ranks(first, train, tmp_path / "runs", tmp_path / "local", 6 if first == then else 3, strategy=strategy)
    if first != then:
        on_ranks(then, train, tmp_path / "runs", tmp_path / "local", 6, strategy=strategy)
    for rank in range(first):
        assert journal_of(tmp_path / f"remote.{rank}") == journal_of(tmp_path / f"local.{rank}")


def test_server_faults_during_runs(tmp_path: Path, s3: Proxy, on_ranks: RankPool, new_machine: NewMachine) -> None:
    """Each of ten runs resumes the one before on a new machine, while a request fails, is cut or is delayed."""
    num_faults, draw = 10, random.Random(0)
    on_ranks(1, train, tmp_path / "local", tmp_path / "expected", 2 * num_faults)
    root = "s3://bucket/runs"
    for turn in range(num_faults):
        fault, at = TEMPORARY[turn % len(TEMPORARY)], draw.randrange(40)
        s3.clear()  # the index counts only the requests of this run
        s3.fault_of = lambda request, index, fault=fault, at=at: fault if index == at else None
        on_ranks(1, train, root, tmp_path / "journal", 2 * turn + 2)
        assert fault in {each.fault for each in s3.requests}
        s3.clear()
        new_machine()
        assert check_storage(root, at_least=2 * turn + 2) == 2 * turn + 2
    assert journal_of(tmp_path / "journal.0") == journal_of(tmp_path / "expected.0")


def test_faults_of_one_rank(tmp_path: Path, s3: Proxy, on_ranks: RankPool, new_machine: NewMachine) -> None:
    """A temporary fault that only rank 1 meets changes nothing. If its uploads are always refused, both ranks raise."""
    faults: tuple[Fault, ...] = ("drop", "truncate", "503")
    options = {"strategy": "zero2", "upload_errors": "raise"}
    on_ranks(2, train, tmp_path / "local", tmp_path / "expected", len(faults) + 1, **options)
    root = "s3://bucket/runs"
    for step, fault in enumerate(faults, 1):
        s3.clear()
        s3.fault_of = lambda request, index, fault=fault: fault if _is_first_of_rank_1(s3, request) else None
        on_ranks(2, train, root, tmp_path / "journal", step, **options)
        assert [each.fault for each in s3.requests if each.fault] == [fault]
        new_machine()
        assert check_storage(root, at_least=step) == step
    s3.fault_of = lambda request, index: "403" if _is_of_rank_1(request) else None
    errors = on_ranks(2, error_of, root, tmp_path / "journal", len(faults) + 1, **options)
    assert errors[0] == errors[1]
    assert re.search(r"step=4'?: was not uploaded .*denied access.*roomier.checkpoint.upload", errors[0]), errors[0]
    s3.clear()
    assert check_storage(root, at_least=len(faults)) == len(faults)
    for rank in range(2):
        assert journal_of(tmp_path / f"journal.{rank}") == journal_of(tmp_path / f"expected.{rank}")


def error_of(*arguments: Any, **keywords: Any) -> str:
    """Return the error of a run."""
    with pytest.raises(CheckpointError) as caught:
        train(*arguments, **keywords)
    return str(caught.value)


def _is_of_rank_1(request: Request) -> bool:
    return request.method == "PUT" and "shard-00002-" in request.path


def _is_first_of_rank_1(s3: Proxy, request: Request) -> bool:
    return _is_of_rank_1(request) and sum(map(_is_of_rank_1, s3.requests)) == 1
