"""Runs that torchrun restarts after a SIGKILL, on the same or another number of ranks: samples, losses and weights."""

import json
import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from tests.engines.training import check_same, few_or_ten_kills, undisturbed
from tests.ranks.pool import RankPool

TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
PROGRAM = ("-m", "tests.engines.programs.train")
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.services


@few_or_ten_kills
def test_kills_change_no_bit(on_ranks: RankPool, tmp_path: Path, num_kills: int) -> None:
    settings = {"max_epochs": 6 + num_kills, "dropout": 0.1, "strategy": "zero2"}
    (tmp_path / "undisturbed").mkdir()
    on_ranks(2, undisturbed, tmp_path / "undisturbed", **settings)
    (notes := tmp_path / "killed").mkdir()
    launcher = [TORCHRUN, "--nproc-per-node=2", f"--max-restarts={num_kills}", *PROGRAM]
    arguments = [notes, json.dumps(settings), json.dumps([*range(num_kills)])]
    subprocess.run([*launcher, *arguments], cwd=ROOT, check=True, timeout=500)
    assert len(list(notes.glob("attempt-*"))) == 2 * (num_kills + 1)
    check_same(notes, tmp_path / "undisturbed")


class Agents:
    """Agents of torchrun with one rank each, which simulate nodes.

    Args:
        notes: folder of the notes of the ranks.
        options: options of the training.
    """

    def __init__(self, notes: Path, options: dict[str, object]) -> None:
        self.notes, self.options = notes, options
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # outlives each agent
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, number: int) -> None:
        conf = "is_host=0,last_call_timeout=5,keep_alive_interval=1"
        endpoint = [f"--rdzv-endpoint=127.0.0.1:{self.store.port}", "--rdzv-id=job", f"--rdzv-conf={conf}"]
        nodes = ["--nnodes=2:4", "--nproc-per-node=1", "--local-addr=127.0.0.1", "--max-restarts=99"]
        command = [TORCHRUN, *nodes, "--rdzv-backend=c10d", *endpoint, *PROGRAM, self.notes, json.dumps(self.options)]
        # torch 2.13: without this variable, the other agents keep the address of rank 0 after its agent was killed
        environ = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self.running += [subprocess.Popen(command, cwd=ROOT, env=environ) for _ in range(number)]

    def kill(self, index: int) -> None:
        agent = self.running.pop(index)
        if agent.poll() is None:
            for process in (agent, *psutil.Process(agent.pid).children(recursive=True)):
                process.kill()
        agent.wait()

    def await_steps(self, num_ranks: int, since: float) -> float:
        """Wait until ``num_ranks`` ranks have begun 6 steps after the time ``since``, of which 4 are in a
        checkpoint. Return the time of the first."""
        until = time.time() + 300
        times = self.notes / "times.jsonl"
        while True:
            lines = times.read_text().splitlines() if times.exists() else []
            begun = [when for when, size in map(json.loads, lines) if when > since and size == num_ranks]
            if len(begun) >= 6:
                return begun[0]
            assert any(each.poll() is None for each in self.running)
            assert time.time() < until, (num_ranks, lines)
            time.sleep(0.05)


@contextmanager
def agents(notes: Path, options: dict[str, object]) -> Iterator[Agents]:
    """Kill all agents at the end of the context."""
    started = Agents(notes, options)
    try:
        yield started
    finally:
        while started.running:
            started.kill(0)


@pytest.mark.timeout(500)
@pytest.mark.parametrize(  # the first number of ranks divides the global batch
    ("strategy", "sizes"),
    [
        ("ddp", (2, 3, 2)),
        ("zero3", (2, 3, 2)),
        pytest.param("ddp", (2, 3, 2, 4, 2), marks=pytest.mark.slow),
        pytest.param("zero2", (4, 3, 4, 2), marks=pytest.mark.slow),
        pytest.param("zero3", (4, 2, 4, 3), marks=pytest.mark.slow),
    ],
)
def test_kills_change_the_number_of_ranks(
    on_ranks: RankPool, tmp_path: Path, strategy: str, sizes: tuple[int, ...]
) -> None:
    options = {"max_epochs": 24, "dropout": 0.0, "strategy": strategy}
    (expected := tmp_path / "undisturbed").mkdir()
    on_ranks(2, undisturbed, expected, **options)
    (notes := tmp_path / "killed").mkdir()
    (notes / "slow").touch()
    draw = random.Random(strategy)
    starts_s = defaultdict(list)  # until the first step, by the number of ranks
    with agents(notes, options) as nodes:
        for size in sizes:
            begin = time.time()
            for _ in range(max(1, len(nodes.running) - size) if nodes.running else 0):
                nodes.kill(draw.randrange(len(nodes.running)))
            nodes.start(size - len(nodes.running))
            starts_s[size].append(nodes.await_steps(size, begin) - begin)
        (notes / "slow").unlink()
        assert [each.wait(120) for each in nodes.running] == [0] * sizes[-1]
    print(strategy, dict(starts_s))
    check_same(notes, expected, 1e-5)
    cold_s, *restarts_s = starts_s[sizes[0]]
    assert min(restarts_s) <= 3 * cold_s  # usually 1 to 1.8; if an agent waits for a lost one, more than 10
