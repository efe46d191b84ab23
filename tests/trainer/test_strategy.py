"""``trainer.strategy``: the ranks and the device, with Lightning's names."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roomier
from roomier.core.errors import RoomierError


def asked_of_the_strategy() -> list[Any]:
    trainer = roomier.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[CallsStrategy()],
    )
    trainer.fit(Plain(), [torch.ones(2, 1)] * 2)
    return CallsStrategy.answers


class Plain(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class CallsStrategy(roomier.Callback):
    answers: list[Any]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        strategy, rank = trainer.strategy, trainer.global_rank
        strategy.barrier("here")
        own = torch.tensor([rank, 10.0 * rank])
        CallsStrategy.answers = [
            (strategy.world_size, strategy.global_rank == rank, strategy.is_global_zero == (rank == 0)),
            (strategy.broadcast(f"of {rank}"), strategy.broadcast(f"of {rank}", src=1)),
            [strategy.reduce(own, reduce_op=how).tolist() for how in ("mean", "sum", "max", "min")],
            (strategy.reduce_boolean_decision(rank == 0), strategy.reduce_boolean_decision(rank == 0, all=False)),
            strategy.all_gather({"x": own})["x"].tolist(),
            (trainer.num_devices, trainer.device_ids, trainer.num_nodes),
        ]


def test_the_strategy_communicates_between_ranks(on_ranks: Any) -> None:
    answers = on_ranks(2, asked_of_the_strategy)
    assert answers[0] == answers[1]
    assert answers[0] == [
        (2, True, True),
        ("of 0", "of 1"),
        [[0.5, 5.0], [1.0, 10.0], [1.0, 10.0], [0.0, 0.0]],
        (False, True),
        [[0.0, 0.0], [1.0, 10.0]],
        (2, [0, 1], 1),
    ]


def test_remove_checkpoint_removes_only_checkpoints(make_trainer: Any, tmp_path: Path) -> None:
    trainer = make_trainer(max_steps=1)
    trainer.fit(Plain(), [torch.ones(2, 1)] * 2)
    trainer.save_checkpoint(tmp_path / "saved")
    (tmp_path / "kept").mkdir()
    trainer.strategy.remove_checkpoint(tmp_path / "saved")
    trainer.strategy.remove_checkpoint(tmp_path / "never there")
    with pytest.raises(RoomierError, match="is not a checkpoint"):
        trainer.strategy.remove_checkpoint(tmp_path / "kept")
    assert not (tmp_path / "saved").exists()
    assert (tmp_path / "kept").exists()
