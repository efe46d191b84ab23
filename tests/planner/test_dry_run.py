"""The peak of a dry run equals the peak of a real step on one rank, for many models and plans."""

from typing import Any

import pytest
import torch

from roomier.api.adapt import as_module
from roomier.plan import Plan
from roomier.planner.dry_runs.dry_run import dry_run
from roomier.planner.workload import Workload
from tests.covering import few
from tests.planner.models import MODELS
from tests.planner.truth import measured_peak

pytest.importorskip("transformers")

ALLOWED = 1e-4  # relative to the peak; much smaller than the goal of 2 %, so that changes are detected

QUICK: list[tuple[str, dict[str, Any]]] = [
    ("gpt_tied", {"loss": {"chunked": True}, "precision": {"mode": "16-mixed"}}),
    ("bert", {"activation": {"policy": "selective"}, "optimizer": {"name": "lion"}}),
    ("mixtral", {"batch": {"gradient_clip_val": 1.0}}),
    ("vit", {"adapter": {"lora_rank": 4}, "precision": {"mode": "bf16-mixed"}}),
    ("unet", {"precision": {"mode": "bf16-mixed"}, "activation": {"policy": "full"}}),
    ("resnet", {"optimizer": {"name": "sgd", "lr": 0.1, "options": {"momentum": 0.9}}}),
    ("lstm_padded", {"optimizer": {"name": "adamw8bit"}, "batch": {"accumulate_grad_batches": 2}}),
    ("recommender", {"optimizer": {"name": "adafactor"}}),
]

MATRIX: list[dict[str, Any]] = [
    {},
    {"precision": {"mode": "bf16-mixed"}, "activation": {"policy": "full"}, "batch": {"gradient_clip_val": 1.0}},
    {
        "precision": {"mode": "bf16-true"},
        "activation": {"policy": "selective"},
        "batch": {"accumulate_grad_batches": 2},
    },
    {"precision": {"mode": "16-mixed"}},
    {"activation": {"policy": "full"}, "optimizer": {"name": "adafactor"}},
    {"activation": {"policy": "selective"}, "optimizer": {"name": "adamw8bit"}},
    {"optimizer": {"name": "adamw4bit", "step_in_backward": "exact"}},
    {"optimizer": {"name": "lion"}, "activation": {"policy": "every_n"}},
    {"optimizer": {"name": "muon"}, "batch": {"gradient_clip_val": 1.0}},
    {"optimizer": {"name": "sgd", "lr": 0.1, "options": {"momentum": 0.9}}, "loss": {"chunked": True}},
    {"optimizer": {"name": "adamw", "step_in_backward": "exact"}, "batch": {"gradient_clip_val": 1.0}},
    {"adapter": {"lora_rank": 4}, "precision": {"mode": "bf16-mixed"}},
]


def plan_of(asked: dict[str, Any]) -> Plan:
    return Plan.of({"optimizer": {"name": "adamw"}, **asked})


def check(name: str, asked: dict[str, Any]) -> None:
    module, batch = MODELS[name]()
    plan = plan_of(asked)
    truth = measured_peak(module, batch, plan)
    found = dry_run(Workload.of(as_module(module), batch), plan).peak
    assert found.peak_bytes == pytest.approx(truth.total(), rel=ALLOWED)
    assert found.phase == truth.phase
    for kind, num_bytes in truth.num_bytes.items():
        assert found.peak[kind] == pytest.approx(num_bytes, abs=ALLOWED * truth.total()), kind


@pytest.mark.parametrize(("name", "asked"), few(QUICK, 2), ids=lambda each: each if isinstance(each, str) else "")
def test_the_peak_of_a_dry_run_equals_the_peak_of_the_step(name: str, asked: dict[str, Any]) -> None:
    check(name, asked)


@pytest.mark.slow
@pytest.mark.parametrize("asked", MATRIX, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_of_a_dry_run_equals_the_peak_of_the_step_for_all_plans(name: str, asked: dict[str, Any]) -> None:
    module, batch = MODELS[name]()
    plan = plan_of(asked)
    try:
        measured_peak(module, batch, plan)
    # the model has no blocks or no logits, so the dry run raises an error as well
    except (ValueError, RuntimeError) as error:
        if "could not create a primitive descriptor" in str(error):
            pytest.skip(f"this CPU cannot compute the step, so there is nothing to measure: {error}")
        with pytest.raises((ValueError, RuntimeError)):
            dry_run(Workload.of(as_module(module), batch), plan)
        return  # both reject the plan
    check(name, asked)


def test_a_workload_with_twice_the_batch_size_has_the_peak_of_such_a_step() -> None:
    module, batch = MODELS["recommender"]()
    workload = Workload.of(as_module(module), batch)
    plan = plan_of({})
    small, large = (dry_run(each, plan) for each in (workload, workload.with_batch_size(512)))
    truth = measured_peak(module, {key: torch.cat([each, each]) for key, each in batch.items()}, plan)
    assert large.peak_bytes == pytest.approx(truth.total(), rel=ALLOWED)
    assert large.peak_bytes > small.peak_bytes
