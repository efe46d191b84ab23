"""Manifests of ``roomier launch`` pass the schema of their launcher, and mutated manifests do not.

``make schemas`` installs the packages with the schemas, and ``make slurm`` unpacks SLURM.
"""

import contextlib
import io
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from roomier.cli.main import main
from tests.launch import slurm
from tests.launch.slurm import Cluster, cluster

ROOT = Path(__file__).parents[2]
SCHEMAS = ROOT / ".cache" / "schemas" / "bin" / "python"
PROGRAM = Path(__file__).parent / "programs" / "check_manifests.py"
RUN = {
    "model": {"class_path": "cli_toy.PlainNetwork"},
    "trainer": {"strategy": "zero2", "default_root_dir": "s3://b/r"},
}
IMAGE = ["--image", "ghcr.io/me/train:1.2"]
WIDE = ["--model.width=2000000", "--input=float32[2,2000000]"]

SETTINGS = {
    "two nodes": ["--hardware=a100-80gb:8", "--nodes=2", "--input=float32[2,4]", *IMAGE],
    "offload": ["--hardware=h100:4", '--trainer.offload={"optimizer_states":"disk"}', *WIDE, *IMAGE],
    "processors": ["--hardware=cpu:2", "--nodes=4", "--input=float32[2,4]", "--command=python 'my train.py'", *IMAGE],
    "auto": ["--hardware=mi300x:8", "--trainer.strategy=auto", "--name=large-1", "--input=float32[2,4]", *IMAGE],
}
"""Options of the manifests, for each target."""

MUTATIONS = {
    "trainjob": [
        ("numNodes: 2", "nodes: 2"),
        ("numProcPerNode: 4", "numProcPerNode: four"),
        ("name: torch-distributed", "runtime: torch-distributed"),
        ("terminationGracePeriodSeconds: ", "terminationGracePeriodSeconds: -s"),
    ],
    "jobset": [
        ("backoffLimit: 0", "backoffLimits: 0"),
        ("restartPolicy: Never", "restartPolicy: 0"),
        ("mountPath: /dev/shm", "mount: /dev/shm"),
        ("completions: 1", "completions: one"),
    ],
    "skypilot": [
        ("num_nodes: 2", "num_nodes: two"),
        ("disk_size: ", "disk_size: about "),
        ("run: ", "runs: "),
        ("accelerators: MI300X:8", "accelerators: [MI300X, 8]"),
    ],
    "dstack": [
        ("nodes: 2", "nodes: 0"),
        ("disk: ", "disk: about "),
        ("commands:", "comands:"),
        ("count: 8", "number: 8"),
    ],
    "slurm": [
        ("--nodes=2", "--nodes=two"),
        ("--tmp=", "--tmp=x"),
        ("--signal=TERM@", "--signal=TERMINATE@"),
        ("--requeue", "--requeues"),
    ],
}
"""For each target, a text and its wrong replacement, in the manifests of the settings above."""

pytestmark = pytest.mark.services


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], str]:
    """Return the manifest of each target and setting."""
    file = tmp_path_factory.mktemp("run") / "run.yaml"
    file.write_text(yaml.safe_dump(RUN))
    found = {}
    with contextlib.chdir(ROOT / "tests" / "cli" / "project"):
        for target in MUTATIONS:
            for name, options in SETTINGS.items():
                text = io.StringIO()
                with contextlib.redirect_stdout(text):
                    assert main(["launch", str(file), "--to", target, *options]) == 0
                found[target, name] = text.getvalue()
    return found


def mutated(target: str, number: int, text: str) -> str:
    """Return ``text`` with one of the :data:`MUTATIONS` of ``target``."""
    before, after = MUTATIONS[target][number]
    assert before in text, text
    return text.replace(before, after, 1)


@pytest.mark.skipif(not SCHEMAS.exists(), reason="the schemas are not installed: run `make schemas`")
def test_manifests_pass_the_schemas_and_mutated_manifests_fail(
    manifests: dict[tuple[str, str], str], tmp_path: Path
) -> None:
    plain = [(target, text) for (target, _), text in manifests.items() if target != "slurm"]
    wrong = [(target, mutated(target, index % 4, text)) for index, (target, text) in enumerate(plain)]
    environ = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}  # SkyPilot writes to the home folder
    done = subprocess.run(
        [SCHEMAS, PROGRAM], input=json.dumps(plain + wrong), env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    problems = json.loads(done.stdout)
    assert len(plain) == len(wrong) == 16
    assert [problem for problem in problems[:16] if problem] == []
    assert [each for each, problem in zip(wrong, problems[16:], strict=True) if not problem] == []


@pytest.fixture(scope="module")
def large_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster with four more nodes, which are never started."""
    size = "CPUs=64 RealMemory=2000000 TmpDisk=8000000 State=CLOUD"
    programs = "SuspendProgram=/bin/true\nResumeProgram=/bin/true\nSuspendTime=3600\n"
    text = f"{programs}NodeName=large[1-4] {size}\nPartitionName=large Nodes=large[1-4] State=UP\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slurm, "CONFIGURATION", slurm.CONFIGURATION + text)
        with cluster(tmp_path_factory.mktemp("slurm")) as found:
            yield found


@pytest.mark.skipif(not (slurm.PROGRAMS / "sbin").is_dir(), reason="SLURM is not available: run `make slurm`")
def test_slurm_accepts_the_scripts_and_rejects_mutated_scripts(
    manifests: dict[tuple[str, str], str], large_cluster: Cluster
) -> None:
    scripts = [text for (target, _), text in manifests.items() if target == "slurm"]
    wrong = [mutated("slurm", index, text) for index, text in enumerate(scripts)]
    results = []
    for script in (*scripts, *wrong):
        # Nodes that are not started have no GPUs.
        text, _ = re.subn(r"#SBATCH --gpus-per-node=\d+\n", "", script)
        command = ["sbatch", "--test-only", "--partition=large"]
        done = subprocess.run(command, env=large_cluster.environ, input=text, capture_output=True, text=True)
        results.append((done.returncode, done.stderr))
    assert len(scripts) == 4
    assert [each for each in results[:4] if each[0]] == []
    assert [each for each in results[4:] if each[0] != 255] == []  # the code for an invalid option
