"""A run of a LightningModule on two ranks equals a run on one rank with the same global batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import roomier
from roomier.checkpoint import load_module
from tests.covering import few
from tests.lightning.both import make_trainer, quiet_lightning
from tests.lightning.modules import pl

GLOBAL_BATCH = 8


class Automatic(pl.LightningModule):
    """Two blocks and clipping. Module that logs per step and per epoch, uses collectives, and stores state in
    checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.head = nn.Linear(4, 1)
        self.gathered: list[Any] = []

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)

    def training_step(self, batch, batch_idx):
        loss = (self(batch) - batch.sum(1, keepdim=True)).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_train_batch_start(self, batch, batch_idx):
        self.gathered.append(self.all_gather({"rank": self.global_rank, "mean": batch.mean()}))

    def validation_step(self, batch, batch_idx):
        self.log("val", self(batch).square().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.8), "interval": "step"}]

    def on_save_checkpoint(self, checkpoint):
        checkpoint["names"] = sorted(checkpoint["state_dict"])

    def on_load_checkpoint(self, checkpoint):
        assert checkpoint["names"] == sorted(checkpoint["state_dict"])


class Manual(Automatic):
    """Two optimizers that alternate."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        of_blocks, of_head = self.optimizers()
        for optimizer in (of_blocks, of_head):
            with self.toggled_optimizer(optimizer):
                loss = (self(batch) - batch.sum(1, keepdim=True)).square().mean()
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, 0.5, "norm")
                optimizer.step()
        for scheduler in self.lr_schedulers():
            scheduler.step()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)

    def configure_optimizers(self):
        of_blocks = torch.optim.Adam(self.blocks.parameters(), lr=0.02)
        of_head = torch.optim.SGD(self.head.parameters(), lr=0.05, momentum=0.9)
        return [of_blocks, of_head], [torch.optim.lr_scheduler.StepLR(each, 2, 0.8) for each in (of_blocks, of_head)]


def samples() -> torch.Tensor:
    return torch.randn(32, 4, generator=torch.Generator().manual_seed(1))


def train(kind: Any, folder: Path, strategy: str, size: int, ckpt_path: Any = None, **keywords: Any) -> dict[str, Any]:
    """Train on 32 samples per epoch. Return the records of each rank, and save a final checkpoint in ``folder``."""
    torch.manual_seed(0)
    module = kind()
    data = list(samples())
    losses: list[float] = []

    class Notes(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            losses.append(float(trainer.callback_metrics["loss_epoch"]))

    with quiet_lightning():
        trainer = make_trainer(
            roomier.Trainer,
            folder,
            **{"max_epochs": 3, "strategy": strategy, "devices": size, "callbacks": [Notes()], **keywords},
        )
        train_data, val_data = DataLoader(data, batch_size=GLOBAL_BATCH // size), DataLoader(data[:8], batch_size=4)
        trainer.fit(module, train_data, val_data, ckpt_path=ckpt_path)
        trainer.save_checkpoint(folder / "end")
        figures = trainer.validate(module, val_data, verbose=False)[0]
    gathered = {name: value.tolist() for name, value in module.gathered[0].items()}
    return {"losses": losses, "val": figures["val"], "gathered": gathered, "steps": trainer.global_step}


ALONE: dict[Any, dict[str, Any]] = {}


def alone(kind: Any, folder: Path, **keywords: Any) -> dict[str, Any]:
    key = (kind, *keywords.items())
    if key not in ALONE:
        ALONE[key] = train(kind, folder / "alone", "single", 1, **keywords)
    return ALONE[key]


def check_alike(of_ranks: list[dict[str, Any]], expected: dict[str, Any], rel: float) -> None:
    for rank, found in enumerate(of_ranks):
        assert found["losses"] == pytest.approx(expected["losses"], rel=rel)
        assert found["val"] == pytest.approx(expected["val"], rel=rel)
        assert found["steps"] == expected["steps"]
        assert found["gathered"]["rank"] == [0, 1]
        assert found["gathered"]["mean"] == of_ranks[1 - rank]["gathered"]["mean"]


SLOW = pytest.mark.slow
PAIRS = [
    (Manual, "zero3"),
    (Automatic, "ddp"),
    pytest.param(Automatic, "zero2", marks=SLOW),
    pytest.param(Automatic, "zero3", marks=SLOW),
    pytest.param(Manual, "ddp", marks=SLOW),
    pytest.param(Manual, "zero2", marks=SLOW),
]


@pytest.mark.parametrize(("kind", "strategy"), few(PAIRS))
def test_losses_equal_one_process(on_ranks, tmp_path, kind, strategy):
    clip = {"gradient_clip_val": 0.5} if kind is Automatic else {}
    expected = alone(kind, tmp_path, **clip)
    assert expected["losses"][-1] < expected["losses"][0]
    check_alike(on_ranks(2, train, kind, tmp_path, strategy, 2, **clip), expected, 1e-5)
    # The checkpoint contains the full model.
    whole = load_module(kind, tmp_path / "end")
    found = torch.stack([whole(each).square().mean() for each in samples()[:8].split(4)]).mean()
    assert float(found.detach()) == pytest.approx(expected["val"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_losses_with_bf16_mixed(on_ranks, tmp_path, strategy):
    expected = alone(Automatic, tmp_path, precision="bf16-mixed")
    check_alike(on_ranks(2, train, Automatic, tmp_path, strategy, 2, precision="bf16-mixed"), expected, 2e-2)


@pytest.mark.parametrize("kind", [pytest.param(Automatic, marks=SLOW), Manual])
def test_run_of_one_process_resumes_sharded(on_ranks, tmp_path, kind):
    """One epoch on one rank, followed by two epochs on two ranks with zero3, has the same losses as three epochs on one
    rank."""
    expected = alone(kind, tmp_path)
    train(kind, tmp_path / "first", "single", 1, max_epochs=1)
    found = on_ranks(2, train, kind, tmp_path / "second", "zero3", 2, tmp_path / "first" / "end")
    for each in found:
        assert each["losses"] == pytest.approx(expected["losses"][1:], rel=1e-5)
        assert each["val"] == pytest.approx(expected["val"], rel=1e-5)


class SendsBack(pl.LightningModule):
    """Module whose loss depends on values of the other rank."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1, bias=False)

    def training_step(self, batch, batch_idx):
        own = self.net(batch).mean()
        return self.all_gather(own, sync_grads=True).prod()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def gathered_gradient(folder: Path) -> torch.Tensor:
    torch.manual_seed(0)
    module = SendsBack()
    before = module.net.weight.detach().clone()
    data = list(torch.randn(4, 4, generator=torch.Generator().manual_seed(1)))
    trainer = make_trainer(roomier.Trainer, folder, max_steps=1, strategy="ddp", devices=2)
    trainer.fit(module, DataLoader(data, batch_size=2))
    return before - module.net.weight.detach()


@pytest.mark.more
def test_gradients_propagate_through_all_gather(on_ranks, tmp_path):
    """Return the mean over ranks of the gradient of a product of two values, each of which depends on the batch of one
    rank."""
    torch.manual_seed(0)
    weight = nn.Linear(4, 1, bias=False).weight
    data = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    (data[::2] @ weight.T).mean().mul((data[1::2] @ weight.T).mean()).backward()
    # Each rank receives the gradients of both losses for its value, and the result is their mean.
    for moved in on_ranks(2, gathered_gradient, tmp_path):
        torch.testing.assert_close(moved, weight.grad)


def log_in_part(folder: Path) -> None:
    import torch.distributed as dist

    class Logs(Automatic):
        def training_step(self, batch, batch_idx):
            groups = [dist.new_group([rank]) for rank in range(2)]
            self.log("loss", 1.0, sync_dist=True, sync_dist_group=groups[self.global_rank])

    trainer = make_trainer(roomier.Trainer, folder, max_steps=1, strategy="ddp", devices=2)
    with pytest.raises(roomier.RoomierError, match=r"sync_dist_group='loss'.*must contain all ranks"):
        trainer.fit(Logs(), DataLoader(list(torch.ones(8, 4)), batch_size=2))


@pytest.mark.more
def test_group_of_some_ranks_is_rejected(on_ranks, tmp_path):
    on_ranks(2, log_in_part, tmp_path)
