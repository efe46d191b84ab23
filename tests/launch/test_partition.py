"""Two network namespaces that represent machines, with and without a connection between them."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from roomier.launch.environment import RANK_VARIABLES

TRAIN = str(Path(__file__).parent / "programs" / "train.py")
ADDRESSES = ("10.213.77.1", "10.213.77.2")

pytestmark = [pytest.mark.more, pytest.mark.slow]


def ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True)


class Machines:
    """Two connected network namespaces with the same file system."""

    def __init__(self) -> None:
        self.names = [f"roomier{os.getpid()}{letter}" for letter in "ab"]
        for name in self.names:
            ip("netns", "add", name)
        ip("-n", self.names[0], "link", "add", "cable", "type", "veth", "peer", "cable", "netns", self.names[1])
        for name, address in zip(self.names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", name, "link", "set", device, "up")

    def disconnect(self) -> None:
        ip("-n", self.names[0], "link", "set", "cable", "down")

    def start(self, rank: int, notes: Path, words: list[str], **environ: str) -> subprocess.Popen[str]:
        own = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
        own |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        own |= {"GROUP_RANK": str(rank), "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29500"}
        own |= {"OMP_NUM_THREADS": "1", "NOTES": str(notes), **environ}
        command = ["ip", "netns", "exec", self.names[rank], sys.executable, TRAIN, *words]
        return subprocess.Popen(command, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=notes)

    def close(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], check=False)


@pytest.fixture
def machines() -> Iterator[Machines]:
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the command ip (iproute2)")
    try:
        made = Machines()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be created here (usually only root can): {error.stderr.strip()}")
    yield made
    made.close()


def ends(processes: list[subprocess.Popen[str]], timeout_s: float = 300.0) -> list[tuple[int, str, str]]:
    """Return the exit code, the standard output and the standard error of each process."""
    try:
        outputs = [each.communicate(timeout=timeout_s) for each in processes]
    finally:
        for each in processes:
            each.kill()
    return [(each.returncode, *output) for each, output in zip(processes, outputs, strict=True)]


def test_ranks_of_two_machines_train_together(machines: Machines, tmp_path: Path) -> None:
    keywords = json.dumps({"devices": 1, "num_nodes": 2})
    processes = [machines.start(rank, tmp_path, ["nothing", "0", keywords]) for rank in range(2)]
    for rank, (code, stdout, stderr) in enumerate(ends(processes)):
        assert code == 0, stderr
        assert f"ranks [{rank}, 2, 0, 1, {rank}, 4]" in stdout
    for rank, address in enumerate(ADDRESSES):  # check that no socket is bound to another interface
        sockets = json.loads((tmp_path / f"sockets-{rank}.json").read_text())
        assert {each.removeprefix("::ffff:") for each, _, _ in sockets} == {address}


def test_machines_that_cannot_reach_each_other_report_it(machines: Machines, tmp_path: Path) -> None:
    machines.disconnect()
    keywords = json.dumps({"devices": 1, "num_nodes": 2})
    words = ["nothing", "0", keywords]
    processes = [machines.start(rank, tmp_path, words, ROOMIER_JOIN_TIMEOUT_S="20") for rank in range(2)]
    zero, one = ends(processes)
    assert (zero[0], one[0]) == (1, 1)
    assert "rank=1: of 2 ranks, these did not connect within 20 s: 1." in zero[2]
    assert f"MASTER_ADDR='{ADDRESSES[0]}:29500': rank 1 could not connect to rank 0 within 20 s" in one[2]


def test_a_partition_during_training_ends_both_sides(machines: Machines, tmp_path: Path) -> None:
    keywords = {"devices": 1, "num_nodes": 2, "strategy": "ddp", "max_steps": 8, "hang_timeout": {"seconds": 20}}
    processes = [machines.start(rank, tmp_path, ["partition", "0", json.dumps(keywords)]) for rank in range(2)]
    while len(list(tmp_path.glob("in-step-*"))) < 2:
        assert all(each.poll() is None for each in processes)
        time.sleep(0.1)
    machines.disconnect()
    (tmp_path / "disconnected").touch()
    for rank, (code, _, stderr) in enumerate(ends(processes)):
        assert code != 0
        assert f"rank {1 - rank}" in stderr
