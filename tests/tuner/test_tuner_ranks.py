"""With every strategy, all ranks find the same learning rate. On several ranks, batch size searches are rejected."""

from pathlib import Path

import pytest
import torch

import roomier
from roomier.core.errors import RoomierError
from roomier.tuner import lr_find, scale_batch_size
from tests.covering import few
from tests.tuner.conftest import Net, shuffled


def find_and_fit(folder: Path, strategy: str) -> tuple[float, tuple[float, ...], float, str]:
    keywords = {"accelerator": "cpu", "devices": 2, "strategy": strategy, "logger": False}
    keywords |= {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    roomier.seed_everything(4)
    net = Net()
    trainer = roomier.Trainer(max_steps=3, default_root_dir=folder, **keywords)
    curve = lr_find(trainer, net, shuffled(), min_lr=1e-4, num_training=40, update_attr=True)
    trainer.fit(net, shuffled())
    refusal = ""
    try:
        scale_batch_size(trainer, Net(), shuffled(), memory_budget="1GiB")
    except RoomierError as error:
        refusal = str(error)
    loss = float(trainer.callback_metrics["train_loss"])
    try:
        lr_find(trainer, net, shuffled(), num_training=2)
    except RoomierError as error:
        refusal += str(error)
    return net.lr, curve.raw_losses, loss, refusal


@pytest.mark.parametrize("strategy", few([pytest.param("ddp", marks=pytest.mark.slow), "zero3"]))
def test_all_ranks_find_the_same_rate_and_train(on_ranks, tmp_path: Path, strategy: str) -> None:
    one, other = on_ranks(2, find_and_fit, tmp_path, strategy)
    assert one[:2] == other[:2]
    assert one[0] > 1e-3
    assert all(map(torch.isfinite, torch.tensor([one[2], other[2]])))
    assert "2 ranks" in one[3]
    assert "strategy='auto'" in one[3]
    if strategy == "zero3":
        assert "sharded by an earlier fit" in one[3]
