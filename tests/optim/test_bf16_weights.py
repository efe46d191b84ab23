"""bf16-true with a named optimizer equals training with float32 master weights, and restores checkpoints bit for
bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from roomier import Callback, Module, Trainer, checkpoint
from roomier.callbacks import ModelCheckpoint
from roomier.core.device.rng import seed_everything
from roomier.core.errors import CheckpointError
from roomier.plan import plan_from_flags
from roomier.techniques.optim.rounding import read
from tests.covering import few
from tests.optim.test_rounding import split
from tests.parallel.parity import Setup, batches_of, engine_of
from tests.parallel.tasks import Language
from tests.ranks.pool import RankPool
from tests.resume.conftest import differing
from tests.resume.reshard import GLOBAL_BATCH, Classifier, Samples

LR = 1e-3


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 40), nn.LayerNorm(40), nn.Tanh(), nn.Linear(40, 3))

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        x, label = batch
        return F.cross_entropy(self.net(x).float(), label)


@pytest.fixture
def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x, label = torch.randn(80, 5, generator=generator), torch.randint(3, (80,), generator=generator)
    return DataLoader(TensorDataset(x, label), batch_size=4)


def train_with_masters(module: Net, data: DataLoader[Any]) -> list[Tensor]:
    """Train float32 master weights with AdamW in plain PyTorch. A bfloat16 copy computes the gradients. Ties are
    rounded away from zero."""
    low = copy.deepcopy(module).bfloat16()
    masters = [nn.Parameter(each.detach().float()) for each in low.parameters()]
    groups = [
        {"params": [each for each in masters if each.dim() >= 2], "weight_decay": 0.01},
        {"params": [each for each in masters if each.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, foreach=False)
    for x, label in data:
        low.zero_grad()
        low.training_step((x.bfloat16(), label)).backward()
        for master, weight in zip(masters, low.parameters(), strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, weight in zip(masters, low.parameters(), strict=True):
                weight.copy_(split(master.detach())[0])
    return masters


def test_split_weights_under_adamw_equal_float32_masters_bit_for_bit(make_trainer: Any, data: Any) -> None:
    module = Net()
    masters = train_with_masters(module, data)
    trainer = make_trainer(max_epochs=1, precision="bf16-true", optimizer="adamw", learning_rate=LR)
    trainer.fit(module, data)
    assert trainer.global_step == 20
    [optimizer] = trainer.optimizers
    for parameter, master in zip(module.parameters(), masters, strict=True):
        assert parameter.dtype is torch.bfloat16
        assert torch.equal(read(parameter.detach(), optimizer.state[parameter]["low_bits"]), master)


def ends_of(make_trainer: Any, data: Any, precision: str, rounding: str | None = None) -> Tensor:
    """Return all weights after 60 steps, including their low bits."""
    module = Net()
    optimizer: dict[str, Any] = {"name": "adamw", "lr": 2e-5}
    if rounding is not None:
        optimizer["weight_rounding"] = rounding
    trainer = make_trainer(max_epochs=3, precision=precision, optimizer=optimizer)
    trainer.fit(module, data)
    state = trainer.optimizers[0].state
    values = [read(each.detach(), state[each].get("low_bits")) for each in module.parameters()]
    return torch.cat([each.flatten().float() for each in values])


def test_small_updates_are_kept_unless_rounding_is_nearest(make_trainer: Any, data: Any) -> None:
    """60 steps of 2e-5 move a weight by up to 0.0012, which is less than half the distance between two bfloat16 values
    near 0.4."""
    begin = torch.cat([each.detach().flatten() for each in Net().bfloat16().float().parameters()])
    wanted = (
        ends_of(make_trainer, data, "32-true") - torch.cat([each.flatten() for each in Net().parameters()]).detach()
    )
    moved = {way: ends_of(make_trainer, data, "bf16-true", way) - begin for way in ("split", "stochastic", "nearest")}
    along = {way: (move @ wanted / (wanted @ wanted)).item() for way, move in moved.items()}
    assert along["split"] == pytest.approx(1, abs=0.1)
    assert along["stochastic"] == pytest.approx(1, abs=0.3)
    assert along["nearest"] < 0.5


def test_lost_updates_of_the_modules_optimizer_are_reported(make_trainer: Any, data: Any, capsys: Any) -> None:
    class Own(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    make_trainer(max_steps=1, precision="bf16-true").fit(Own(), data)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("roomier: bfloat16 weights")]
    assert len(said) == 1
    assert "SGD" in said[0]
    assert "2^-9" in said[0]
    assert "optimizer='adamw'" in said[0]
    make_trainer(max_steps=1, precision="bf16-true", optimizer="adamw").fit(Net(), data)
    make_trainer(max_steps=1, precision="bf16-mixed").fit(Own(), data)
    make_trainer(max_steps=1, precision="bf16-true", optimizer={"name": "sgd", "weight_rounding": "nearest"}).fit(
        Net(), data
    )
    assert "roomier: bfloat16 weights" not in capsys.readouterr().err
    came_in_bfloat16 = Net().bfloat16()
    came_in_bfloat16.training_step = lambda batch: Net.training_step(came_in_bfloat16, (batch[0].bfloat16(), batch[1]))
    make_trainer(max_steps=1, optimizer="sgd").fit(came_in_bfloat16, data)
    assert "roomier: bfloat16 weights: SGD" in capsys.readouterr().err


class Named(Classifier):
    def configure_optimizers(self) -> Any:
        return None


class Look(Callback):
    """Record the unsharded weights and states when training resumes."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        assert trainer.engine is not None
        self.state = copy.deepcopy(trainer.engine.state())


def train(
    folder: Path, strategy: str, num_ranks: int, max_steps: int, optimizer: dict[str, Any], ckpt_path: str | None = None
) -> dict[str, Any]:
    seed_everything(0)
    saver, look = ModelCheckpoint(every_n_train_steps=4, save_top_k=-1), Look()
    trainer = Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=num_ranks,
        strategy=strategy,
        precision="bf16-true",
        max_steps=max_steps,
        optimizer={"lr": 1e-3, **optimizer},
        callbacks=[saver, look],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(Samples(), batch_size=GLOBAL_BATCH // num_ranks, shuffle=True, drop_last=True)
    trainer.fit(Named(), loader, ckpt_path=ckpt_path)
    return {"path": saver.best_model_path, "begins_with": look.state if num_ranks == 1 else None}


OPTIMIZERS = [
    {"name": "adamw", "weight_rounding": "split"},
    {"name": "adamw", "weight_rounding": "stochastic"},
    {"name": "lion", "weight_rounding": "stochastic"},
    {"name": "lion", "weight_rounding": "split"},
]


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "optimizer"),
    few([*(("single", 1, each) for each in OPTIMIZERS), *(("zero2", 2, each) for each in OPTIMIZERS[::2])], 2),
    ids=lambda each: "-".join(each.values()) if isinstance(each, dict) else str(each),
)
def test_a_resume_is_bit_identical(
    on_ranks: RankPool, tmp_path: Path, strategy: str, num_ranks: int, optimizer: dict[str, Any]
) -> None:
    parts = [(tmp_path / name, strategy, num_ranks, num_steps, optimizer) for name, num_steps in (("a", 4), ("c", 8))]
    [begun, *_], [whole, *_] = on_ranks.each(num_ranks, train, parts)
    ended = on_ranks(num_ranks, train, tmp_path / "b", strategy, num_ranks, 8, optimizer, begun["path"])[0]
    ours, theirs = (checkpoint.load(each["path"]) for each in (ended, whole))
    for section in ("module", "optimizers"):
        assert list(differing(ours[section], theirs[section], section)) == []


@pytest.mark.more
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_one_rank_resumes_two_ranks_bit_for_bit(on_ranks: RankPool, tmp_path: Path, strategy: str) -> None:
    begun = on_ranks(2, train, tmp_path / "a", strategy, 2, 4, OPTIMIZERS[0])[0]
    continues = on_ranks(1, train, tmp_path / "b", "single", 1, 5, OPTIMIZERS[0], begun["path"])[0]
    stored, now = checkpoint.load(begun["path"]), continues["begins_with"]
    assert list(differing(stored["module"], now["module"])) == []
    [saved_states], [states] = (each["optimizers"] for each in (stored, now))
    assert list(differing(saved_states["state"], states["state"])) == []
    assert any(state["low_bits"].any() for state in states["state"].values())


@pytest.mark.parametrize(
    ("precision", "optimizer", "kept"),
    [
        ("bf16-true", {"name": "lion", "weight_rounding": "stochastic"}, "weight_rounding='split'"),
        ("32-true", {"name": "lion"}, "weight_rounding='split'"),
    ],
)
def test_a_resume_cannot_change_the_representation_of_weights(
    make_trainer: Any, data: Any, tmp_path: Path, precision: str, optimizer: dict[str, Any], kept: str
) -> None:
    first = make_trainer(max_steps=2, precision="bf16-true", optimizer="lion")
    first.fit(Net(), data)
    first.save_checkpoint(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=kept):
        make_trainer(max_steps=3, precision=precision, optimizer=optimizer).fit(
            Net(), data, ckpt_path=tmp_path / "saved"
        )


def replicas() -> list[Tensor]:
    """Return all weights of this rank after some steps under ddp."""
    levers = {"optimizer": {"name": "adamw", "lr": 1e-3, "weight_rounding": "stochastic"}}
    setup = Setup("ddp", 2, precision="bf16-true", num_steps=5)
    task = Language()
    plan = plan_from_flags(**levers, strategy="ddp", devices=2, accelerator="cpu", precision="bf16-true")
    engine, ranks = engine_of(task, plan)
    for parts_of_ranks in batches_of(task, setup):
        engine.forward_backward(lambda batch, _: task.training_step(batch), parts_of_ranks[ranks.world.rank])
        engine.step()
    return [each.detach().float() for each in task.parameters()]


@pytest.mark.more
def test_replicas_round_alike(on_ranks: RankPool) -> None:
    one, other = on_ranks(2, replicas)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
