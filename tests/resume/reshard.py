"""A run in two parts, which can have different strategies and different numbers of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from roomier import Callback, Module, Trainer
from roomier.callbacks import ModelCheckpoint
from roomier.core.device.rng import seed_everything

GLOBAL_BATCH = 8
NUM_SAMPLES = 5 * GLOBAL_BATCH + 3  # the last samples of an epoch do not fill a batch
STOPS_AT, NUM_STEPS = 3, 7  # the second part passes the end of an epoch

LAYOUTS: list[tuple[str, int]] = [
    ("single", 1),
    *((strategy, num_ranks) for strategy in ("ddp", "zero1", "zero2", "zero3") for num_ranks in (2, 4)),
    ("hsdp", 4),
]


class Samples(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {
            "id": torch.tensor(index),
            "tokens": torch.randint(11, (5,), generator=generator),
            "label": torch.randint(3, (), generator=generator),
        }


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(width), nn.Linear(width, 13), nn.Linear(13, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(F.gelu(self.inner(self.norm(x))))


class Classifier(Module):
    """Module with sizes that are not divisible by the number of ranks, a tied weight, a frozen weight and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(Block(7) for _ in range(3))
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Linear(11, 3)
        self.frozen.requires_grad_(False)
        self.register_buffer("shift", torch.arange(7.0) / 10)
        self.ids: list[list[int]] = []

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).mean(1) + self.shift
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.frozen(self.head(x) * self.scale)
        return logits

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.ids.append(batch["id"].tolist())
        loss = F.cross_entropy(self(batch["tokens"]), batch["label"])
        self.log("train_loss", loss, on_step=False, on_epoch=True, batch_size=len(batch["id"]))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch["tokens"]), batch["label"]), batch_size=len(batch["id"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=3e-3, eps=1e-3)


class Curve(Callback):
    """Callback that records the loss of each step over all ranks, and the ids of its samples."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.ids: list[list[int]] = []
        self.train_loss: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert trainer.run is not None
        assert trainer.run.now.last_loss is not None
        self.losses.append(sum(trainer.ranks.gather(float(trainer.run.now.last_loss))))
        self.ids.append(sorted(each for ids in trainer.ranks.gather(pl_module.ids[-1]) for each in ids))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.train_loss.append(float(trainer.callback_metrics["train_loss"]))


def train(
    folder: Path,
    strategy: str,
    num_ranks: int,
    max_steps: int,
    ckpt_path: Path | str | None = None,
    *,
    curve: Curve | None = None,
    async_save: bool = False,
    every_n_train_steps: int = STOPS_AT,
    accumulate: int = 1,
) -> dict[str, Any]:
    """Train on each rank. Return the records of rank 0 and the paths of the checkpoints."""
    seed_everything(0)
    module = Classifier()
    curve = curve or Curve()
    saver = ModelCheckpoint(every_n_train_steps=every_n_train_steps, save_top_k=-1, async_save=async_save)
    trainer = Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=num_ranks,
        strategy={"name": "hsdp", "shard_size": 2} if strategy == "hsdp" else strategy,
        max_steps=max_steps,
        accumulate_grad_batches=accumulate,
        callbacks=[curve, saver],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=0.5,
    )
    loader = DataLoader(Samples(), batch_size=GLOBAL_BATCH // num_ranks // accumulate, shuffle=True, drop_last=True)
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    return {
        "losses": curve.losses,
        "ids": curve.ids,
        "train_loss": curve.train_loss,
        "best": saver.best_model_path,
        "step": trainer.global_step,
    }
