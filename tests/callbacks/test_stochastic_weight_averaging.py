"""SWA and averages of weights, compared with Lightning's callbacks, after a resume, and on several ranks."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset

import roomier
from roomier.callbacks import EMAWeightAveraging, LambdaCallback, StochasticWeightAveraging, WeightAveraging
from roomier.core.errors import DataError, RoomierError
from roomier.trainer import Trainer
from tests.covering import few
from tests.ranks.pool import RankFailed

Make = Callable[..., Trainer]
OFF = {"logger": False, "enable_checkpointing": False}
QUIET = {**OFF, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


def data(num: int = 6) -> Tensor:
    return torch.randn(num * 4, 3, generator=torch.Generator().manual_seed(0))


def make_net(base: type, norm: bool) -> Any:
    class Net(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(3, 4), nn.Linear(4, 1)
            self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
            self.rates: list[float] = []

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.log("train_loss", batch.mean(), on_step=False, on_epoch=True)
            return (self.head(self.norm(self.layer(batch))) - batch.sum(dim=1, keepdim=True)).square().mean()

        def on_train_epoch_start(self) -> None:
            self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)
            return [optimizer], [StepLR(optimizer, 1, gamma=0.9)]

    torch.manual_seed(1)
    return Net()


@pytest.fixture(scope="module")
def lightning() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import lightning.pytorch as lightning_pytorch
    return lightning_pytorch


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("norm", few([True, False]))
@pytest.mark.parametrize(
    "arguments",
    [{"swa_epoch_start": 0.5, "annealing_epochs": 2}, {"swa_epoch_start": 2, "annealing_strategy": "linear"}],
)
def test_swa_equals_lightning(lightning: Any, tmp_path: Path, norm: bool, arguments: Any) -> None:
    reference, own, as_it_is = (
        make_net(base, norm) for base in (lightning.LightningModule, roomier.Module, lightning.LightningModule)
    )
    loader = DataLoader(data(), batch_size=4)
    averages: list[dict[str, Tensor]] = []

    class Seen(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if (
                trainer.current_epoch == 6
            ):  # in this epoch, Lightning computes the statistics, and then updates the average again
                averages.append({name: each.detach().clone() for name, each in pl_module.named_parameters()})

    swa = lightning.callbacks.StochasticWeightAveraging(0.05, **arguments)
    lightning.Trainer(max_epochs=6, callbacks=[swa, Seen()], default_root_dir=tmp_path, **QUIET).fit(reference, loader)
    expected = {**reference.state_dict(), **(averages[0] if norm else {})}
    for model in (own, as_it_is):
        swa = StochasticWeightAveraging(0.05, **arguments)
        Trainer(max_epochs=6, callbacks=[swa], default_root_dir=tmp_path, **QUIET).fit(model, loader)
        assert model.rates == pytest.approx(reference.rates[:6])
        torch.testing.assert_close(model.state_dict(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "arguments"),
    [("WeightAveraging", {}), ("EMAWeightAveraging", {"decay": 0.7, "update_starting_at_step": 5})],
)
def test_averages_equal_lightning(lightning: Any, tmp_path: Path, kind: str, arguments: Any) -> None:
    reference, own = make_net(lightning.LightningModule, True), make_net(lightning.LightningModule, True)
    loader = DataLoader(data(), batch_size=4)
    callback = getattr(lightning.callbacks, kind)(**arguments)
    lightning.Trainer(max_epochs=3, callbacks=[callback], default_root_dir=tmp_path, **QUIET).fit(reference, loader)
    averaging = {"WeightAveraging": WeightAveraging, "EMAWeightAveraging": EMAWeightAveraging}[kind](**arguments)
    Trainer(max_epochs=3, callbacks=[averaging], default_root_dir=tmp_path, **QUIET).fit(own, loader)
    expected = {name: value for name, value in reference.state_dict().items() if "num_batches" not in name}
    torch.testing.assert_close({name: own.state_dict()[name] for name in expected}, expected, rtol=1e-5, atol=1e-6)


def fit(root: Path, *callbacks: Any, devices: int = 1, strategy: str = "single", path: Path | None = None) -> Any:
    model = make_net(roomier.Module, norm=True)
    trainer = Trainer(
        max_epochs=6,
        default_root_dir=root,
        strategy=strategy,
        devices=devices,
        callbacks=[StochasticWeightAveraging(0.05, 3, annealing_epochs=2), *callbacks],
        **QUIET,
    )
    trainer.fit(model, DataLoader(data(), batch_size=4 // devices), ckpt_path=path)
    return model, trainer


def stop_at(step: int) -> LambdaCallback:
    return LambdaCallback(on_train_batch_end=lambda t, *_: setattr(t, "should_stop", t.global_step == step))


@pytest.mark.parametrize("step", [9, 21, 30])
def test_resumed_run_is_bitwise_equal(tmp_path: Path, step: int) -> None:
    straight, _ = fit(tmp_path)
    _, trainer = fit(tmp_path, stop_at(step))
    trainer.save_checkpoint(tmp_path / "half")
    resumed, _ = fit(tmp_path, path=tmp_path / "half")
    for name, value in straight.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_run_that_ends_early_keeps_its_trained_weights(tmp_path: Path, capsys: Any) -> None:
    last = []
    spy = LambdaCallback(on_train_batch_end=lambda t, module, *_: last.append(module.head.weight.detach().clone()))
    model, _ = fit(tmp_path, spy, stop_at(31))
    assert torch.equal(model.head.weight, last[-1])
    assert "ended before max_epochs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"swa_lrs": 0.0}, "swa_lrs"),
        ({"swa_lrs": [0.1, "a"]}, "swa_lrs"),
        ({"swa_epoch_start": 0}, "swa_epoch_start"),
        ({"swa_epoch_start": 1.5}, "swa_epoch_start"),
        ({"annealing_strategy": "step"}, "annealing_strategy"),
        ({"avg_fn": 2}, "avg_fn"),
    ],
)
def test_invalid_arguments_are_rejected(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(RoomierError, match=named):
        StochasticWeightAveraging(**{"swa_lrs": 0.1, **arguments})


def test_unsupported_combinations_are_rejected(make_trainer: Make) -> None:
    model = make_net(roomier.Module, norm=False)
    for swa, keywords, named in (
        (StochasticWeightAveraging([0.1, 0.2]), {"max_epochs": 2}, "each of the 1 parameter groups"),
        (StochasticWeightAveraging(0.1), {"max_steps": 5}, "is a fraction of max_epochs"),
    ):
        with pytest.raises(RoomierError, match=named):
            make_trainer(swa, **keywords, **OFF).fit(model, [data()])


def fit_and_save(root: Path, devices: int, strategy: str) -> None:
    fit(root, devices=devices, strategy=strategy)[1].save_checkpoint(root / strategy)
    fit(root, stop_at(21), devices=devices, strategy=strategy)[1].save_checkpoint(root / f"{strategy}-half")
    _, trainer = fit(root, devices=devices, strategy=strategy, path=root / f"{strategy}-half")
    trainer.save_checkpoint(root / f"{strategy}-resumed")


@pytest.mark.more
@pytest.mark.parametrize("strategy", ["zero3", pytest.param("ddp", marks=pytest.mark.slow)])
def test_ranks_average_their_shards_and_share_statistics(on_ranks: Any, tmp_path: Path, strategy: str) -> None:
    on_ranks(2, fit_and_save, tmp_path, 2, strategy)
    straight, resumed = (roomier.checkpoint.load(tmp_path / f"{strategy}{end}")["module"] for end in ("", "-resumed"))
    torch.testing.assert_close(straight, resumed, rtol=0, atol=0)
    model = make_net(roomier.Module, norm=True)
    model.load_state_dict(straight)
    with torch.no_grad():
        hidden = model.layer(data())
    torch.testing.assert_close(straight["norm.running_mean"], hidden.mean(dim=0), rtol=1e-4, atol=1e-5)


class FailsInStatistics(Dataset[Tensor]):
    """Dataset that fails on the second rank when the statistics of BatchNorm are computed."""

    num_reads_left = 6 * 12

    def __len__(self) -> int:
        return len(data())

    def __getitem__(self, index: int) -> Tensor:
        self.num_reads_left -= 1
        if self.num_reads_left < 0 and dist.get_rank() == 1:
            raise DataError("train_dataloaders", index, "a DataLoader worker exited", "Use fewer workers")
        return data()[index]


def fit_with_failing_statistics(root: Path, strategy: str) -> None:
    model = make_net(roomier.Module, norm=True)
    swa = StochasticWeightAveraging(0.05, 3)
    trainer = Trainer(max_epochs=6, default_root_dir=root, strategy=strategy, devices=2, callbacks=[swa], **QUIET)
    trainer.fit(model, DataLoader(FailsInStatistics(), batch_size=2))


@pytest.mark.more
@pytest.mark.parametrize("strategy", ["zero3", pytest.param("ddp", marks=pytest.mark.slow)])
def test_failure_in_the_statistics_of_one_rank_ends_all_ranks(on_ranks: Any, tmp_path: Path, strategy: str) -> None:
    with pytest.raises(RankFailed, match="a DataLoader worker exited") as caught:
        on_ranks(2, fit_with_failing_statistics, tmp_path, strategy)
    assert caught.value.rank == 1
