"""A small run in which a rank hangs: ``HOW RANK [Trainer keywords as JSON]``.

For each process, the folder ``NOTES`` receives an empty file that is named after the process id. When the rank hangs,
the folder receives another file.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch

import roomier
from roomier.launch import heartbeat

HOW, RANK = sys.argv[1], int(sys.argv[2])
NOTES = Path(os.environ["NOTES"])
KEYWORDS = json.loads(sys.argv[3])
AT_BATCH = 3


def wait_for_heartbeat(step: int) -> None:
    """Wait until this rank has published that it reached ``step``."""
    thread = heartbeat._heartbeat
    wait_until(lambda: thread._record.position.step >= step)
    beat = thread._record.beat
    wait_until(lambda: thread._record.beat >= beat + 2)


def wait_until(condition) -> None:
    while not condition():
        time.sleep(0.02)


def hang_here() -> None:
    (NOTES / "gone-wrong").touch()
    if HOW == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if HOW == "deadlock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    thread = heartbeat._heartbeat
    if HOW == "slow step":
        wait_until(lambda: thread._last_number > 0)  # after the report
    if HOW == "slow hook":  # on rank 0, which prints the note
        wait_until(lambda: any(phase == "on_train_batch_end" for _, phase in thread._noted))


class Model(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        if batch_idx == AT_BATCH:
            wait_for_heartbeat(batch_idx)
            if os.environ["RANK"] == str(RANK) and HOW != "slow hook":
                hang_here()
        if batch_idx == AT_BATCH + 1 and HOW == "slow step":  # until the judge finds that the rank makes progress
            wait_until(lambda: heartbeat._heartbeat._verdict is None)
        return self.net(batch).pow(2).mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == AT_BATCH and os.environ["RANK"] == str(RANK) and HOW == "slow hook":
            hang_here()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


def main() -> None:
    (NOTES / f"{os.getpid()}.pid").touch()
    trainer = roomier.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_steps=6,
        **KEYWORDS,
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(32, 8), batch_size=2))
    sys.stdout.write(f"steps {trainer.global_step}\n")


if __name__ == "__main__":
    main()
