"""Averages of weights: formulas, validated and saved weights, resumed runs, and several ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import roomier
from roomier.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint, WeightAveraging
from roomier.core.errors import RoomierError
from roomier.techniques.optim.averaging import WeightAverage, average_into
from roomier.trainer import Trainer
from tests.callbacks.test_finetuning import StopsAt

Make = Callable[..., Trainer]


class Net(roomier.Module):
    """Module with tied weights, running statistics and dropout, which records the weights of each step and
    validation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.head = nn.Linear(4, 1)
        self.seen: list[Tensor] = []
        self.validated: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.functional.dropout(self.second(self.norm(self.first(x))).relu(), 0.2, self.training))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self(batch) - batch.sum(dim=1, keepdim=True)).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.head.weight.detach().clone())

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validated.append(self.head.weight.detach().clone())
        self.log("val_loss", self(batch).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def data() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(6, 4, generator=generator) for _ in range(5)]


def fitted(make: Make, *callbacks: Callback, **keywords: Any) -> Net:
    torch.manual_seed(1)
    model = Net()
    make(*callbacks, **{"logger": False, "enable_checkpointing": False, "max_epochs": 2, **keywords}).fit(
        model, data(), data()[:1]
    )
    return model


def test_mean_of_all_iterates_is_validated_and_kept(make_trainer: Make) -> None:
    plain = fitted(make_trainer)
    model = fitted(make_trainer, WeightAveraging())
    torch.testing.assert_close(model.seen, plain.seen, rtol=0, atol=0)  # training is unchanged
    torch.testing.assert_close(model.validated[0], torch.stack(model.seen[:5]).mean(dim=0))
    torch.testing.assert_close(model.head.weight.detach(), torch.stack(model.seen).mean(dim=0))
    assert model.second.weight is model.first.weight


def test_exponential_average_matches_its_formula(make_trainer: Make) -> None:
    model = fitted(make_trainer, EMAWeightAveraging(decay=0.8, update_starting_at_step=3, update_every_n_steps=2))
    average = model.seen[4]
    for index in (6, 8):
        average = 0.8 * average + 0.2 * model.seen[index]
    torch.testing.assert_close(model.head.weight.detach(), average)


def test_trained_weights_are_validated_and_kept_before_the_first_update(make_trainer: Make, capsys: Any) -> None:
    model = fitted(make_trainer, EMAWeightAveraging(update_starting_at_step=100))
    assert torch.equal(model.validated[1], model.seen[-1])
    assert torch.equal(model.head.weight, model.seen[-1])
    assert "never returned True" in capsys.readouterr().err


@pytest.mark.parametrize("functions", [{"avg_fn": lambda a, w, n: 0.5 * a + 0.5 * w}, {"multi_avg_fn": None}])
def test_user_functions_replace_the_mean(make_trainer: Make, functions: dict[str, Any]) -> None:
    def halves(averages: list[Tensor], tensors: list[Tensor], count: Tensor) -> None:
        for average, tensor in zip(averages, tensors, strict=True):
            average.lerp_(tensor, 0.5)

    if "multi_avg_fn" in functions:
        functions = {"multi_avg_fn": halves}
    model = fitted(make_trainer, WeightAveraging(**functions))
    expected = fitted(make_trainer, EMAWeightAveraging(decay=0.5))
    torch.testing.assert_close(model.state_dict(), expected.state_dict())


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_resumed_run_is_bitwise_equal(make_trainer: Make, tmp_path: Path, precision: str) -> None:
    def ema() -> EMAWeightAveraging:
        return EMAWeightAveraging(decay=0.9)

    straight = fitted(make_trainer, ema(), precision=precision)
    make = make_trainer
    first = ModelCheckpoint(dirpath=tmp_path / "kept", every_n_train_steps=7, save_top_k=-1)
    fitted(make, ema(), first, StopsAt(7), precision=precision, enable_checkpointing=True)
    [path] = [each for each in (tmp_path / "kept").iterdir() if each.is_dir() and not each.is_symlink()]
    torch.manual_seed(5)
    resumed = Net()
    make(ema(), logger=False, enable_checkpointing=False, max_epochs=2, precision=precision).fit(
        resumed, data(), data()[:1], ckpt_path=path
    )
    for name, value in straight.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    assert torch.equal(straight.seen[-1], resumed.seen[-1])


def test_checkpoint_contains_the_average_as_the_module(make_trainer: Make, tmp_path: Path) -> None:
    trainer = make_trainer(WeightAveraging(), logger=False, enable_checkpointing=False, max_epochs=1)
    model = Net()
    trainer.fit(model, data())
    for weights_only in (True, False):
        path = tmp_path / str(weights_only)
        trainer.save_checkpoint(path, weights_only=weights_only)
        torch.testing.assert_close(Net.load_from_checkpoint(path).state_dict(), model.state_dict(), rtol=0, atol=0)
    stored = roomier.checkpoint.load(tmp_path / "False")
    assert torch.equal(stored["current_model_state"]["head.weight"], model.seen[-1])


def test_error_during_validation_restores_the_trained_weights(make_trainer: Make) -> None:
    class Fails(Net):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            raise ValueError("no")

    model = Fails()
    trainer = make_trainer(WeightAveraging(), logger=False, enable_checkpointing=False, max_epochs=1)
    with pytest.raises(ValueError, match="no"):
        trainer.fit(model, data(), data())
    assert torch.equal(model.head.weight, model.seen[-1])


def test_unfrozen_parameters_join_the_average(make_trainer: Make) -> None:
    class Unfreezes(Callback):
        def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
            pl_module.head.requires_grad_(False)

        def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
            pl_module.head.requires_grad_(trainer.current_epoch == 1)

    model = fitted(make_trainer, Unfreezes(), EMAWeightAveraging(decay=0.5))
    average = model.seen[4]
    for weight in model.seen[5:]:
        average = 0.5 * average + 0.5 * weight
    torch.testing.assert_close(model.head.weight.detach(), average)


def test_16_bit_weights_are_averaged_in_float32() -> None:
    weights = {"w": torch.ones(3, dtype=torch.bfloat16)}
    average = WeightAverage(weights)
    average.update()
    weights["w"].fill_(2)
    for _ in range(100):
        average.update(0.001)
    torch.testing.assert_close(average.averages["w"], torch.full((3,), 2 - 0.999**100))
    before = average.averages["w"].clone()
    average.swap()
    assert weights["w"][0] == before.bfloat16()[0]
    average.swap()
    assert weights["w"][0] == 2
    assert torch.equal(average.averages["w"], before)


def test_average_into_applies_the_weight() -> None:
    averages, tensors = (
        [torch.zeros(2), torch.ones(1, dtype=torch.float64)],
        [torch.full((2,), 4.0), torch.full((1,), 3.0)],
    )
    average_into(averages, tensors, 0.25)
    assert [each.tolist() for each in averages] == [[1.0, 1.0], [1.5]]


@pytest.mark.parametrize(
    ("kind", "arguments", "named"),
    [
        (EMAWeightAveraging, {"decay": 1.5}, "EMAWeightAveraging\\(decay\\)"),
        (EMAWeightAveraging, {"update_every_n_steps": -1}, "update_every_n_steps"),
        (WeightAveraging, {"avg_fn": 3}, "avg_fn"),
        (WeightAveraging, {"avg_fn": print, "multi_avg_fn": print}, "cannot be combined with multi_avg_fn"),
    ],
)
def test_invalid_arguments_are_rejected(kind: type, arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(RoomierError, match=named):
        kind(**arguments)


class Plain(Net):
    """Module that contains no layers whose behavior differs between ranks."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)).relu())


def fit_straight_and_resumed(root: Path, num_devices: int = 1, strategy: str = "single") -> float:
    """Save ``straight``, ``half`` and ``resumed``. Return the last validation loss, which is computed with the
    average."""

    def run(name: str, *callbacks: Callback, ckpt_path: Path | None = None) -> Trainer:
        torch.manual_seed(3)
        model = Plain()
        trainer = Trainer(
            accelerator="cpu",
            strategy=strategy,
            devices=num_devices,
            max_epochs=2,
            default_root_dir=root,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            callbacks=[EMAWeightAveraging(decay=0.9), *callbacks],
        )
        loader = DataLoader(torch.cat(data())[:24], batch_size=6 // num_devices)
        trainer.fit(model, loader, loader, ckpt_path=ckpt_path)
        trainer.save_checkpoint(root / name)
        return trainer

    run("half", StopsAt(5))
    trainer = run("straight")
    run("resumed", ckpt_path=root / "half")
    return float(trainer.callback_metrics["val_loss"])


@pytest.mark.parametrize("strategy", ["zero3", pytest.param("ddp", marks=pytest.mark.slow)])
def test_ranks_average_their_shards(on_ranks: Any, tmp_path: Path, strategy: str) -> None:
    val_loss = fit_straight_and_resumed(tmp_path / "one")
    val_losses = on_ranks(2, fit_straight_and_resumed, tmp_path / "two", 2, strategy)
    assert val_losses == pytest.approx([val_loss] * 2, rel=1e-5)
    one, straight, resumed = (
        roomier.checkpoint.load(tmp_path / name, only=("module", "current_model_state"))
        for name in ("one/straight", "two/straight", "two/resumed")
    )
    torch.testing.assert_close(straight, one, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(resumed, straight, rtol=0, atol=0)
    assert not torch.equal(straight["module"]["head.weight"], straight["current_model_state"]["head.weight"])
