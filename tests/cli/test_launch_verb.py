"""``roomier launch``: resources and grace period of the manifests, and invalid requests."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from roomier import checkpoint
from roomier.checkpoint.record import RECORD_NAME, read_record, write_record
from roomier.cli.main import main

RUN: dict[str, Any] = {
    "model": {"class_path": "cli_toy.PlainNetwork"},
    "trainer": {"strategy": "zero2", "default_root_dir": "s3://bucket/runs"},
}
ONE = ["--hardware=a100-80gb:8", "--input=float32[2,4]"]
WIDE = ["--model.width=20000000", "--input=float32[2,20000000]", "--hardware=a100-80gb:8"]  # 80 MB of weights
GIB = 2**30


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent / "project")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(RUN))
    return path


def test_slurm_starts_the_ranks_and_may_change_their_number(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(run), "--to=slurm", "--nodes=1:4", "--name=gpt", *ONE, "--trainer.max_steps", "9"]
    assert main(["launch", *words]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [
        "#!/bin/bash",
        "#SBATCH --job-name=gpt",
        "#SBATCH --nodes=1-4",
        "#SBATCH --ntasks-per-node=8",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --mem=40G",
        "#SBATCH --requeue",
        "#SBATCH --signal=TERM@31",
        "#SBATCH --output=%x-%j.log",
        "#SBATCH --open-mode=append",
        "",
        "export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}",
        "export ROOMIER_JOB=slurm-$SLURM_JOB_ID",
        "for _ in {0..3}; do",
        f"    srun --kill-on-bad-exit=1 roomier fit --config {run} --trainer.max_steps 9 --trainer.devices=auto "
        "--trainer.num_nodes=auto && exit",
        "done",
    ]


def test_resources_are_the_forecast_of_the_plan(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    offload = '--trainer.offload={"optimizer_states":"disk"}'
    words = [str(run), "--to=dstack", "--image=me/train", *WIDE, offload]
    assert main(["plan", "--config", str(run), "--strategy=zero2", *WIDE, offload, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["chosen"]
    assert main(["launch", *words]) == 0
    found = yaml.safe_load(capsys.readouterr().out)["resources"]
    memory_bytes = 8 * (plan["host_bytes"] + 4 * GIB) / 0.8
    assert found["memory"] == f"{-int(-memory_bytes // GIB)}GB.."
    assert plan["disk_bytes"] > 0
    assert found["disk"] == f"{100 - int(-8 * plan['disk_bytes'] / 0.95 // GIB)}GB.."
    assert found["gpu"] == {"name": "A100", "memory": "80GB", "count": 8}


def test_grace_period_uses_the_measured_time_of_a_save(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "step=1"
    checkpoint.save(saved, {"value": 1})
    record = read_record(saved)
    assert 0 <= record.write_ms < 60_000
    (saved / RECORD_NAME).unlink()
    write_record(saved, type(record)(**{**vars(record), "write_ms": 200_000}))
    assert main(["launch", str(run), "--to=jobset", "--image=i", f"--measured={saved}", *ONE]) == 0
    [job] = yaml.safe_load(capsys.readouterr().out)["spec"]["replicatedJobs"]
    seconds = job["template"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert 430 < seconds < 433  # 30 s, two saves and two steps


@pytest.mark.parametrize(
    ("words", "field", "text"),
    [
        (["--to=jobset"], "--image", "is required for jobset. Pass --image"),
        (["--to=skypilot", "--nodes=1:2"], "--nodes", "'1:2': is a range, but skypilot cannot resize a job"),
        (["--to=slurm", "--nodes=0"], "--nodes", "must be a number or a range"),
        (["--to=slurm", "--nodes=4:2"], "--nodes", "must be a number or a range"),
        (["--to=slurm", "--name=My Job"], "--name", "lowercase letters, digits and hyphens"),
        (["--to=slurm", "--what_if"], "--what_if", "is an option of `roomier plan` only"),
        (["--to=slurm", "--strategy=zero3"], "--strategy", "such as --trainer.strategy"),
        (["--to=slurm", "--measured=none"], "--measured", "no checkpoint with a measured save time"),
        (
            ["--to=slurm", "--trainer.strategy=ddp", "--model.width=9000000000"],
            "--nodes",
            "budget.*more nodes",
        ),
        (["--to=pbs"], "launch", "invalid choice: 'pbs'"),
    ],
)
def test_invalid_requests_are_rejected_before_the_start(
    run: Path, capsys: pytest.CaptureFixture[str], words: list[str], field: str, text: str
) -> None:
    width = next((word.partition("=")[2] for word in words if word.startswith("--model.width")), "4")
    assert main(["launch", str(run), *words, "--hardware=a100-80gb:8", f"--input=float32[2,{width}]"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"error: {field}=" in printed.err
    assert re.search(text, printed.err), printed.err


def test_storage_that_ends_with_a_node_is_reported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", str(run), "--to=skypilot", *ONE, "--trainer.default_root_dir=runs"]) == 0
    assert "default_root_dir='runs' must be in storage that all nodes share" in capsys.readouterr().err
