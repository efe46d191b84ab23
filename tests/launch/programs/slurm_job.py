"""Training in a SLURM job: ``ROOT``. In step 5 of the first start, each rank waits for a signal."""

import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

import roomier

NUM_STEPS = 12


class Model(roomier.Module):
    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        is_first_start = os.environ.get("SLURM_RESTART_COUNT") is None
        if is_first_start and "SLURM_JOB_ID" in os.environ and self.trainer.global_step == 5:
            (self.root / f"waits-{self.trainer.global_rank}").touch()
            while self.trainer.run.stop.noted is None:
                time.sleep(0.05)
        return (self.net(batch) - 1).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.05)


def train(root: Path) -> None:
    roomier.seed_everything(3)
    trainer = roomier.Trainer(
        strategy="ddp",
        accelerator="cpu",
        max_steps=NUM_STEPS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root / "runs",
    )
    model = Model(root)
    trainer.fit(model, DataLoader(torch.linspace(0.0, 1.0, 4 * 96).reshape(96, 4), batch_size=4, shuffle=True))
    if trainer.is_global_zero:
        torch.save(model.state_dict(), root / "weights.pt")


if __name__ == "__main__":
    train(Path(sys.argv[1]))
