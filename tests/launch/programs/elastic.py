"""A run that kills one of its ranks: ``ROOT KILL_RANK KILL_STEP``. Each rank records the samples of each step."""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

import roomier
import roomier.callbacks

ROOT, KILL_RANK, KILL_STEP = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
NUM_SAMPLES = 48


class Numbered(Dataset):
    """Samples that contain their index."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.linspace(index / NUM_SAMPLES, 1.0, 4), index


class Model(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        values, indices = batch
        rank, step = self.trainer.global_rank, self.trainer.global_step
        is_first_start = not list(ROOT.glob("killed"))
        if is_first_start and rank == KILL_RANK and step == KILL_STEP:
            (ROOT / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        with (ROOT / f"samples-{rank}.jsonl").open("a") as file:
            file.write(json.dumps([self.trainer.current_epoch, step, indices.tolist()]) + "\n")
        return (self.net(values) - indices[:, None] / NUM_SAMPLES).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.05)

    def on_train_end(self):
        state = self.trainer.engine.weights()
        whole = {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in state.items()}
        if self.trainer.is_global_zero:
            torch.save({name: each.detach().clone() for name, each in whole.items()}, ROOT / "weights.pt")


def main() -> None:
    roomier.seed_everything(7)
    trainer = roomier.Trainer(
        strategy="zero2",
        accelerator="cpu",
        accumulate_grad_batches=2,
        max_epochs=2,
        logger=False,
        callbacks=[roomier.callbacks.ModelCheckpoint(every_n_train_steps=2, save_top_k=1)],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=ROOT / "runs",
    )
    trainer.fit(Model(), DataLoader(Numbered(), batch_size=2, shuffle=True))
    print("ranks", trainer.world_size, "step", trainer.global_step)


if __name__ == "__main__":
    main()
