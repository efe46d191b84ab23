"""Train on ranks that are killed at random moments: ``program.py NOTES STRATEGY NUM_KILLS SEED WHAT``.

In each of the first ``NUM_KILLS`` fits, another process kills a rank at a random moment of a random step. Each rank
writes the samples and the losses of its steps, and the time of each completed step, to ``NOTES``. WHAT changes the last
of these fits: ``zero`` kills rank 0, ``last`` kills the last rank, ``raises`` raises an error instead of the kill, and
``again`` kills a further rank while the fit is opened again. ``refit`` calls fit a second time. With ``NODE_RANK``, the
ranks are divided among two nodes, and ``stop0`` and ``stop1`` stop all ranks of a node instead of the kill.
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
from roomier.callbacks import ElasticRanks, PeerSnapshots
from tests.engines.training import GLOBAL_BATCH, Model, Numbered

NOTES, STRATEGY = Path(sys.argv[1]), sys.argv[2]
NUM_KILLS, SEED, WHAT = int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
NUM_RANKS, STEP_S = 4, 0.03
NUM_NODES = 2 if "NODE_RANK" in os.environ else 1


class Failing(roomier.Callback):
    """Callback that notes each completed step, and lets ranks fail."""

    def __init__(self) -> None:
        self.draw = random.Random(SEED)
        self.num_fits = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if WHAT == "again" and self.num_fits == NUM_KILLS and trainer.global_rank == 1:
            os.kill(os.getpid(), 9)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.num_fits += 1
        self.ended, size = trainer.global_step, trainer.world.size
        has_state = STRATEGY == "ddp" or self.num_fits > 1  # otherwise, a first snapshot must exist
        self.fails_in = trainer.global_step + self.draw.randrange(0 if has_state else 2, 7)
        named = {"zero": 0, "last": size - 1} if self.num_fits == NUM_KILLS else {}
        drawn = 0 if size == 1 else self.draw.randrange(1, size)
        self.failing, self.delay_s = named.get(WHAT, drawn), self.draw.random() * 4 * STEP_S

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        is_failing = self.num_fits <= NUM_KILLS and trainer.global_rank == self.failing
        if is_failing and trainer.global_step == self.fails_in:
            if WHAT == "raises" and self.num_fits == NUM_KILLS:
                raise ValueError("a mistake of the user")
            note = f"date +%s.%N > {NOTES}/killed-{self.num_fits}; kill -9 {os.getpid()}"
            subprocess.Popen(["sh", "-c", f"sleep {self.delay_s}; {note}"])
            self.fails_in = -1
        if f"stop{trainer.node_rank}" == WHAT and trainer.world.size == NUM_RANKS and trainer.global_step == 5:
            os.kill(os.getpid(), signal.SIGSTOP)  # its connections stay open, as after a power failure
        time.sleep(STEP_S)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != self.ended:
            self.ended = trainer.global_step
            with (NOTES / f"ended-{os.getpid()}.txt").open("a") as file:
                file.write(f"{trainer.global_step} {trainer.world.size} {time.time()}\n")


class Validated(Model):
    """Model with a validation, during which a rank can be killed."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(STEP_S)
        self.log("val_loss", self.net(batch[0]).mean())


def main() -> None:
    roomier.seed_everything(0)
    places = {"place": NOTES / "memory"}
    trainer = roomier.Trainer(
        max_epochs=5,
        devices=NUM_RANKS // NUM_NODES,
        num_nodes=NUM_NODES,
        accelerator="cpu",
        strategy=STRATEGY,
        logger=False,
        callbacks=[Failing(), ElasticRanks(**places), *([] if STRATEGY == "ddp" else [PeerSnapshots(1, **places)])],
        enable_checkpointing=STRATEGY != "ddp",
        enable_progress_bar=False,
        enable_plan_table=False,
        enable_model_summary=False,
        **({"hang_timeout": "00:00:00:04"} if WHAT.startswith("stop") else {}),
        default_root_dir=NOTES / "runs",
    )
    data = torch.utils.data.DataLoader(Numbered(), GLOBAL_BATCH // NUM_RANKS, shuffle=True)
    trainer.fit(Validated(NOTES), data, torch.utils.data.DataLoader(Numbered(), GLOBAL_BATCH))
    if WHAT == "refit":
        trainer.fit(Validated(NOTES), data)
    named = trainer.engine.weights()
    weights = {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in named.items()}
    if trainer.is_global_zero:
        torch.save([trainer.global_step, weights], NOTES / "end.pt")


if __name__ == "__main__":
    main()
