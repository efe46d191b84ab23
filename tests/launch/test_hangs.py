"""Runs in which one rank hangs: the report, the end of the run, and cases that must not be reported."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import roomier
from benchmarks.calls import CallCount, folder_of
from roomier.core import torch_private
from roomier.core.errors import RoomierError
from roomier.core.ranks import COLLECTIVE_TIMEOUT
from roomier.launch.environment import RANK_VARIABLES
from roomier.run.options import MAX_HANG_TIMEOUT_S, LoopOptions
from tests.ranks.pool import RankPool

PROGRAM = Path(__file__).parent / "programs" / "hang.py"
SECONDS_TO_END = 90.0  # allowed on a busy machine, in addition to the bounds of a few seconds
REPORT = "roomier: heartbeat: rank "


@dataclass(frozen=True)
class Outcome:
    """Result of a program.

    Attributes:
        seconds: time from the hang to the end.
        left: ids of processes of the run that were still alive.
    """

    code: int
    stdout: str
    stderr: str
    seconds: float
    left: list[int]


def run(notes: Path, how: str, rank: int, launcher: Iterable[str] = (), **keywords: Any) -> Outcome:
    notes.mkdir()
    environ = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    environ |= {"NOTES": str(notes), "OMP_NUM_THREADS": "1"}
    words = [*(launcher or [sys.executable]), str(PROGRAM), how, str(rank), json.dumps(keywords)]
    done = subprocess.run(words, env=environ, cwd=notes, capture_output=True, text=True, timeout=400)
    seconds = time.time() - (notes / "gone-wrong").stat().st_mtime
    pids = [int(path.stem) for path in notes.glob("*.pid")]
    running = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, running = psutil.wait_procs(running, timeout=5.0)  # a killed process ends when the kernel schedules it
    left = [each.pid for each in running if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    return Outcome(done.returncode, done.stdout, done.stderr, seconds, left)


TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", "2"]
BOUND = {"hang_timeout": {"seconds": 6}}


@pytest.mark.parametrize(
    ("how", "rank", "launcher", "keywords"),
    [
        ("deadlock", 1, (), {"strategy": "zero2", "devices": 2}),
        pytest.param("stopped", 1, (), {"strategy": "ddp", "devices": 2}, marks=pytest.mark.more),
        pytest.param("stopped", 0, (), {"strategy": "ddp", "devices": 2}, marks=pytest.mark.slow),
        pytest.param("deadlock", 0, TORCHRUN, {"strategy": "zero3"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_rank_that_hangs_is_reported_and_the_run_ends(
    tmp_path: Path, how: str, rank: int, launcher: Iterable[str], keywords: dict[str, Any]
) -> None:
    check_end(how, str(rank), run(tmp_path / "run", how, rank, launcher, **keywords, **BOUND))


def heartbeat_lines(outcome: Outcome) -> list[str]:
    """Return the lines of the heartbeat, without notes about a slow start, which a busy machine causes."""
    lines = [line for line in outcome.stderr.splitlines() if line.startswith("roomier: heartbeat:")]
    return [line for line in lines if ": setup, step 0" not in line and ": first step, step 0" not in line]


def check_end(how: str, late: str, outcome: Outcome) -> None:
    other = "1" if late == "0" else "0"
    sign = "sent no heartbeat" if how == "stopped" else "made no progress"
    position = "training step, step 3, batch 3"
    lines = heartbeat_lines(outcome)
    [report] = [line for line in lines if "If this does not change" in line]  # the ranks print in any order
    assert re.search(rf"rank {late} \(process \d+ on .*\) has {sign} for .*{position}", report)
    assert f"{REPORT}{other}: {position}" in lines
    assert (f"{REPORT}{late}: {position}" in lines) == (how == "deadlock")  # a stopped rank prints no stack
    if how == "deadlock":
        assert "in hang_here" in outcome.stderr
    else:
        assert "Its process is stopped (`kill -CONT" in report
    [end] = [line for line in lines if line.startswith("roomier: heartbeat: the run ends: hang_timeout=")]
    assert re.search(rf"rank {late} .* has {sign} .*Resume with ckpt_path='last'", end)
    assert outcome.code == (128 + signal.SIGKILL if (how, late) == ("stopped", "0") else 1) or outcome.code == -9
    assert outcome.seconds < SECONDS_TO_END
    assert outcome.left == []
    assert "steps" not in outcome.stdout


@pytest.mark.slow
def test_a_slow_hook_is_reported_in_one_line_and_the_run_completes(tmp_path: Path) -> None:
    outcome = run(tmp_path / "run", "slow hook", 0, strategy="ddp", devices=2, **BOUND)
    assert outcome.code == 0
    [line] = heartbeat_lines(outcome)
    assert re.search(
        r"other ranks have waited .* for rank 0 .*: on_train_batch_end, step 4, batch 3 \(hang_timeout", line
    )
    assert outcome.stdout.count("steps 6") == 2


@pytest.mark.slow
def test_a_rank_that_makes_progress_again_does_not_end_the_run(tmp_path: Path) -> None:
    outcome = run(tmp_path / "run", "slow step", 1, strategy="ddp", devices=2, hang_timeout={"seconds": 60})
    assert outcome.code == 0
    assert f"{REPORT}1: training step, step 3, batch 3" in outcome.stderr
    assert f"{REPORT}1 makes progress again" in outcome.stderr
    assert outcome.stdout.count("steps 6") == 2


@pytest.mark.slow
def test_ranks_that_are_stopped_and_continued_together_are_not_reported(tmp_path: Path) -> None:
    """Ctrl-Z in a terminal stops a process in this way. Here, the process is stopped for longer than the bound."""

    def stop_for_a_while() -> None:
        wrong = tmp_path / "run" / "gone-wrong"
        while not wrong.exists():
            time.sleep(0.1)
        pids = [int(path.stem) for path in wrong.parent.glob("*.pid")]
        for number, seconds in ((signal.SIGSTOP, 15.0), (signal.SIGCONT, 0.0)):
            for pid in pids:
                os.kill(pid, number)
            time.sleep(seconds)

    stopper = threading.Thread(target=stop_for_a_while)
    stopper.start()
    outcome = run(tmp_path / "run", "nothing", 1, strategy="ddp", devices=2, **BOUND)
    stopper.join()
    assert outcome.code == 0
    assert heartbeat_lines(outcome) == []
    assert outcome.seconds > 15.0


# The option and the cost --------------------------------------------------------------------------------------------


def test_hang_timeout_is_limited_to_the_timeout_of_the_process_group() -> None:
    assert COLLECTIVE_TIMEOUT.total_seconds() == MAX_HANG_TIMEOUT_S
    assert LoopOptions(hang_timeout=None).hang_timeout_s is None
    assert LoopOptions().hang_timeout_s == 600.0
    with pytest.raises(RoomierError, match="must be at most 30 minutes"):
        LoopOptions(hang_timeout={"seconds": 1801})


class Counted(roomier.Module):
    def __init__(self, calls: CallCount) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
        self.calls = calls

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.calls(batch_idx)
        return self.net(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def calls_per_step(hang_timeout: Any) -> tuple[float, bool]:
    """Return the number of calls per step of the library in the training thread, and True if a heartbeat ran."""
    calls = CallCount((folder_of(roomier),), 2, 12)
    trainer = roomier.Trainer(
        strategy="ddp",
        accelerator="cpu",
        max_steps=16,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        hang_timeout=hang_timeout,
    )
    trainer.fit(Counted(calls), [torch.ones(2, 4)] * 32)
    return calls.per_step, any(thread.name == "roomier-heartbeat" for thread in threading.enumerate())


def test_a_step_makes_the_same_calls_with_and_without_a_heartbeat(on_ranks: RankPool) -> None:
    with_it, without = (on_ranks(2, calls_per_step, each, joins=False) for each in ("00:00:10:00", None))
    assert [has_heartbeat for _, has_heartbeat in with_it + without] == [True, True, False, False]
    assert [calls for calls, _ in with_it] == [calls for calls, _ in without]
    assert with_it[0][0] > 5


def operations() -> list[dict[str, int]]:
    """Return the number of operations in each group, before and after three operations."""
    group = torch.distributed.new_group([0, 1], backend="gloo")
    torch.distributed.new_group([0, 1], backend="gloo", group_desc=torch_private.BACKGROUND_GROUP)
    counts = [torch_private.num_calls_by_group()]
    torch.distributed.all_reduce(torch.ones(1))
    torch.distributed.barrier(group=group)
    torch.distributed.barrier(group=group)
    return [*counts, torch_private.num_calls_by_group()]


def test_operations_are_counted_by_group_except_background_groups(on_ranks: RankPool) -> None:
    found = on_ranks(2, operations)
    assert found[0] == found[1]
    before, after = found[0]
    assert len(before) == 2
    of_default, of_other = sorted(after[name] - before[name] for name in before)
    assert of_other == 2 * of_default > 0
