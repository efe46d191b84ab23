"""ElasticRanks on several nodes: torchft's lighthouse determines the nodes that are left."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from roomier.launch.lighthouse import LIGHTHOUSE
from tests.elastic import test_in_process as one_node
from tests.engines.training import check_same

coordination = pytest.importorskip("torchft.coordination", reason="requires torchft; run `make test-engines`")
pytestmark = pytest.mark.services
undisturbed = one_node.undisturbed  # a fixture


@pytest.fixture
def lighthouse() -> Iterator[str]:
    server = coordination.LighthouseServer("127.0.0.1:0", 1, heartbeat_timeout_ms=1000)
    yield f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    server.shutdown()


def run(notes: Path, strategy: str, what: str, address: str | None) -> tuple[list[int], list[str], float]:
    """Run two nodes with two ranks each. Return their exit codes and messages, and the time at which they started."""
    (notes / "memory").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} | ({LIGHTHOUSE: address} if address else {})
    num_kills, started_s = "0" if what.startswith("stop") else "1", time.time()
    nodes = [one_node.started(notes, strategy, num_kills, "0", what, NODE_RANK=node, **environ) for node in ("0", "1")]
    messages = ["", ""]
    for number in sorted((0, 1), key=lambda number: what == f"stop{number}"):
        if what == f"stop{number}":
            for process in (*psutil.Process(nodes[number].pid).children(recursive=True), nodes[number]):
                process.kill()
        messages[number] = nodes[number].communicate(timeout=120)[1]
    return [each.returncode for each in nodes], messages, started_s


@pytest.mark.parametrize(
    ("strategy", "what", "lost"),
    [
        ("ddp", "zero", 0),
        ("zero3", "stop1", 1),
        pytest.param("ddp", "last", 1, marks=pytest.mark.slow),
        pytest.param("zero2", "last", 1, marks=pytest.mark.slow),
        pytest.param("zero3", "zero", 0, marks=pytest.mark.slow),
        pytest.param("ddp", "stop0", 0, marks=pytest.mark.slow),
    ],
)
def test_the_other_node_continues(
    tmp_path: Path, undisturbed: Path, lighthouse: str, strategy: str, what: str, lost: int
) -> None:
    codes, messages, started_s = run(tmp_path, strategy, what, lighthouse)
    assert codes[1 - lost] == 0, messages
    assert codes[lost] != 0
    assert f"node {lost} was lost. Training" in messages[1 - lost]
    assert "on 2 of 4 ranks" in messages[1 - lost]
    check_same(tmp_path, undisturbed, 1e-5)
    of_survivors = [
        steps for each in one_node.ended(tmp_path) if (steps := [step for step, _, _ in each])[-1] == one_node.NUM_STEPS
    ]
    assert len(of_survivors) == 2
    assert set().union(*of_survivors) == set(range(1, one_node.NUM_STEPS + 1))
    for steps in of_survivors:
        assert len(steps) - len(set(steps)) <= (0 if strategy == "ddp" else 1)  # a snapshot after each step
    assert not list(tmp_path.rglob("roomier-state*"))
    if not what.startswith("stop"):  # such a loss is noticed after hang_timeout
        assert max(one_node.ratios(tmp_path, started_s)) < 0.3


@pytest.mark.parametrize("has_lighthouse", [True, False])
def test_errors_end_all_nodes(tmp_path: Path, lighthouse: str, has_lighthouse: bool) -> None:
    codes, messages, _ = run(tmp_path, "ddp", "raises", lighthouse if has_lighthouse else None)
    assert 0 not in codes
    assert ("a mistake of the user" if has_lighthouse else LIGHTHOUSE) in "".join(messages)
    assert "Training continues" not in "".join(messages)
