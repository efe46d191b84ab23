"""A run under ``@hydra.main``, which changes to an output folder that is named after the time of day."""

import os
import sys
import time
from pathlib import Path

import hydra
import torch


@hydra.main(version_base=None, config_path="hydra_conf", config_name="config")
def main(config) -> None:
    import roomier  # imported after Hydra changed the folder

    class Model(roomier.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(config.width, 1)

        def training_step(self, batch, batch_idx):
            return self.net(batch).pow(2).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    time.sleep(1.1 if os.environ.get("RANK") is None else 0.0)  # so that the other ranks start in another second
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
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(8, config.width), batch_size=2))
    Path(f"rank-{trainer.global_rank}.txt").touch()
    sys.stdout.write(f"rank {trainer.global_rank} width {config.width} in {os.getcwd()}\n")


if __name__ == "__main__":
    main()
