"""Processes that a script or a launcher starts as ranks, and the way in which they end if one process fails.

The fixtures run several programs at a time. ``test_meet.py`` and ``test_place.py``
test parts of this behavior without processes.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from roomier.launch.environment import RANK_VARIABLES

PROGRAMS = Path(__file__).parent / "programs"
TRAIN = str(PROGRAMS / "train.py")
LIMIT_OF_V1 = "memory.limit_in_bytes"
SECONDS_TO_END = 60.0  # on a busy machine; about 2 s on an idle one


@dataclass(frozen=True)
class Outcome:
    """Result of a program.

    Attributes:
        seconds: time from the failure to the end.
        left: ids of processes of the run that were still alive.
        sockets: address, port and status of each socket of each rank in the second step.
    """

    code: int
    stdout: str
    stderr: str
    seconds: float
    left: list[int]
    sockets: list[list[tuple[str, int, str]]]

    @property
    def ranks(self) -> list[list[int]]:
        """Values that each rank printed at the end: rank, size, local rank, local size, node, steps."""
        return sorted(json.loads(line) for line in re.findall(r"^ranks (.*)$", self.stdout, re.MULTILINE))


def run(notes: Path, words: list[str], changes: Mapping[str, str] | None = None) -> Outcome:
    notes.mkdir()
    environ = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    environ |= {"NOTES": str(notes), "OMP_NUM_THREADS": "1", **(changes or {})}
    done = subprocess.run(words, env=environ, cwd=notes, capture_output=True, text=True, timeout=500)
    end = time.time()
    wrong = notes / "gone-wrong"
    pids = [int(path.stem) for path in notes.glob("*.pid")]
    left = [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
    seconds = end - wrong.stat().st_mtime if wrong.exists() else 0.0
    sockets = [json.loads(path.read_text()) for path in sorted(notes.glob("sockets-*.json"))]
    return Outcome(done.returncode, done.stdout, done.stderr, seconds, left, sockets)


def script(what: str, rank: int, **keywords: object) -> list[str]:
    return [sys.executable, TRAIN, what, str(rank), json.dumps({"devices": 2, **keywords})]


def from_standard_input(*words: str) -> list[str]:
    inner = shlex.join([sys.executable, *words])
    return ["sh", "-c", f"exec {inner} < {shlex.quote(TRAIN)}"]


def from_pipe(*arguments: str) -> list[str]:
    first_line = shlex.quote(f"import sys; sys.argv[1:] = {list(arguments)}")
    return ["sh", "-c", f"(echo {first_line}; cat {shlex.quote(TRAIN)}) | {shlex.quote(sys.executable)}"]


RUNS: dict[str, tuple[list[str], dict[str, str]]] = {
    "well": (script("nothing", 0, enable_plan_table=True), {}),
    "step raises 1": (script("step raises", 1), {}),
    "step raises 2": (script("step raises", 2, devices=3), {}),
    "step raises 0": (script("step raises", 0), {}),
    "step killed 1": (script("step killed", 1, strategy="ddp"), {}),
    "start raises 1": (script("start raises", 1), {}),
    "end raises 1": (script("end raises", 1), {}),
    "all raise": (script("all raise", 0), {}),
    "start sleeps 1": (script("start sleeps", 1), {"ROOMIER_JOIN_TIMEOUT_S": "15"}),
    "command": (
        [
            *(str(Path(sys.executable).with_name("roomier")), "validate", "--model", "cli_toy.ToyModule"),
            *("--data", "cli_toy.ToyData", "--seed_everything", "1", "--trainer.accelerator", "cpu"),
            *("--trainer.strategy", "ddp", "--trainer.devices", "2", "--trainer.enable_progress_bar", "false"),
        ],
        {"PYTHONPATH": str(PROGRAMS.parents[1] / "cli" / "project")},
    ),
    "start leaves 1": (script("start leaves", 1), {"ROOMIER_JOIN_TIMEOUT_S": "100"}),
    "start killed 1": (script("start killed", 1), {}),
    "step leaves 1": (script("step leaves", 1), {}),
    "step leaves 0": (script("step leaves", 0), {}),
    "step leaves badly 0": (script("step leaves badly", 0), {}),
    "step leaves badly 1": (script("step leaves badly", 1), {}),
    "step vanishes 0": (script("step vanishes", 0), {}),
    "step starves 1": (script("step starves", 1), {}),
    "step vanishes 1": (script("step vanishes", 1), {}),
    "standard input": (from_standard_input("-", *script("nothing", 0)[2:]), {"ROOMIER_JOIN_TIMEOUT_S": "15"}),
    "pipe": (from_pipe(*script("nothing", 0)[2:]), {"ROOMIER_JOIN_TIMEOUT_S": "15"}),
    "no script": (
        [
            sys.executable,
            "-c",
            f"import sys; sys.argv = ['', 'nothing', '0', '{{\"devices\": 2}}']\n"
            f"exec(compile(open({TRAIN!r}).read(), 'inline', 'exec'))",
        ],
        {},
    ),
}


QUICK = ("well", "step raises 1", "step killed 1", "standard input")
MORE = ("step raises 0", "step starves 1", "step vanishes 0", "command", "start leaves 1")


def run_all(folder: Path, names: Iterable[str]) -> dict[str, Outcome]:
    with ThreadPoolExecutor(3) as pool:
        found = {name: pool.submit(run, folder / name.replace(" ", "-"), *RUNS[name]) for name in names}
        return {name: each.result() for name, each in found.items()}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return run_all(tmp_path_factory.mktemp("runs"), QUICK)


@pytest.fixture(scope="module")
def more_outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return run_all(tmp_path_factory.mktemp("runs"), MORE)


@pytest.fixture(scope="module")
def slow_outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return run_all(tmp_path_factory.mktemp("runs"), RUNS.keys() - QUICK - MORE)


def test_a_script_starts_the_requested_ranks(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["well"]
    assert outcome.code == 0, outcome.stderr
    assert outcome.ranks == [[0, 2, 0, 2, 0, 4], [1, 2, 1, 2, 0, 4]]
    assert outcome.stderr.count("\nstrategy ") == 1  # only one rank prints the table
    assert outcome.left == []


def test_a_run_on_one_machine_uses_the_loopback_only(outcomes: dict[str, Outcome]) -> None:
    zero, one = outcomes["well"].sockets
    listening = [sum(status == "LISTEN" for _, _, status in sockets) for sockets in (zero, one)]
    assert listening == [2, 1]  # each rank listens for gloo, and rank 0 also for the store
    assert {address.removeprefix("::ffff:") for address, _, _ in zero + one} == {"127.0.0.1"}


def test_only_the_traceback_of_the_failed_rank_is_printed(outcomes: dict[str, Outcome]) -> None:
    check_failure("step raises 1", outcomes["step raises 1"])


@pytest.mark.more
def test_only_the_traceback_of_rank_0_is_printed(more_outcomes: dict[str, Outcome]) -> None:
    check_failure("step raises 0", more_outcomes["step raises 0"])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RUNS if "raise" in name and name not in QUICK + MORE])
def test_only_one_traceback_of_several_or_late_failures_is_printed(
    slow_outcomes: dict[str, Outcome], name: str
) -> None:
    check_failure(name, slow_outcomes[name])


def check_failure(name: str, outcome: Outcome) -> None:
    assert outcome.code == 1
    assert outcome.seconds < SECONDS_TO_END
    assert outcome.left == []
    errors = re.findall(r"^(?:\[rank\d\]: )?(\w*Error.*)$", outcome.stderr, re.MULTILINE)
    who = "no rank can" if name == "all raise" else f"rank {name[-1]} cannot"
    assert errors == [f"ValueError: {who} continue"]
    if name[-1] in "12":
        rank_ended = f"roomier: rank {name[-1]} ended with exit code 1, so the run ended"
        assert outcome.stderr.splitlines()[-1] == rank_ended


def test_a_rank_that_is_killed_ends_the_run(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["step killed 1"]
    assert outcome.code == 128 + 9
    assert outcome.seconds < SECONDS_TO_END
    assert outcome.left == []
    assert "Traceback" not in outcome.stderr
    assert "frame #" not in outcome.stderr  # the C++ frames of the other rank
    assert outcome.stderr.splitlines()[-1].startswith("roomier: rank 1 was terminated by SIGKILL (often because the")


@pytest.mark.more
def test_a_rank_without_memory_ends_the_run(more_outcomes: dict[str, Outcome]) -> None:
    outcome = more_outcomes["step starves 1"]
    assert outcome.code == 1
    assert outcome.seconds < SECONDS_TO_END
    assert outcome.left == []
    assert "MemoryError" in outcome.stderr
    assert outcome.stderr.splitlines()[-1] == "roomier: rank 1 ended with exit code 1, so the run ended"


@pytest.mark.more
def test_an_exit_of_rank_0_that_python_does_not_notice_is_reported(more_outcomes: dict[str, Outcome]) -> None:
    outcome = more_outcomes["step vanishes 0"]
    assert outcome.code == 1
    assert outcome.seconds < SECONDS_TO_END
    assert outcome.left == []
    assert "roomier: rank 0 called os._exit(0) at step 1 of fit, so the run is incomplete" in outcome.stderr
    assert "frame #" not in outcome.stderr  # the C++ frames of the other rank


@pytest.mark.more
def test_a_rank_that_exits_before_the_rendezvous_ends_the_run(more_outcomes: dict[str, Outcome]) -> None:
    outcome = more_outcomes["start leaves 1"]
    assert outcome.code == 1
    assert outcome.seconds < SECONDS_TO_END
    assert outcome.left == []
    assert outcome.stderr.splitlines()[-1] == (
        "roomier: rank 1 ended with exit code 0 before all ranks had joined, so the run ended"
    )


@pytest.mark.slow
def test_a_rank_that_is_killed_before_the_rendezvous_ends_the_run(slow_outcomes: dict[str, Outcome]) -> None:
    outcome = slow_outcomes["start killed 1"]
    assert outcome.code == 128 + 9
    assert outcome.seconds < SECONDS_TO_END
    assert outcome.left == []
    assert outcome.stderr.splitlines()[-1].startswith("roomier: rank 1 was terminated by SIGKILL")


@pytest.mark.slow
def test_a_process_that_ends_with_code_0_in_a_step_is_reported(slow_outcomes: dict[str, Outcome]) -> None:
    outcome = slow_outcomes["step vanishes 1"]
    assert outcome.code == 1
    assert outcome.seconds < SECONDS_TO_END
    assert outcome.left == []
    assert outcome.stderr.splitlines()[-1] == (
        "roomier: rank 1 ended with exit code 0 at step 1 of fit, so the run ended"
    )


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_single_rank_that_exits_with_code_0_is_reported(slow_outcomes: dict[str, Outcome], rank: int) -> None:
    outcome = slow_outcomes[f"step leaves {rank}"]
    assert outcome.code == 1
    assert outcome.seconds < SECONDS_TO_END
    assert outcome.left == []
    text = f"TrainingError: rank={rank}: exited with code 0 at step 1 of fit, but ranks [{1 - rank}] did not exit"
    assert outcome.stderr.count(text) == 1


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_the_run_has_the_nonzero_exit_code_of_a_rank(slow_outcomes: dict[str, Outcome], rank: int) -> None:
    outcome = slow_outcomes[f"step leaves badly {rank}"]
    assert outcome.code == 7
    assert outcome.seconds < SECONDS_TO_END
    assert outcome.left == []


@pytest.fixture
def control_group() -> Iterator[Path]:
    """Create a control group with a limit of 512 MiB. Skip the test if a control group cannot be created."""
    root = Path("/sys/fs/cgroup")
    parent, limit = (root, "memory.max") if (root / "cgroup.controllers").exists() else (root / "memory", LIMIT_OF_V1)
    group = parent / f"roomier-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"control groups cannot be created here (usually only root can): {error}")
    try:
        try:
            (group / limit).write_text(str(2**29))
        except OSError as error:
            pytest.skip(f"control groups here have no memory limit: {error}")
        yield group
    finally:
        group.rmdir()


@pytest.mark.slow
def test_a_rank_that_exceeds_the_memory_limit_of_its_control_group_is_reported(
    tmp_path: Path, control_group: Path
) -> None:
    outcome = run(tmp_path / "notes", script("step out of memory", 1), {"CONTROL_GROUP": str(control_group)})
    assert outcome.code == 128 + 9
    assert outcome.seconds < SECONDS_TO_END
    assert outcome.left == []
    reason = "often because the machine ran out of memory"
    assert outcome.stderr.splitlines()[-1] == f"roomier: rank 1 was terminated by SIGKILL ({reason}), so the run ended"


@pytest.mark.slow
def test_a_rank_that_does_not_join_is_reported(slow_outcomes: dict[str, Outcome]) -> None:
    outcome = slow_outcomes["start sleeps 1"]
    assert outcome.code == 1
    assert "rank=1: of 2 ranks, these did not connect within 15 s: 1. Check the logs" in outcome.stderr
    assert outcome.left == []


@pytest.mark.more
def test_the_command_starts_ranks_and_prints_its_result_once(more_outcomes: dict[str, Outcome]) -> None:
    outcome = more_outcomes["command"]
    assert outcome.code == 0, outcome.stderr
    [metrics] = json.loads(outcome.stdout)
    assert metrics["val_loss"] > 0


def test_code_from_standard_input_is_rejected(outcomes: dict[str, Outcome]) -> None:
    check_rejected(outcomes["standard input"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pipe", "no script"])
def test_code_without_a_script_is_rejected(slow_outcomes: dict[str, Outcome], name: str) -> None:
    check_rejected(slow_outcomes[name])


def check_rejected(outcome: Outcome) -> None:
    assert outcome.code == 1
    last = outcome.stderr.splitlines()[-1]
    assert "code from `python -c` or from standard input cannot be run again" in last
    assert "Move the run to a script" in last


@pytest.mark.more
def test_tasks_of_slurm_connect(tmp_path: Path) -> None:
    slurm = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NODELIST": "localhost,another",
        "SLURM_LOCALID": "0",
    }
    words = script("nothing", 0, devices="auto")
    with ThreadPoolExecutor(2) as pool:
        tasks = [{**slurm, "SLURM_PROCID": str(task), "SLURM_NODEID": str(task)} for task in range(2)]
        started = [pool.submit(run, tmp_path / str(task), words, changes) for task, changes in enumerate(tasks)]
        ranks = [outcome.result().ranks for outcome in started]
    assert ranks == [[[0, 2, 0, 1, 0, 4]], [[1, 2, 0, 1, 1, 4]]]
