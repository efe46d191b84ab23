"""Train a byte-level GPT on Python's standard library, on all available devices.

On one machine, roomier starts the ranks::

    python examples/train_gpt.py --strategy zero2 --devices 2

On two nodes with torchrun, run the same command on each node. The endpoint is a free port of the first node::

    torchrun --nnodes=2 --nproc-per-node=4 --max-restarts=3 --rdzv-backend=c10d --rdzv-id=gpt \\
        --rdzv-endpoint=node1:29400 examples/train_gpt.py --strategy zero3

With SLURM, run ``sbatch examples/slurm_train.sh``. The script is the same in all cases. If torchrun or SLURM restarts
a job, the job resumes automatically from its last checkpoint.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

import roomier
from roomier.callbacks import ModelCheckpoint
from roomier.models.gpt import GPT, SIZES, GPTConfig

NUM_BYTES = 2_000_000


class Text(Dataset):
    """Dataset of windows of ``context`` bytes. The target of each position is the next byte."""

    def __init__(self, text: bytes, context: int) -> None:
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self.context
        window = self.bytes[start : start + self.context + 1].long()
        return window[:-1], window[1:]


class LanguageModel(roomier.Module):
    def __init__(self, size: str, context: int) -> None:
        super().__init__()
        num_layers, num_heads, width = SIZES[size]
        self.gpt = GPT(GPTConfig(256, context, num_layers, num_heads, width, dropout=0.0))

    def training_step(self, batch, batch_idx):
        _, loss = self.gpt(*batch)
        return loss

    def validation_step(self, batch, batch_idx):
        _, loss = self.gpt(*batch)
        self.log("val_loss", loss, sync_dist=True, prog_bar=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a GPT on bytes.")
    parser.add_argument("--strategy", default="zero2", help="single, ddp, zero1, zero2, zero3 or hsdp")
    parser.add_argument("--devices", default="auto", help="number of processes on each node")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--size", default="gpt-micro", choices=SIZES)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch_size", type=int, default=8, help="number of windows per micro-batch on each rank")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("runs/gpt"))
    given = parser.parse_args()

    roomier.seed_everything(1)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:NUM_BYTES]
    split = len(text) * 9 // 10
    trainer = roomier.Trainer(
        strategy=given.strategy,
        devices=given.devices,
        precision=given.precision,
        accumulate_grad_batches=given.accumulate,
        optimizer="adamw",
        learning_rate=1e-3,
        gradient_clip_val=1.0,
        max_steps=given.steps,
        limit_val_batches=10,
        callbacks=[ModelCheckpoint(every_n_train_steps=50)],
        default_root_dir=given.out,
    )
    trainer.fit(
        LanguageModel(given.size, given.context),
        DataLoader(Text(text[:split], given.context), given.batch_size, shuffle=True),
        DataLoader(Text(text[split:], given.context), given.batch_size),
    )
    [metrics] = trainer.validate(dataloaders=DataLoader(Text(text[split:], given.context), given.batch_size))
    if trainer.is_global_zero:
        print(f"{trainer.world_size} ranks, step {trainer.global_step}: val_loss {metrics['val_loss']:.3f}")


if __name__ == "__main__":
    main()
