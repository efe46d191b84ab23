"""Devices without a capability, and accelerators that do not exist."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest

from roomier import RoomierError, Trainer
from tests.device.runs import RELATIVE, Language, difference, loader, trainer_of, weights_of
from tests.simulator import simulated
from tests.simulator.workers import SimulatedRanks

DEVICE = simulated.DEVICE

# Arguments that use the capability, and the text of the notice.
MISSING: dict[str, tuple[dict[str, Any], str]] = {
    "streams": ({"offload": {"activations": "cpu"}}, "no streams, so copies"),
    "pinned_memory": ({"offload": {"activations": "cpu"}}, "no pinned memory, so copies"),
    "fused_optimizers": ({}, "no fused optimizers"),
    "memory_statistics": ({"activation_checkpointing": 0.5}, "no memory statistics"),
}


def compare_with_cpu(folder: Path, keywords: dict[str, Any]) -> tuple[float, list[str], list[str]]:
    """Return the difference between the weights, the notices about the device in two fits, and the races."""
    printed = io.StringIO()
    fits = []
    for accelerator in (DEVICE, DEVICE, "cpu"):
        module = Language(256)
        with contextlib.redirect_stderr(printed):
            trainer = trainer_of(folder, accelerator, enable_checkpointing=False, **keywords)
            trainer.fit(module, loader(batch_size=16))
        fits.append(weights_of(module))
    notices = [line for line in printed.getvalue().splitlines() if line.startswith(f"roomier: {DEVICE} has")]
    return max(difference(each, fits[-1]) for each in fits[:2]), notices, simulated.races()


@pytest.mark.parametrize(
    ("capability", "schedule", "keywords"),
    [
        *((name, ("LATE", "OTHERS_FIRST")[index % 2], MISSING[name][0]) for index, name in enumerate(MISSING)),
        ("streams", "OTHERS_FIRST", {"offload": {"activations": "disk"}}),
        ("pinned_memory", "LATE", {"offload": {"activations": "disk"}}),
    ],
)
def test_a_missing_capability_is_reported_one_time_and_changes_no_number(
    on_simulated: SimulatedRanks, tmp_path: Path, capability: str, schedule: str, keywords: dict[str, Any]
) -> None:
    _, text = MISSING[capability]
    (found,) = on_simulated(1, compare_with_cpu, tmp_path, keywords, without=(capability,), schedule=schedule)
    relative, notices, races = found
    assert relative <= RELATIVE
    assert races == []
    assert len(notices) == 1
    assert text in notices[0]
    others = [words for name, (_, words) in MISSING.items() if name != capability]
    assert not [words for words in others if words.removesuffix(", so copies") in notices[0]]


def fit_in(folder: Path, precision: str) -> str:
    trainer = trainer_of(folder, DEVICE, precision=precision)
    with pytest.raises(RoomierError) as caught:
        trainer.fit(Language(), loader())
    return str(caught.value)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_a_device_that_does_not_compute_in_bfloat16_rejects_the_plan(
    on_simulated: SimulatedRanks, tmp_path: Path, precision: str
) -> None:
    (text,) = on_simulated(1, fit_in, tmp_path, precision, without=("bfloat16",))
    assert text == (
        f"precision='{precision}': is not supported on simulated, which does not compute in bfloat16. "
        "Use precision='16-mixed' or '32-true', or accelerator='cpu'."
    )
    assert not list(tmp_path.rglob("checkpoints"))


AVAILABLE = "Use one of: 'auto', 'simulated', 'cpu'."
# Arguments of the Trainer, and the error.
REJECTED: list[tuple[dict[str, Any], str]] = [
    ({"accelerator": "cuda"}, f"accelerator='cuda': is not available on this machine. {AVAILABLE}"),
    (
        {"accelerator": "npu"},
        "accelerator='npu': requires the package torch-npu, which is not installed. Run `pip install torch-npu`. "
        + AVAILABLE,
    ),
    (
        {"accelerator": "tpu"},
        "accelerator='tpu': requires the package torch-tpu, which is not installed. Run `pip install torch-tpu`. "
        + AVAILABLE,
    ),
    (
        {"tpu_cores": 8},
        "tpu_cores=8: Trainer has no such keyword. Use accelerator='tpu' and devices=N. The package torch-tpu is "
        "required.",
    ),
    (
        {"accelerator": "warp"},
        "accelerator='warp': is unknown. Use one of: auto, cpu, cuda, gpu, mps, npu, simulated, tpu, xpu.",
    ),
    (
        {"accelerator": "simulate"},
        "accelerator='simulate': is unknown. Did you mean 'simulated'?",
    ),
]


def errors_of_trainers() -> list[str]:
    errors = []
    for keywords, _ in REJECTED:
        with pytest.raises(RoomierError) as caught:
            Trainer(logger=False, **keywords).fit(Language(), loader())
        errors.append(str(caught.value))
    return errors


def test_accelerators_that_do_not_exist_are_rejected(on_simulated: SimulatedRanks) -> None:
    assert on_simulated(1, errors_of_trainers) == [[error for _, error in REJECTED]]
