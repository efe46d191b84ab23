"""Runs whose settings come from another library train like runs with roomier's arguments."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from torch import Tensor, nn

import roomier
from tests.ranks.pool import RankPool

STEPS = 6
CONFIG = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8},
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": STEPS, "warmup_num_steps": 3, "warmup_max_lr": 0.01},
    },
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True},
}
ARGUMENTS = {
    "strategy": "zero2",
    "accumulate_grad_batches": 2,
    "optimizer": {"name": "adamw", "lr": 0.01, "betas": [0.9, 0.95], "weight_decay": 0.1},
    "lr_schedule": {"name": "linear", "warmup_steps": 3, "log_warmup": True, "decay_steps": STEPS},
    "gradient_clip_val": 0.5,
    "precision": "bf16-mixed",
}
UNCORRECTED = {"lr": 0.01, "bias_correction": False}
SGD = {"optimizer": {"name": "sgd", "lr": 0.1}}
PAIRS: list[tuple[Any, dict[str, Any]]] = [
    ({"strategy": CONFIG}, ARGUMENTS),
    ({**SGD, "strategy": partial(FSDPStrategy, sharding_strategy="SHARD_GRAD_OP")}, {**SGD, "strategy": "zero2"}),
    ({**SGD, "strategy": partial(DDPStrategy, static_graph=True)}, {**SGD, "strategy": "ddp"}),
    (SGD, {**SGD, "strategy": "ddp"}),
    (
        {"strategy": {"optimizer": {"type": "Adam", "params": UNCORRECTED}, "zero_optimization": {"stage": 2}}},
        {"strategy": "zero2+disk", "optimizer": {"name": "adamw", "weight_decay": 0.0, **UNCORRECTED}},
    ),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layers(x).square().mean()
        return loss


def weights(keywords: dict[str, Any]) -> dict[str, Tensor]:
    """Return the weights after a fit with ``keywords``."""
    roomier.seed_everything(0)
    module, generator = Net(), torch.Generator().manual_seed(1)
    batches = [torch.randn(4, 6, generator=generator) for _ in range(4 * STEPS)]
    strategy = keywords.get("strategy")
    made = {"strategy": strategy()} if callable(strategy) else {}
    trainer = roomier.Trainer(
        **{**keywords, **made},
        accelerator="cpu",
        devices=2,
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, batches)
    return {name: whole(each.detach()).clone() for name, each in module.state_dict().items()}


def whole(tensor: Any) -> Tensor:
    """Return all elements of a tensor, which may be sharded."""
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def all_weights(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[list[dict[str, Tensor]]]:
    return [[weights(keywords) for keywords in pair] for pair in pairs]


def test_runs_have_the_same_bits(on_ranks: RankPool) -> None:
    for of_rank in on_ranks(2, all_weights, PAIRS):
        for index, (migrated, own) in enumerate(of_rank):
            assert migrated.keys() == own.keys()
            assert all(torch.equal(migrated[name], own[name]) for name in own), index
