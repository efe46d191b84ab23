"""A shuffled DataLoader uses the same order as torch in one process, and this order on several ranks as well."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import roomier
from tests.covering import few
from tests.lightning.both import make_trainer, quiet_lightning
from tests.lightning.modules import pl

NUM_SAMPLES, GLOBAL_BATCH = 22, 4


class Reads(pl.LightningModule):
    """Module that records the samples of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.read: dict[int, list[int]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.read.setdefault(self.current_epoch, []).extend(batch.tolist())
        return self.net(batch.float().reshape(-1, 1)).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("draw", torch.rand(()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def read(kind: Any, folder: Path, size: int, *, saves: bool = False, validates: bool = False, **options: Any) -> Any:
    """Return the samples that this process read, by epoch. If ``saves`` is True, save a final checkpoint in
    ``folder``."""
    torch.manual_seed(3)
    module = Reads()
    loader = DataLoader(range(NUM_SAMPLES), GLOBAL_BATCH // size, shuffle=True)  # type: ignore[arg-type]
    val = DataLoader(range(6), 2) if validates else None  # type: ignore[arg-type]
    ckpt_path = options.pop("ckpt_path", None)
    options |= {"strategy": "ddp", "devices": size} if size > 1 else {}
    with quiet_lightning():
        trainer = make_trainer(kind, folder, **options)
        trainer.fit(module, loader, val, ckpt_path=ckpt_path)
        if saves:
            trainer.save_checkpoint(folder / "saved")
    return module.read


def joined(of_ranks: list[dict[int, list[int]]]) -> dict[int, list[int]]:
    """Return the batches of all ranks in the order in which one process would read the samples."""
    return {
        epoch: [sample for pair in zip(*(each[epoch] for each in of_ranks), strict=True) for sample in pair]
        for epoch in of_ranks[0]
    }


@pytest.mark.parametrize("validates", few([False, True]))
def test_ranks_read_the_order_of_one_process(on_ranks, tmp_path, validates):
    options: dict[str, Any] = {"max_epochs": 2, "validates": validates, "num_sanity_val_steps": 0}
    expected = read(pl.Trainer, tmp_path, 1, **options)
    assert sorted(expected[1]) == list(range(NUM_SAMPLES))
    assert expected[0] != expected[1]
    assert read(roomier.Trainer, tmp_path, 1, **options) == expected
    of_ranks = joined(on_ranks(2, read, roomier.Trainer, tmp_path, 2, **options))
    assert of_ranks[0] == expected[0]
    assert sorted(of_ranks[1]) == list(range(NUM_SAMPLES))
    # on several ranks, a validation consumes other random numbers than in one process
    assert validates or of_ranks == expected


def test_epoch_resumes_on_other_ranks(on_ranks, tmp_path):
    expected = read(roomier.Trainer, tmp_path, 1, max_epochs=2)
    done = read(roomier.Trainer, tmp_path, 1, saves=True, max_steps=2)
    resumed = on_ranks(2, read, roomier.Trainer, tmp_path, 2, ckpt_path=tmp_path / "saved", max_epochs=2)
    assert done[0] + joined(resumed)[0] == expected[0]
    assert joined(resumed)[1] == expected[1]
