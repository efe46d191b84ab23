"""Check manifests with the schemas of their launchers.

Reads a JSON list of ``[target, manifest]`` from standard input and writes a JSON list with the problem of each
manifest, or an empty string. The packages of ``tests/engines/requirements.txt`` conflict with those of roomier, so this
program runs in an environment of its own and does not import roomier.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import jsonschema
import kubernetes_validate
import yaml
from dstack._internal.core.models.configurations import parse_run_configuration
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet, TrainerV1alpha1TrainJob
from sky.utils import schemas


def check_round_trip(kind: Any, content: dict[str, Any]) -> None:
    """Raise an error if ``kind`` rejects ``content``, or drops a key, as it does with unknown keys."""
    kept = json.loads(json.dumps(kind.from_dict(content).to_dict(), default=str))
    assert kept == content, f"{_differing(content, kept)} is not a key of {kind.__name__}"


def _differing(content: Any, kept: Any, place: str = "") -> str:
    if isinstance(content, dict) and isinstance(kept, dict):
        for name, value in content.items():
            if kept.get(name) != value:
                return _differing(value, kept.get(name), f"{place}.{name}")
    if isinstance(content, list) and isinstance(kept, list) and len(content) == len(kept):
        for index, (one, other) in enumerate(zip(content, kept, strict=True)):
            if one != other:
                return _differing(one, other, f"{place}[{index}]")
    return place


def check_pod(metadata: dict[str, Any], pod: dict[str, Any]) -> None:
    """Check ``pod`` with the strict schema of Kubernetes, which also checks required fields."""
    content = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod}
    kubernetes_validate.validate(content, kubernetes_validate.latest_version(), strict=True)


def check_train_job(content: dict[str, Any]) -> None:
    check_round_trip(TrainerV1alpha1TrainJob, content)
    trainer = content["spec"]["trainer"]
    [patch] = content["spec"]["runtimePatches"]
    [job] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    whole = {"image": trainer["image"], "command": trainer["command"], "resources": trainer["resourcesPerNode"]}
    check_pod(content["metadata"], {**pod, "containers": [{**pod["containers"][0], **whole, "env": trainer["env"]}]})


def check_job_set(content: dict[str, Any]) -> None:
    check_round_trip(JobsetV1alpha2JobSet, content)
    for job in content["spec"]["replicatedJobs"]:
        whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": content["metadata"], **job["template"]}
        kubernetes_validate.validate(whole, kubernetes_validate.latest_version(), strict=True)


def check_sky_pilot(content: dict[str, Any]) -> None:
    jsonschema.validate(content, schemas.get_task_schema())
    jsonschema.validate(content["resources"], schemas.get_resources_schema())


CHECKS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "trainjob": check_train_job,
    "jobset": check_job_set,
    "skypilot": check_sky_pilot,
    "dstack": parse_run_configuration,
}


def problem_of(target: str, text: str) -> str:
    """Return the problem that the schema of ``target`` reports; an empty string if there is none."""
    try:
        CHECKS[target](yaml.safe_load(text))
    except Exception as error:  # each package has its own kind of error
        return f"{type(error).__name__}: {error}"[:2000]
    return ""


if __name__ == "__main__":
    json.dump([problem_of(target, text) for target, text in json.load(sys.stdin)], sys.stdout)
