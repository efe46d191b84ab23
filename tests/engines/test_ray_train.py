"""Runs in Ray Train that Ray restarts: samples, weights, reports, errors, another number of workers, and notices."""

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from roomier.checkpoint.run_state import peek_run
from tests.engines.training import Kill, check_same, few_or_ten_kills, steps_of, train, undisturbed
from tests.ranks.pool import RankPool

pytestmark = [pytest.mark.services, pytest.mark.filterwarnings("ignore")]  # Ray's own warnings
ray = pytest.importorskip("ray", reason="ray is not installed (pip install 'roomier[ray]')")
pytest.importorskip("ray.train", reason="ray[train] is not installed (pip install 'roomier[ray]')")

_NODE = {"num_cpus": 3, "object_store_memory": 80_000_000}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A cluster of a head without cores and a node with three cores, with its own home folder."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
        patch.setenv("RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", "0.5")
        cluster = Cluster(initialize_head=True, head_node_args={**_NODE, "num_cpus": 0, "include_dashboard": False})
        cluster.add_node(**_NODE)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


def fit(folder: Path, num_workers: Any, max_failures: int = 0, **config: Any) -> Any:
    """Run :func:`in_worker` in Ray Train, and return Ray's result."""
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    (folder / "notes").mkdir(parents=True, exist_ok=True)
    return TorchTrainer(
        in_worker,
        train_loop_config={"notes": folder / "notes", **config},
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=RunConfig(
            name="run",
            storage_path=str(folder / "ray"),
            failure_config=FailureConfig(max_failures=max_failures),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


def in_worker(config: dict[str, Any]) -> None:
    from roomier.engines.ray import RayTrainReport

    settings = {"before_step": None, "max_epochs": 4, "dropout": 0.0, **config}
    num_ranks = ray.train.get_context().get_world_size()
    train(**settings, num_ranks=num_ranks, callbacks=[RayTrainReport(every_n_train_steps=4)])


@few_or_ten_kills
def test_kills_change_no_bit(cluster: Any, on_ranks: RankPool, tmp_path: Path, num_kills: int) -> None:
    num_epochs = 6 + num_kills
    settings = {"max_epochs": num_epochs, "dropout": 0.1}
    (tmp_path / "undisturbed").mkdir()
    on_ranks(2, undisturbed, tmp_path / "undisturbed", **settings)
    notes = tmp_path / "killed" / "notes"
    result = fit(tmp_path / "killed", 2, num_kills, before_step=Kill(notes, range(num_kills), within=8), **settings)
    assert result.error is None
    assert len(list(notes.glob("attempt-*"))) == 2 * (num_kills + 1)
    check_same(notes, tmp_path / "undisturbed")
    assert result.metrics["step"] == 6 * num_epochs
    assert 0 < result.metrics["loss"] < 1
    kept = sorted((tmp_path / "killed" / "ray" / "run" / "version_0" / "checkpoints").glob("epoch=*"))
    assert [Path(each.path) for each, _ in result.best_checkpoints] == kept  # not copied, and Ray removed the others
    assert [values["step"] for _, values in result.best_checkpoints] == [6 * num_epochs - 4, 6 * num_epochs]
    assert Path(result.checkpoint.path) == kept[-1]


def kill_at_11(rank: int, step: int) -> None:
    if step == 11 and rank == 1:
        os.kill(os.getpid(), 9)


def test_a_new_run_with_the_same_name_resumes_with_another_number_of_workers(
    cluster: Any, on_ranks: RankPool, tmp_path: Path
) -> None:
    (tmp_path / "undisturbed").mkdir()
    on_ranks(2, undisturbed, tmp_path / "undisturbed", 4)
    with pytest.raises(ray.train.WorkerGroupError, match="died unexpectedly"):
        fit(tmp_path, 2, before_step=kill_at_11)
    result = fit(tmp_path, (1, 4))  # three cores
    assert result.metrics["step"] == 24
    notes = tmp_path / "notes"
    assert {path.name for path in notes.glob("samples-*")} == {f"samples-{rank}.jsonl" for rank in range(3)}
    check_same(notes, tmp_path / "undisturbed", 1e-5)


def fail_at_3(rank: int, step: int) -> None:
    names = [thread.name for thread in threading.enumerate()]
    assert "roomier-heartbeat" in names
    assert "roomier-preemption" in names or rank
    if step == 3 and rank == 1:
        raise ValueError("the sample is not valid")


def test_an_error_in_one_rank_shows_its_traceback_and_ends_all(cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(ray.train.WorkerGroupError) as raised:
        fit(tmp_path, 2, before_step=fail_at_3)
    assert list(raised.value.worker_failures) == [1]
    assert "in fail_at_3" in str(raised.value)
    assert "ValueError: the sample is not valid" in str(raised.value)


class PreemptedThenHangs:
    """Drain the node of the workers before step 4, as a cloud does. After the restart, rank 1 hangs in step 20."""

    def __init__(self, notes: Path) -> None:
        self.notes = notes

    def __call__(self, rank: int, step: int) -> None:
        if step == 4 and rank == 0 and not (self.notes / "drained").exists():
            from ray._raylet import GcsClient
            from ray.core.generated.autoscaler_pb2 import DRAIN_NODE_REASON_PREEMPTION

            context = ray.get_runtime_context()
            (self.notes / "drained").write_text(context.get_node_id())
            stops_at_ms = int(1000 * (time.time() + 8))
            client = GcsClient(address=context.gcs_address)
            client.drain_node(context.get_node_id(), DRAIN_NODE_REASON_PREEMPTION, "", stops_at_ms)
        if step == 20 and rank == 1 and not (self.notes / "hung").exists():
            (self.notes / "hung").write_text(ray.get_runtime_context().get_node_id())
            time.sleep(600)
        time.sleep(0.3)


def test_a_drained_node_is_not_a_failure_and_the_heartbeat_ends_a_hang(cluster: Any, tmp_path: Path) -> None:
    cluster.add_node(**_NODE)
    notes = tmp_path / "notes"
    result = fit(tmp_path, 2, 1, before_step=PreemptedThenHangs(notes), hang_timeout="00:00:00:10")
    assert result.error is None
    assert result.metrics["step"] == 24
    assert (notes / "hung").read_text() not in ("", (notes / "drained").read_text())
    assert len((notes / "samples-1.jsonl").read_text().splitlines()) == 24  # rank 1 repeated no step
    steps_of(notes)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with user code and run.yaml, which Ray copies to the workers."""
    options = {
        "seed_everything": 0,
        "model": {"class_path": "cli_toy.ToyModule"},
        "data": {"class_path": "cli_toy.ToyData"},
        "trainer": {
            "accelerator": "cpu",
            "max_steps": 2,
            "default_root_dir": str(tmp_path / "runs"),
            "callbacks": [{"class_path": "roomier.engines.ray.RayTrainReport"}],
        },
    }
    folder = shutil.copytree(Path(__file__).parents[1] / "cli" / "project", tmp_path / "project")
    (folder / "run.yaml").write_text(yaml.safe_dump(options))
    return folder


def launch(project: Path, address: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "roomier", "launch", "run.yaml", "--to=ray", "--hardware=cpu:1", *words]
    environ = {**os.environ, "RAY_ADDRESS": address}
    return subprocess.run(command, cwd=project, env=environ, capture_output=True, text=True, timeout=200)


def test_launch_runs_fit_on_the_cluster_and_a_second_launch_continues(
    cluster: Any, project: Path, tmp_path: Path
) -> None:
    for words, num_ranks, num_steps in (["--nodes=1:6"], 3, 2), (["--nodes=1", "--trainer.max_steps=4"], 1, 4):
        done = launch(project, cluster.address, *words)
        assert done.returncode == 0, done.stderr
        [last] = (tmp_path / "runs" / "run" / "version_0" / "checkpoints").glob(f"epoch=*-step={num_steps}")
        record = peek_run(last)
        assert record["plan"]["parallel"]["devices"] == num_ranks


def test_launch_does_not_repeat_an_error_of_the_user_ten_times(cluster: Any, project: Path) -> None:
    done = launch(project, cluster.address, "--nodes=1", "--model=cli_toy.HasABugInAHook")
    assert done.returncode == 1
    assert "job='run': failed again with KeyError: 'a bug of the user'. Correct the error" in done.stderr
    assert "in on_train_start" in done.stderr


def test_launch_reports_an_unreachable_cluster_immediately(project: Path) -> None:
    with socket.socket() as bound:  # does not listen
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        done = launch(project, address)
    assert done.returncode == 2
    assert f"RAY_ADDRESS='{address}': Ray cannot connect" in done.stderr
    assert "Set it to the address of the cluster" in done.stderr
