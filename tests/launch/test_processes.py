"""Processes that a script or a launcher starts as ranks, and the way in which they end if one process fails.

The fixture ``outcome_of`` runs several programs at a time. ``test_meet.py`` and ``test_place.py`` test parts of this
behavior without processes.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    pids = {int(path.stem) for path in notes.glob("*.pid")}
    while (
        left := running(pids)
    ) and time.time() - end < SECONDS_TO_END:  # a killed process ends later on a busy machine
        time.sleep(0.1)
    seconds = end - wrong.stat().st_mtime if wrong.exists() else 0.0
    sockets = [json.loads(path.read_text()) for path in sorted(notes.glob("sockets-*.json"))]
    return Outcome(done.returncode, done.stdout, done.stderr, seconds, left, sockets)


def running(pids: set[int]) -> list[int]:
    """Return those of ``pids`` that are running."""
    found = psutil.process_iter(["status"])
    return [each.pid for each in found if each.pid in pids and each.info["status"] != psutil.STATUS_ZOMBIE]


def script(what: str, rank: int, **keywords: object) -> list[str]:
    return [sys.executable, TRAIN, what, str(rank), json.dumps({"devices": 2, **keywords})]


def from_standard_input(*words: str) -> list[str]:
    inner = shlex.join([sys.executable, *words])
    return ["sh", "-c", f"exec {inner} < {shlex.quote(TRAIN)}"]


def from_pipe(*arguments: str) -> list[str]:
    first_line = shlex.quote(f"import sys; sys.argv[1:] = {list(arguments)}")
    return ["sh", "-c", f"(echo {first_line}; cat {shlex.quote(TRAIN)}) | {shlex.quote(sys.executable)}"]


IN_STAGES = {"name": "zero2", "pipeline_parallel_size": 2}
RUNS: dict[str, tuple[list[str], dict[str, str]]] = {
    "well": (script("nothing", 0, enable_plan_table=True), {}),
    "step raises 1": (script("step raises", 1), {}),
    "step raises 2": (script("step raises", 2, devices=3), {}),
    "step raises 0": (script("step raises", 0), {}),
    "step killed 1": (script("step killed", 1, strategy="ddp"), {}),
    "step killed 2": (script("step killed", 2, strategy=IN_STAGES, devices=4), {}),
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
MORE = ("step raises 0", "step killed 2", "step starves 1", "step vanishes 0", "command", "start leaves 1")
SLOW = tuple(name for name in RUNS if name not in QUICK + MORE)

# how a run that fails without a traceback ends: its exit code, the start of the last line, and another text
KILLED = "roomier: rank 1 was terminated by SIGKILL (often because the"
LEFT = "TrainingError: rank={}: exited with code 0 at step 1 of fit, but ranks [{}] did not exit"
ENDS = {
    "step killed 1": (128 + 9, KILLED, ""),
    "step killed 2": (128 + 9, "roomier: rank 2 (stage 1 of 2) was terminated by SIGKILL (often because the", ""),
    "step starves 1": (1, "roomier: rank 1 ended with exit code 1, so the run ended", "MemoryError"),
    "step vanishes 0": (1, "", "roomier: rank 0 called os._exit(0) at step 1 of fit, so the run is incomplete"),
    "step vanishes 1": (1, "roomier: rank 1 ended with exit code 0 at step 1 of fit, so the run ended", ""),
    "step leaves 0": (1, "", LEFT.format(0, 1)),
    "step leaves 1": (1, "", LEFT.format(1, 0)),
    "step leaves badly 0": (7, "", ""),
    "step leaves badly 1": (7, "", ""),
    "start leaves 1": (1, "roomier: rank 1 ended with exit code 0 before all ranks had joined, so the run ended", ""),
    "start killed 1": (128 + 9, "roomier: rank 1 was terminated by SIGKILL", ""),
    "start sleeps 1": (1, "", "rank=1: of 2 ranks, these did not connect within 15 s: 1. Check the logs"),
}


def rows(names: Iterable[str]) -> list[Any]:
    marks = dict.fromkeys(MORE, pytest.mark.more) | dict.fromkeys(SLOW, pytest.mark.slow)
    return [pytest.param(name, marks=marks.get(name, ())) for name in names]


@pytest.fixture(scope="module")
def outcome_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """Return the outcome of a program. The first call for a program runs three programs of its group at a time."""
    done: dict[str, Outcome] = {}

    def outcome(name: str) -> Outcome:
        if name not in done:
            folder = tmp_path_factory.mktemp("runs")
            [group] = [group for group in (QUICK, MORE, SLOW) if name in group]
            with ThreadPoolExecutor(3) as pool:
                started = {each: pool.submit(run, folder / each.replace(" ", "-"), *RUNS[each]) for each in group}
                done.update({each: future.result() for each, future in started.items()})
        return done[name]

    return outcome


def test_a_script_starts_the_requested_ranks(outcome_of: Callable[[str], Outcome]) -> None:
    outcome = outcome_of("well")
    assert outcome.code == 0, outcome.stderr
    assert outcome.ranks == [[0, 2, 0, 2, 0, 4], [1, 2, 1, 2, 0, 4]]
    assert outcome.stderr.count("\nstrategy ") == 1  # only one rank prints the table
    assert outcome.left == []
    zero, one = outcome.sockets
    listening = [sum(status == "LISTEN" for _, _, status in sockets) for sockets in (zero, one)]
    assert listening == [2, 1]  # each rank listens for gloo, and rank 0 also for the store
    assert {address.removeprefix("::ffff:") for address, _, _ in zero + one} == {"127.0.0.1"}


@pytest.mark.parametrize("name", rows(name for name in RUNS if "raise" in name))
def test_only_the_traceback_of_the_failed_rank_is_printed(outcome_of: Callable[[str], Outcome], name: str) -> None:
    outcome = outcome_of(name)
    assert outcome.code == 1
    assert outcome.seconds < SECONDS_TO_END
    assert outcome.left == []
    errors = re.findall(r"^(?:\[rank\d\]: )?(\w*Error.*)$", outcome.stderr, re.MULTILINE)
    who = "no rank can" if name == "all raise" else f"rank {name[-1]} cannot"
    assert errors == [f"ValueError: {who} continue"]
    if name[-1] in "12":
        rank_ended = f"roomier: rank {name[-1]} ended with exit code 1, so the run ended"
        assert outcome.stderr.splitlines()[-1] == rank_ended


@pytest.mark.parametrize("name", rows(ENDS))
def test_a_rank_that_ends_early_ends_the_run(outcome_of: Callable[[str], Outcome], name: str) -> None:
    code, last_line, text = ENDS[name]
    outcome = outcome_of(name)
    check_end(outcome, code, last_line)
    assert text in outcome.stderr
    if "leaves" in name:
        assert outcome.stderr.count("exited with code 0 at step") == text.count("exited with code 0 at step")
    if name in ("step killed 1", "step killed 2", "step vanishes 0"):
        assert "frame #" not in outcome.stderr  # the C++ frames of the other rank
    assert "step killed" not in name or "Traceback" not in outcome.stderr


def check_end(outcome: Outcome, code: int, last_line: str) -> None:
    assert outcome.code == code
    assert outcome.seconds < SECONDS_TO_END
    assert outcome.left == []
    assert outcome.stderr.splitlines()[-1].startswith(last_line)


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
    check_end(outcome, 128 + 9, f"{KILLED} machine ran out of memory), so the run ended")


@pytest.mark.parametrize("name", rows(["command"]))
def test_the_command_starts_ranks_and_prints_its_result_once(outcome_of: Callable[[str], Outcome], name: str) -> None:
    outcome = outcome_of(name)
    assert outcome.code == 0, outcome.stderr
    [metrics] = json.loads(outcome.stdout)
    assert metrics["val_loss"] > 0


@pytest.mark.parametrize("name", rows(["standard input", "pipe", "no script"]))
def test_code_without_a_script_is_rejected(outcome_of: Callable[[str], Outcome], name: str) -> None:
    outcome = outcome_of(name)
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
