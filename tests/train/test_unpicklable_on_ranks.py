"""Training on several ranks with modules, data and callbacks that cannot be pickled, because none of them is sent."""

import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d
from torch.utils.data import DataLoader, Dataset

import roomier
from roomier.core import wire
from tests.ranks.pool import RankPool

pytestmark = pytest.mark.more


def make_unpicklable() -> dict[str, Any]:
    def numbers() -> Iterator[int]:
        yield 1

    return {
        "lock": threading.Lock(),
        "function": lambda x: x,
        "generator": numbers(),
        "memory view": memoryview(b""),
        "local class": type("Local", (), {})(),
    }


class Samples(Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.held = make_unpicklable()

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), index / 16)


class Module(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        self.held = make_unpicklable()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        self.net[1].forward = lambda x: torch.tanh(x)  # type: ignore[method-assign]
        self.activation = self.held["function"]

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.activation(self.net(batch)).pow(2).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch).pow(2).mean())

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> dict[str, Any]:
        return {"value": self.net(batch), "batch": batch_idx}

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9)}


class Holder(roomier.Callback):
    def __init__(self) -> None:
        self.held = make_unpicklable()


def fit_and_predict(root: Path, strategy: str) -> tuple[float, int, list[str]]:
    vars(distributed_c10d)["_tensor_to_object"] = vars(wire)["pickle"] = None  # unpickling a message raises an error
    module, data = Module(), DataLoader(Samples(), batch_size=2)
    trainer = roomier.Trainer(
        strategy=strategy,
        devices=2,
        accelerator="cpu",
        max_epochs=2,
        callbacks=[Holder(), roomier.callbacks.ModelCheckpoint(monitor="val_loss")],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
    )
    trainer.fit(module, data, data)
    predicted = trainer.predict(module, data)
    best = Path(trainer.checkpoint_callback.best_model_path)
    trainer.fit(Module(), data, data, ckpt_path=best)
    return float(trainer.callback_metrics["val_loss"]), len(predicted), sorted(each.name for each in best.iterdir())


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "zero3"])
def test_unpicklable_objects_on_several_ranks(on_ranks: RankPool, tmp_path: Path, strategy: str) -> None:
    for each in make_unpicklable().values():
        with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
            pickle.dumps(each)
    zero, one = on_ranks(2, fit_and_predict, tmp_path, strategy)
    assert zero == one
    assert 0 < zero[0] < 1
    assert zero[1] == 8
    assert len(zero[2]) > 1
