"""The pool of ranks, which tests with several ranks use."""

import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.ranks.pool import RankFailed, RankPool

SEEN: list[str] = []


def all_sums(number: float) -> tuple[int, int, float]:
    total = torch.tensor(number * (dist.get_rank() + 1))
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total.item()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_ranks_form_a_group_and_results_are_ordered_by_rank(on_ranks: RankPool, num_ranks: int) -> None:
    total = 0.5 * sum(range(1, num_ranks + 1))
    assert on_ranks(num_ranks, all_sums, number=0.5) == [(rank, num_ranks, total) for rank in range(num_ranks)]


def pid_and_draw(number: int) -> tuple[int, int, float]:
    if number == 3:
        raise ValueError("three is invalid")
    return os.getpid(), number, random.random()


def test_several_calls_run_in_the_same_processes_with_the_same_seeds(on_ranks: RankPool) -> None:
    by_call = on_ranks.each(2, pid_and_draw, [(1,), (2,)])
    assert [[number for _, number, _ in results] for results in by_call] == [[1, 1], [2, 2]]
    assert [pid for pid, _, _ in by_call[0]] == [pid for pid, _, _ in by_call[1]]
    assert len({draw for results in by_call for _, _, draw in results}) == 1
    with pytest.raises(RankFailed, match=r"(?s)three is invalid.*arguments of the call: \(3,\)"):
        on_ranks.each(2, pid_and_draw, [(1,), (3,)])


def test_a_call_is_quick(on_ranks: RankPool) -> None:
    on_ranks(2, all_sums, 1.0)
    times_s = []
    for _ in range(5):
        begin = time.perf_counter()
        on_ranks(2, all_sums, 1.0)
        times_s.append(time.perf_counter() - begin)
    assert min(times_s) < 2  # about 0.02 s on an idle core; starting a process for each call takes 5 s


def tensors(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor + dist.get_rank() for name, tensor in given.items()}


def test_arguments_and_results_can_be_tensors(on_ranks: RankPool) -> None:
    x = torch.randn(3, 4)
    first, second = on_ranks(2, tensors, {"x": x})
    assert torch.equal(first["x"], x)
    assert torch.equal(second["x"], x + 1)


def environment(*names: str) -> list[str]:
    return [os.environ.get(name, "") for name in names]


def test_ranks_have_the_environment_variables_of_torchrun(on_ranks: RankPool) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "OMP_NUM_THREADS")
    found = on_ranks(2, environment, *names)
    assert found == [[str(rank), "2", str(rank), "2", "0", "127.0.0.1", "1"] for rank in range(2)]


def where() -> tuple[str, str]:
    return os.getcwd(), os.environ.get("OF_THE_TEST", "")


def test_ranks_have_the_folder_and_environment_of_the_test(
    on_ranks: RankPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    on_ranks(1, where)  # starts the pool before the following changes
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OF_THE_TEST", "here")
    assert on_ranks(2, where) == [(str(tmp_path), "here")] * 2


def leave_traces() -> None:
    SEEN.append("trace")
    os.environ["TRACE"] = "1"
    torch.manual_seed(7)
    torch.set_default_dtype(torch.float64)


def look_for_traces() -> tuple[list[str], str | None, float, float, float, torch.dtype, int]:
    draws = torch.rand(1).item(), random.random(), float(np.random.rand())
    return SEEN, os.environ.get("TRACE"), *draws, torch.get_default_dtype(), torch.get_num_threads()


def test_a_call_leaves_no_traces(on_ranks: RankPool) -> None:
    before = on_ranks(2, look_for_traces)
    on_ranks(2, leave_traces)
    after = on_ranks(2, look_for_traces)
    assert after == before
    assert after[0] == after[1]
    assert after[0][0] == []
    assert after[0][-1] == 1


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} has had enough")
    dist.all_reduce(torch.zeros(1))


@pytest.mark.parametrize("rank", [0, 2])
def test_the_first_failure_is_reported_and_other_ranks_do_not_hang(on_ranks: RankPool, rank: int) -> None:
    begin = time.perf_counter()
    with pytest.raises(RankFailed, match=rf"(?s)rank {rank} failed first.*in fail_on.*has had enough") as info:
        on_ranks(3, fail_on, rank)
    assert info.value.rank == rank
    assert time.perf_counter() - begin < 60
    assert len(on_ranks(3, all_sums, 1.0)) == 3


def fail_while_another_sleeps() -> None:
    if dist.get_rank() == 0:
        raise ValueError("no")
    time.sleep(60)


@pytest.mark.more
def test_a_rank_that_does_not_end_after_a_failure_is_killed(on_ranks: RankPool) -> None:
    begin = time.perf_counter()
    with pytest.raises(RankFailed, match=r"(?s)rank 0 failed first.*ValueError: no") as info:
        on_ranks(2, fail_while_another_sleeps)
    assert time.perf_counter() - begin < 40
    assert "fail_while_another_sleeps" in info.value.reports[1]  # its stack


def sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)


@pytest.mark.more
def test_a_rank_that_does_not_end_is_killed_and_its_stack_reported(on_ranks: RankPool) -> None:
    with pytest.raises(RankFailed, match=r"(?s)rank 1 failed first.*did not end in time.*in sleep_on"):
        on_ranks(2, sleep_on, 1, timeout_s=2)


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(1))


@pytest.mark.more
def test_a_rank_that_is_killed_is_reported(on_ranks: RankPool) -> None:
    with pytest.raises(RankFailed, match=r"(?s)rank 1 failed first.*was killed by SIGKILL.*last words"):
        on_ranks(2, die_on, 1)


def abort_on(rank: int) -> None:
    if dist.get_rank() == rank:
        print("why it aborts", file=sys.stderr, flush=True)
        os.abort()
    dist.all_reduce(torch.zeros(1))


@pytest.mark.more
def test_a_rank_that_aborts_is_reported_with_its_output(on_ranks: RankPool) -> None:
    with pytest.raises(RankFailed, match=r"(?s)rank 1 failed first.*was killed by SIGABRT.*why it aborts"):
        on_ranks(2, abort_on, 1)


def leave_early() -> float:
    if dist.get_rank() == 1:
        time.sleep(0.5)
    total = torch.ones(1)
    if dist.get_rank() == 0:
        dist.send(total, 1)
    else:
        dist.recv(total, 0)
    return total.item()


def test_a_rank_can_end_before_the_others(on_ranks: RankPool) -> None:
    assert on_ranks(2, leave_early) == [1.0, 1.0]


def warn() -> None:
    warnings.warn("careful", UserWarning, stacklevel=1)


def test_warnings_are_errors(on_ranks: RankPool) -> None:
    with pytest.raises(RankFailed, match="UserWarning: careful"):
        on_ranks(1, warn)


def speak() -> None:
    print("to one")
    print("to the other", file=sys.stderr)


def test_the_output_of_ranks_is_printed(on_ranks: RankPool, capsys: pytest.CaptureFixture[str]) -> None:
    on_ranks(2, speak)
    assert capsys.readouterr().out.splitlines() == [
        "[rank 0] to one",
        "[rank 0] to the other",
        "[rank 1] to one",
        "[rank 1] to the other",
    ]


def is_joined() -> bool:
    return dist.is_initialized()


def join_by_environment() -> float:
    dist.init_process_group("gloo")
    return all_sums(1.0)[2]


def test_a_function_can_initialize_the_process_group(on_ranks: RankPool) -> None:
    assert on_ranks(2, is_joined, joins=False) == [False, False]
    assert on_ranks(2, join_by_environment, joins=False) == [3.0, 3.0]


def test_a_nested_function_is_rejected(on_ranks: RankPool) -> None:
    def inner() -> None: ...

    with pytest.raises(TypeError, match="not a function of the top level"):
        on_ranks(1, inner)


@pytest.mark.more
def test_a_pool_ends_its_server_and_starts_another(on_ranks: RankPool) -> None:
    assert on_ranks(1, is_joined) == [True]
    server = on_ranks._server
    assert server is not None
    on_ranks.close()
    assert server.poll() == 0
    assert on_ranks(1, is_joined) == [True]
    assert on_ranks._server is not server
