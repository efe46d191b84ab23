"""A job with the script of the how-to page on SLURM: its ranks are killed, and its node fails."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.engines.training import check_same, few_or_ten_kills, undisturbed
from tests.launch.slurm import PROGRAMS, Cluster, cluster, wait_until
from tests.ranks.pool import RankPool

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "code" / "slurm" / "job.sh"
HERE = (f"--chdir={ROOT}", "--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=0", "--cpus-per-task=1")

pytestmark = [
    pytest.mark.services,
    pytest.mark.skipif(not (PROGRAMS / "sbin").is_dir(), reason="SLURM is not available: run `make slurm`"),
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm")) as found:
        yield found


def submit(slurm: Cluster, command: str, log: Path) -> str:
    """Submit the script of the page with ``command`` in place of its training, and return the number of the job."""
    script, num_changes = re.subn(r"python examples/train_gpt.py [^&]*", f"{command} ", SCRIPT.read_text())
    assert num_changes == 1
    return slurm.submit(script, (*HERE, f"--output={log}"))


def fail_node(slurm: Cluster, job: str) -> None:
    """Kill all processes of ``job``, report its node to SLURM as down, and return the node to service."""
    words = [line.split() for line in slurm.run("scontrol", "listpids", job).splitlines()[1:]]
    tasks = [psutil.Process(int(pid)) for pid, _, _, task, _ in words if task.isdecimal()]
    for process in {task.parent() for task in tasks} | set(tasks):
        process.kill()
    folder = Path(slurm.environ["SLURM_CONF"]).parent
    for each in (folder / "spool").glob("job*"):  # slurmd removes them when it starts on a node
        shutil.rmtree(each)
    node = slurm.values_of(job)["NodeList"]
    slurm.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=failure")
    wait_until(lambda: slurm.values_of(job)["JobState"] == "PENDING", lambda: str(slurm.values_of(job)))
    slurm.run("scontrol", "update", f"NodeName={node}", "State=RESUME")


@pytest.mark.timeout(500)
@few_or_ten_kills
def test_kills_and_failures_of_the_node_change_no_bit(
    slurm: Cluster, on_ranks: RankPool, tmp_path: Path, num_kills: int
) -> None:
    settings = {"max_epochs": 6 + num_kills, "dropout": 0.1, "strategy": "zero2"}
    (tmp_path / "undisturbed").mkdir()
    on_ranks(2, undisturbed, tmp_path / "undisturbed", **settings)
    (notes := tmp_path / "killed").mkdir()
    failures = [1] if num_kills == 2 else [3, 7]  # SLURM then starts the script again, which has four attempts
    kills = [each for each in range(num_kills) if each not in failures]
    log = tmp_path / "job.log"
    job = submit(slurm, f"python -m tests.engines.programs.train {notes} '{json.dumps(settings)}' '{kills}'", log)
    for attempt in failures:
        begun = [notes / f"attempt-{rank}-{attempt}" for rank in range(2)]
        wait_until(lambda: all(each.exists() for each in begun), log.read_text, 400)  # noqa: B023
        fail_node(slurm, job)
    wait_until(lambda: slurm.values_of(job)["JobState"] in ("COMPLETED", "FAILED"), log.read_text, 400)
    assert slurm.values_of(job)["JobState"] == "COMPLETED", log.read_text()
    assert slurm.values_of(job)["Restarts"] == str(len(failures))
    assert len(list(notes.glob("attempt-*"))) == 2 * (num_kills + 1)
    check_same(notes, tmp_path / "undisturbed")


def test_a_job_that_always_fails_ends_after_three_restarts(slurm: Cluster, tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    job = submit(slurm, "bash -c 'echo started; exit 3'", log)
    wait_until(lambda: slurm.values_of(job)["JobState"] in ("COMPLETED", "FAILED"), log.read_text)
    assert slurm.values_of(job)["ExitCode"] == "3:0"
    assert log.read_text().count("started") == 2 * 4
