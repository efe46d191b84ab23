"""Memory techniques on the accelerator of this machine, compared with the CPU and with the memory forecast.

``make gpu`` runs this file. The environment variable ``ROOMIER_TEST_ACCELERATOR`` selects the accelerator.
"""

from __future__ import annotations

import copy
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.planner import forecast_of_allocator
from roomier import Callback, RoomierError
from roomier.core.device.capability import capabilities_of
from roomier.core.device.memory import allocated_bytes, peak_allocated_bytes, reset_peaks
from roomier.core.device.resolve import resolve_device
from roomier.planner.dry_runs.confirm import confirm
from roomier.planner.hardware.this_machine import this_machine
from roomier.planner.workload import Workload
from tests.device.runs import NUM_STEPS, Language, difference, loader, trainer_of, weights_of
from tests.simulator.gpt import CONTEXT

ACCELERATOR = os.environ.get("ROOMIER_TEST_ACCELERATOR", "")
WIDTH, BATCH_SIZE = 256, 16
# The kernels of a device sum in a different order. Each term of the longest sum, and each step, adds an error of at
# most eps / 2.
BOUND = NUM_STEPS * 4 * WIDTH * torch.finfo(torch.float32).eps / 2
# autocast uses other lists of operations on the CPU than on accelerators, so some operations compute in other dtypes.
BF16_BOUND = 2e-2
LEVERS: dict[str, dict[str, Any]] = {
    "none": {},
    "accumulation": {"accumulate_grad_batches": 2},
    "clipping": {"gradient_clip_val": 0.5},
    "full": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective"},
    "budget": {"activation_checkpointing": 0.5},
    "offload": {"offload": {"activations": "cpu"}},
    "disk": {"offload": {"activations": "disk"}},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "step in backward": {"step_in_backward": True},
    "chunked loss": {"chunked_loss": 8},
    "adapters": {"lora": {"rank": 4}},
    "zero3": {"strategy": "zero3"},
}


def missing_accelerator() -> str | None:
    """Return the reason why the tests of this file cannot run."""
    if not ACCELERATOR:
        return "ROOMIER_TEST_ACCELERATOR does not name an accelerator. Run `make gpu` on a machine with a GPU"
    try:
        is_host = resolve_device(ACCELERATOR).type == "cpu"
    except RoomierError as error:
        return str(error)
    return "the CPU is not an accelerator" if is_host else None


reason = missing_accelerator()
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))


class Peak(Callback):
    """Callback that records the peak of the allocated bytes from the third step on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_bytes = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2 and batch_idx % trainer.accumulate_grad_batches == 0:
            reset_peaks(self.device)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.num_bytes = peak_allocated_bytes(self.device)


@pytest.mark.parametrize("lever", LEVERS)
def test_a_technique_computes_the_numbers_of_the_cpu_with_the_forecast_memory(lever: str, tmp_path: Path) -> None:
    device = resolve_device(ACCELERATOR)
    has_statistics = capabilities_of(device).has_memory_statistics
    watch = [Peak(device)] if has_statistics else []
    gc.collect()  # tensors of earlier tests
    before_bytes = allocated_bytes(device) if has_statistics else 0
    losses, weights = [], []
    for accelerator in (ACCELERATOR, "cpu"):
        module = Language(WIDTH)
        shapes = copy.deepcopy(module).to("meta")
        callbacks = [] if accelerator == "cpu" else watch
        keywords = {**LEVERS[lever], "devices": 1, "enable_checkpointing": False}
        trainer = trainer_of(tmp_path, accelerator, callbacks, **keywords)
        trainer.fit(module, loader(NUM_STEPS * trainer.accumulate_grad_batches, batch_size=BATCH_SIZE))
        losses.append(torch.stack(module.losses).cpu())
        weights.append(weights_of(module))
        if accelerator != "cpu":
            plan = trainer.plan
    bound = BF16_BOUND if lever == "bf16-mixed" else BOUND
    assert float(((losses[0] - losses[1]).abs() / losses[1].abs()).max()) <= bound
    assert difference(*weights) <= bound
    if has_statistics:
        workload = Workload.of(shapes, [torch.empty(BATCH_SIZE, CONTEXT + 1, dtype=torch.int64)])
        forecast = confirm(workload, plan, this_machine(1, accelerator=ACCELERATOR))
        expected = forecast_of_allocator(forecast.tensor_bytes, forecast.fixed_bytes)["allocated"]
        assert watch[0].num_bytes - before_bytes == pytest.approx(expected, rel=0.05)
