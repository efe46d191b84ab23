"""A script that changes the folder, and then imports a module and reads data relative to the new folder."""

import os
import sys
from pathlib import Path

import torch

import roomier

os.chdir("work")  # fails unless the script was started in the folder that contains "work"
sys.path.insert(0, "modules")

from numbers_of_work import SCALE  # noqa: E402 - in modules


class Model(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return SCALE * self.net(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


def main() -> None:
    values = [float(word) for word in Path("data.txt").read_text().split()]
    trainer = roomier.Trainer(
        strategy="ddp",
        devices=2,
        accelerator="cpu",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.tensor(values).view(-1, 2), batch_size=1))
    sys.stdout.write(f"rank {trainer.global_rank} in {os.getcwd()} of {sys.argv[1:]}\n")


if __name__ == "__main__":
    main()
