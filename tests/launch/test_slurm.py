"""A job with the directives of ``examples/slurm_train.sh`` on a real SLURM: requeued after a signal, or cancelled."""

import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from tests.launch.programs.slurm_job import train
from tests.launch.slurm import PROGRAMS, Cluster, cluster, wait_until
from tests.ranks.pool import RankPool

EXAMPLE = Path(__file__).parents[2] / "examples" / "slurm_train.sh"
PROGRAM = Path(__file__).parent / "programs" / "slurm_job.py"
HERE = ("--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=0", "--cpus-per-task=1")

pytestmark = [
    pytest.mark.more,
    pytest.mark.skipif(
        not (PROGRAMS / "sbin").is_dir(), reason="SLURM is not available. On Debian, `make slurm` unpacks it"
    ),
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm")) as found:
        yield found


def script() -> str:
    """Return the script of the example, which runs the program of this test instead of the example's program."""
    text, num_changes = re.subn(r"python examples/train_gpt.py [^&]*", f'python {PROGRAM} "$@" ', EXAMPLE.read_text())
    assert num_changes == 1
    return text


def start(slurm: Cluster, root: Path, *options: str, starts: str = "{0..3}") -> str:
    """Submit a job, and return its number when each rank waits in a step."""
    log = root / "job.log"
    own = (f"--output={log}", f"--error={log}", *options)
    job = slurm.submit(script().replace('"$@"', str(root)).replace("{0..3}", starts), (*HERE, *own))
    waiting = [root / f"waits-{rank}" for rank in range(2)]
    wait_until(
        lambda: all(each.exists() for each in waiting),
        lambda: f"{slurm.values_of(job)} {log.read_text() if log.exists() else ''}",
    )
    return job


def check_resumed(slurm: Cluster, job: str, root: Path, on_ranks: RankPool) -> None:
    """Check that SLURM requeued ``job``, and that its weights equal the weights of an uninterrupted run."""
    log = root / "job.log"
    wait_until(lambda: int(slurm.values_of(job)["Restarts"]) == 1, log.read_text)
    wait_until(lambda: slurm.values_of(job)["JobState"] in ("COMPLETED", "FAILED"), log.read_text)
    assert slurm.values_of(job)["JobState"] == "COMPLETED", log.read_text()
    printed = log.read_text()  # of both starts, because the example appends
    assert "to the queue. The restarted job resumes from this checkpoint" in printed
    assert re.search(r"this job was restarted and resumes from \S+/interrupted-step=\d+$", printed, re.MULTILINE)
    (root / "undisturbed").mkdir()
    on_ranks(2, train, root / "undisturbed", joins=False)
    weights, expected = (torch.load(each / "weights.pt") for each in (root, root / "undisturbed"))
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor), name


@pytest.mark.timeout(400)
def test_a_task_of_an_array_is_requeued_and_resumes(slurm: Cluster, tmp_path: Path, on_ranks: RankPool) -> None:
    job = start(slurm, tmp_path, "--array=3")
    slurm.run("scancel", "--signal=TERM", job)
    check_resumed(slurm, f"{job}_3", tmp_path, on_ranks)


@pytest.mark.timeout(400)
def test_a_cancelled_job_is_not_requeued(slurm: Cluster, tmp_path: Path) -> None:
    job = start(slurm, tmp_path)
    ports = [each.laddr for each in psutil.net_connections("inet") if each.status == "LISTEN" and is_of_slurm(each.pid)]
    assert ports
    assert {address.ip for address in ports} == {"127.0.0.1"}
    slurm.run("scancel", job)
    wait_until(lambda: slurm.run("squeue", "--noheader") == "", lambda: str(slurm.values_of(job)))
    assert slurm.values_of(job)["JobState"] == "CANCELLED"
    assert slurm.values_of(job)["Restarts"] == "0"


def is_of_slurm(pid: int | None) -> bool:
    return pid is not None and psutil.Process(pid).name().startswith("slurm")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("signal", ["TERM", "USR1"])
def test_a_job_at_its_time_limit_is_requeued_and_resumes(
    slurm: Cluster, tmp_path: Path, on_ranks: RankPool, signal: str
) -> None:
    # SLURM compares the times of jobs every 30 s. With an earlier limit, a slow start could exceed the limit.
    job = start(slurm, tmp_path, "--time=10", f"--signal={signal}@30")
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=1")
    wait_until(lambda: slurm.values_of(job)["JobState"] == "PENDING", lambda: str(slurm.values_of(job)))
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=10")  # the second start must not exceed its limit
    check_resumed(slurm, job, tmp_path, on_ranks)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_job_without_requeue_ends(slurm: Cluster, tmp_path: Path) -> None:
    job = start(slurm, tmp_path, "--no-requeue", starts="0")
    slurm.run("scancel", "--signal=TERM", job)
    wait_until(lambda: slurm.values_of(job)["JobState"] == "FAILED", lambda: str(slurm.values_of(job)))
    assert slurm.values_of(job)["ExitCode"] == "143:0"
    assert "saved at" in (tmp_path / "job.log").read_text()
