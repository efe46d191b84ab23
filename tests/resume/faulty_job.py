"""A job for torchrun in which one rank is killed: ``faulty_job.py FOLDER STRATEGY STEPS RANK AFTER_S ASYNC``.

In the first attempt of the job, another process sends SIGKILL to rank RANK, AFTER_S seconds after the start of the fit.
Rank 0 writes the loss and the samples of each step to ``steps.jsonl``.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from roomier import Trainer
from tests.resume.reshard import Curve, train

STEP_S = 0.03


class Noted(Curve):
    """Callback that records each step, and slows down the steps so that a kill can occur during a step."""

    def __init__(self, path: Path, killed_rank: int, after_s: float) -> None:
        super().__init__()
        self.path, self.killed_rank, self.after_s = path, killed_rank, after_s

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if is_first and trainer.global_rank == self.killed_rank:
            subprocess.Popen(["sh", "-c", f"sleep {self.after_s}; kill -9 {os.getpid()}"])

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        time.sleep(STEP_S)
        if trainer.is_global_zero:
            with self.path.open("a") as file:
                file.write(json.dumps([trainer.global_step, self.losses[-1], self.ids[-1]]) + "\n")


def run(folder: Path, strategy: str, num_steps: int, killed_rank: int, after_s: float, kind: str) -> None:
    """Run one attempt of the job on each rank."""
    train(
        folder / "runs",
        strategy,
        int(os.environ["WORLD_SIZE"]),
        num_steps,
        curve=Noted(folder / "steps.jsonl", killed_rank, after_s),
        async_save=kind == "async",
        every_n_train_steps=2,
    )


if __name__ == "__main__":
    folder, strategy, num_steps, killed_rank, after_s, kind = sys.argv[1:]
    run(Path(folder), strategy, int(num_steps), int(killed_rank), float(after_s), kind)
