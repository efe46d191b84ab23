"""Train on ranks that are killed at random moments: ``program.py NOTES STRATEGY NUM_KILLS SEED NUM_RANKS``.

A process besides the ranks kills one of them at a random moment of a random step. Each rank writes the samples and the
losses of its steps to ``NOTES``, and the time of each completed step.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import roomier
from roomier.callbacks import ElasticRanks, ModelCheckpoint, PeerSnapshots
from tests.engines.training import GLOBAL_BATCH, Model, Numbered

STARTED_S = time.time()
NOTES, STRATEGY = Path(sys.argv[1]), sys.argv[2]
NUM_KILLS, SEED, NUM_RANKS = map(int, sys.argv[3:6])
STEP_S = 0.03


class Kill(roomier.Callback):
    """Let another process kill a rank in each of the first ``NUM_KILLS`` fits, and note the completed steps."""

    def __init__(self) -> None:
        self.draw = random.Random(SEED)
        self.num_fits = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.num_fits += 1
        self.begun = self.ended = trainer.global_step
        size = trainer.world.size
        self.victim, self.after = self.draw.randrange(1, max(2, size)), self.draw.randrange(1, 4)
        self.delay_s = self.draw.random() * 1.5 * STEP_S

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if self.num_fits <= NUM_KILLS and trainer.global_rank == self.victim:
            if trainer.global_step == self.begun + self.after:
                code = f"import os, time; time.sleep({self.delay_s}); os.kill({os.getpid()}, 9)"
                subprocess.Popen([sys.executable, "-S", "-c", f"print(flush=True); {code}"], stdout=subprocess.PIPE).stdout.read(1)
        time.sleep(STEP_S)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step != self.ended:
            self.ended = trainer.global_step
            with (NOTES / f"ended-{os.getpid()}.txt").open("a") as file:
                file.write(f"{trainer.global_step} {trainer.world.size} {time.time()}\n")


def main() -> None:
    roomier.seed_everything(0)
    callbacks = [Kill(), ElasticRanks(), *([] if STRATEGY == "ddp" else [PeerSnapshots(1)])]
    trainer = roomier.Trainer(
        max_epochs=5,
        devices=NUM_RANKS,
        accelerator="cpu",
        strategy=STRATEGY,
        logger=False,
        callbacks=callbacks,
        enable_checkpointing=STRATEGY != "ddp",
        enable_progress_bar=False,
        enable_plan_table=False,
        enable_model_summary=False,
        default_root_dir=NOTES / "runs",
    )
    data = torch.utils.data.DataLoader(Numbered(), GLOBAL_BATCH // NUM_RANKS, shuffle=True)
    trainer.fit(Model(NOTES), data)
    named = trainer.engine.weights()
    weights = {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in named.items()}
    if trainer.is_global_zero:
        torch.save([trainer.global_step, weights], NOTES / "end.pt")


if __name__ == "__main__":
    main()
