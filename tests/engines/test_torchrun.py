"""Runs that torchrun restarts after a SIGKILL, on the same or another number of ranks: samples, losses and weights."""

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from tests.engines.training import check_same, undisturbed
from tests.ranks.pool import RankPool

TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
PROGRAM = str(Path(__file__).parent / "programs" / "train.py")
NUM_KILLS = 10

pytestmark = pytest.mark.services


def test_ten_kills_change_no_bit(on_ranks: RankPool, tmp_path: Path) -> None:
    settings = {"max_epochs": 16, "dropout": 0.1, "strategy": "zero2"}
    (tmp_path / "undisturbed").mkdir()
    on_ranks(2, undisturbed, tmp_path / "undisturbed", **settings)
    (notes := tmp_path / "killed").mkdir()
    launcher = [TORCHRUN, "--nproc-per-node=2", f"--max-restarts={NUM_KILLS}", PROGRAM]
    subprocess.run([*launcher, notes, json.dumps(settings), json.dumps([*range(NUM_KILLS)])], check=True, timeout=500)
    assert len(list(notes.glob("attempt-*"))) == 2 * (NUM_KILLS + 1)
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
        command = [TORCHRUN, *nodes, "--rdzv-backend=c10d", *endpoint, PROGRAM, self.notes, json.dumps(self.options)]
        # torch 2.13: without this variable, the other agents keep the address of rank 0 after its agent was killed
        environ = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self.running += [subprocess.Popen(command, env=environ) for _ in range(number)]

    def kill(self, index: int) -> None:
        agent = self.running.pop(index)
        if agent.poll() is None:
            for process in (agent, *psutil.Process(agent.pid).children(recursive=True)):
                process.kill()
        agent.wait()

    def await_steps(self, num_ranks: int, since: float) -> float:
        """Wait until ``num_ranks`` ranks have begun 3 steps after the time ``since``, and return the time of the
        first."""
        until = time.time() + 150
        times = self.notes / "times.jsonl"
        while True:
            lines = times.read_text().splitlines() if times.exists() else []
            begun = [when for when, size in map(json.loads, lines) if when > since and size == num_ranks]
            if len(begun) >= 3:
                return begun[0]
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
def test_ten_kills_change_the_number_of_ranks(on_ranks: RankPool, tmp_path: Path) -> None:
    draw = random.Random(37)
    ratios, cold_s = [], {}
    for strategy, size, num_changes in (("ddp", 4, 4), ("zero2", 3, 3), ("zero3", 2, 3)):
        options = {"max_epochs": 40, "dropout": 0.0, "strategy": strategy}
        (expected := tmp_path / strategy / "undisturbed").mkdir(parents=True)
        on_ranks(2, undisturbed, expected, **options)
        (notes := tmp_path / strategy / "killed").mkdir()
        (notes / "slow").touch()
        with agents(notes, options) as nodes:
            begin = time.time()
            nodes.start(size)
            cold_s[size] = nodes.await_steps(size, begin) - begin
            for _ in range(num_changes):
                before, size = size, draw.choice([each for each in (2, 3, 4) if each != size])
                begin = time.time()
                for _ in range(max(1, before - size)):
                    nodes.kill(draw.randrange(len(nodes.running)))
                nodes.start(size - len(nodes.running))
                restart_s = nodes.await_steps(size, begin) - begin
                ratios.append((strategy, before, size, restart_s, cold_s.get(size)))
                print(ratios[-1], flush=True)
            (notes / "slow").unlink()
            assert [each.wait(120) for each in nodes.running] == [0] * size
        check_same(notes, expected, 1e-5)
    print(cold_s)
    assert statistics.median(each[3] / cold_s[each[2]] for each in ratios) <= 1.5
