"""ElasticRanks: a run continues in the same processes after other ranks were killed."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from torch.distributed import HashStore

from roomier.core.world import World
from roomier.launch.environment import RANK_VARIABLES
from roomier.launch.survivors import KillWatch
from tests.engines.training import check_same, train

ROOT = Path(__file__).parents[2]
NUM_STEPS = 30


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    notes = tmp_path_factory.mktemp("undisturbed")
    train(notes, 5, None, 0.0, 1, default_root_dir=notes / "runs")
    return notes


def started(notes: Path, *words: str, **environ: str) -> subprocess.Popen[str]:
    """Start the program with further arguments and environment variables."""
    removed = (*RANK_VARIABLES, "PYTEST_CURRENT_TEST")
    environ = {name: value for name, value in os.environ.items() if name not in removed} | environ
    command = [sys.executable, "-m", "tests.elastic.program", str(notes), *words]
    return subprocess.Popen(command, cwd=ROOT, env=environ, stderr=subprocess.PIPE, text=True)


def run(notes: Path, strategy: str, num_kills: int, seed: int, what: str = "") -> tuple[int, str, float]:
    """Run the program. Return its exit code, its messages, and the time at which it was started."""
    (notes / "memory").mkdir()
    with started(notes, strategy, str(num_kills), str(seed), what) as process:
        started_s = psutil.Process(process.pid).create_time()
        return process.wait(120), process.stderr.read() if process.stderr else "", started_s


def ended(notes: Path) -> Iterator[list[tuple[int, int, float]]]:
    """Yield the completed steps of each process: the step, the number of ranks, and the time."""
    for path in notes.glob("ended-*.txt"):
        rows = [line.split() for line in path.read_text().splitlines()]
        yield [(int(step), int(size), float(time_s)) for step, size, time_s in rows]


def ratios(notes: Path, started_s: float) -> list[float]:
    """Return the times from the kills to the next step, divided by the time from the start to the first step."""
    rows = max(ended(notes), key=len)
    sizes = sorted({size for _, size, _ in rows}, reverse=True)
    firsts = [min(time_s for _, each, time_s in rows if each == size) for size in sizes]
    kills = [float((notes / f"killed-{number}").read_text()) for number in range(1, len(sizes))]
    return [(first - kill) / (firsts[0] - started_s) for first, kill in zip(firsts[1:], kills, strict=True)]


def check_continued(notes: Path, undisturbed: Path, strategy: str, seed: int) -> None:
    code, messages, started_s = run(notes, strategy, 2, seed)
    assert code == 0, messages
    assert "on 3 of 4 ranks" in messages
    assert "on 2 of 3 ranks" in messages
    check_same(notes, undisturbed, 1e-5)
    of_survivors = [steps for each in ended(notes) if (steps := [step for step, _, _ in each])[-1] == NUM_STEPS]
    assert len(of_survivors) == 2
    assert set().union(*of_survivors) == set(range(1, NUM_STEPS + 1))  # only one survivor may have completed a step
    for steps in of_survivors:
        assert len(steps) - len(set(steps)) <= (0 if strategy == "ddp" else 2)  # a snapshot after each step
    assert not list((notes / "memory").rglob("state*"))
    assert max(ratios(notes, started_s)) < 0.3


class Ended:
    """Ranks that rank 0 started, one of which was killed."""

    may_lose = False

    def codes(self) -> dict[int, int]:
        return {2: -9}

    def keep(self, ranks: Sequence[int]) -> None:
        self.kept = list(ranks)


@pytest.mark.parametrize(
    ("progress", "step", "source"),
    [
        ([(4, True), (5, False), (4, True)], 5, 1),  # survivors are one step apart
        ([(5, False), (5, False), (5, True)], 5, 3),  # this survivor has already validated
        ([(-1, False), (-1, False), (-1, False)], -1, 0),
    ],
)
def test_survivors_agree_on_the_most_advanced_state(
    tmp_path: Path, progress: list[tuple[int, bool]], step: int, source: int
) -> None:
    store, children = HashStore(), Ended()
    worlds = [World(rank, 4, local_rank=rank, local_size=4) for rank in (0, 1, 3)]
    watches = [KillWatch(each, store, cast(Any, children) if each.rank == 0 else None, print) for each in worlds]
    assert children.may_lose
    with ThreadPoolExecutor() as pool:
        found = list(
            pool.map(lambda pair: pair[0].survivors(pair[1], tmp_path, 10.0), zip(watches, progress, strict=True))
        )
    for watch in watches:
        watch.close()
    assert not children.may_lose
    assert found[0] is not None
    assert found == [found[0]] * 3
    assert (found[0].step, found[0].source, children.kept) == (step, source, [0, 1, 3])
    assert [found[0].world_of(each).rank for each in worlds] == [0, 1, 2]


def test_replicas_repeat_no_completed_step(tmp_path: Path, undisturbed: Path) -> None:
    check_continued(tmp_path, undisturbed, "ddp", 0)


@pytest.mark.more
@pytest.mark.parametrize("strategy", [pytest.param("zero2", marks=pytest.mark.slow), "zero3"])
def test_shards_continue_from_the_newest_snapshot(tmp_path: Path, undisturbed: Path, strategy: str) -> None:
    check_continued(tmp_path, undisturbed, strategy, 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_kills_at_any_moment(tmp_path: Path, undisturbed: Path, strategy: str, seed: int) -> None:
    check_continued(tmp_path, undisturbed, strategy, 10 + seed)


@pytest.mark.more
@pytest.mark.parametrize(
    ("what", "num_kills", "cause"),
    [
        ("zero", 1, ""),
        ("raises", 2, "a mistake of the user"),  # after a loss
        ("again", 1, "rank 1 was terminated by SIGKILL"),
    ],
)
def test_other_failures_end_the_run(tmp_path: Path, what: str, num_kills: int, cause: str) -> None:
    code, messages, _ = run(tmp_path, "ddp", num_kills, 0, what)
    assert code != 0
    assert "training is complete" not in messages
    assert cause in messages
    assert not re.search(r"\[rank\d\]: \[rank", messages)  # the handler of torch is not installed again


@pytest.mark.more
def test_a_second_fit_after_a_loss_raises_an_error(tmp_path: Path) -> None:
    code, messages, _ = run(tmp_path, "ddp", 1, 0, "refit")
    assert code != 0
    assert messages.count("training is complete") == 1
    assert "devices=3: are the ranks that remain of 4, so a new fit would use another global batch" in messages


@pytest.mark.more
@pytest.mark.parametrize(
    ("strategy", "problem"),
    [
        ("zero1", "cannot continue without killed ranks"),
        pytest.param("auto", "cannot continue without killed ranks", marks=pytest.mark.slow),
        pytest.param("zero2+disk", "continues only runs without LoRA, offloading and compile", marks=pytest.mark.slow),
    ],
)
def test_other_plans_raise_an_error_at_the_start(tmp_path: Path, strategy: str, problem: str) -> None:
    code, messages, _ = run(tmp_path, strategy, 1, 0)
    assert code != 0
    assert problem in messages
    assert not list(ended(tmp_path))
