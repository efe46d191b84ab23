"""Cases of a run on the simulated accelerator: memory that runs out, resumes, copies, and missing capabilities."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from roomier import Callback, Trainer
from roomier.callbacks import ModelCheckpoint
from roomier.planner.measured.out_of_memory import OutOfMemory
from tests.device.runs import Language, loader, trainer_of, weights_of
from tests.ranks.pool import RankFailed
from tests.simulator import simulated
from tests.simulator.workers import SimulatedRanks

DEVICE = simulated.DEVICE
SCHEDULES = ("LATE", "OTHERS_FIRST")

# Memory that runs out ------------------------------------------------------------------------------------------------

LARGE = {"width": 64}
LARGE_BATCH = 16


class Peaks(Callback):
    """Records the peak of the allocated bytes after each step."""

    def __init__(self) -> None:
        self.num_bytes: list[int] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.num_bytes.append(torch.accelerator.max_memory_allocated())


def peaks(folder: Path, keywords: dict[str, Any]) -> list[int]:
    watch = Peaks()
    trainer = trainer_of(folder, DEVICE, [watch], enable_checkpointing=False, **keywords)
    trainer.fit(Language(**LARGE), loader(batch_size=LARGE_BATCH))
    return watch.num_bytes


def run_out(folder: Path, keywords: dict[str, Any]) -> Any:
    trainer = trainer_of(folder, DEVICE, [ModelCheckpoint(every_n_train_steps=1)], **keywords)
    try:
        trainer.fit(Language(**LARGE), loader(batch_size=LARGE_BATCH))
    except OutOfMemory as error:
        import time
        return str(error), error.plan, error.__notes__ if hasattr(error,'__notes__') else None
    return None
