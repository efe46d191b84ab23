"""A LightningDataModule with roomier's Trainer, and the features that roomier's DataModule shares with it."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import roomier
from roomier.checkpoint import load_datamodule, peek
from roomier.checkpoint.export.lightning_file import export_lightning
from tests.lightning.both import make_trainer, quiet_lightning
from tests.lightning.modules import pl


class Net(pl.LightningModule):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val", self.net(batch[0]).mean())

    def test_step(self, batch, batch_idx):
        self.log("test", self.net(batch[0]).mean())

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


def samples(count: int = 8) -> TensorDataset:
    return TensorDataset(torch.randn(count, 3, generator=torch.Generator().manual_seed(0)))


class Notes:
    """Mixin that records the hooks of a DataModule with their stages, in the order of the calls."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.calls: list[Any] = []
        self.num_seen = 0

    def prepare_data(self):
        self.calls.append("prepare_data")

    def setup(self, stage):
        self.calls.append(("setup", str(getattr(stage, "value", stage)), self.trainer is not None))

    def teardown(self, stage):
        self.calls.append(("teardown", str(getattr(stage, "value", stage))))

    def on_exception(self, exception):
        self.calls.append(("exception", type(exception).__name__))

    def _loader(self, name):
        self.calls.append(name)
        return DataLoader(samples(), batch_size=self.hparams.batch_size)

    def train_dataloader(self):
        return self._loader("train")

    def val_dataloader(self):
        return self._loader("val")

    def test_dataloader(self):
        return self._loader("test")

    def predict_dataloader(self):
        return self._loader("predict")

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.num_seen += 1
        return [batch[0] + 1]

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        assert device.type == "cpu"
        return [batch[0] * 2]

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] - 1]

    def state_dict(self):
        return {"num_seen": self.num_seen}

    def load_state_dict(self, state_dict):
        self.num_seen = state_dict["num_seen"]


class OfLightning(Notes, pl.LightningDataModule):
    pass


class Own(Notes, roomier.DataModule):
    pass


def work(kind: Any, datamodule: Any, folder: Path) -> tuple[list[Any], list[torch.Tensor], dict[str, float]]:
    torch.manual_seed(0)
    module = Net()
    with quiet_lightning():
        trainer = make_trainer(kind, folder, max_epochs=2, num_sanity_val_steps=0)
        trainer.fit(module, datamodule=datamodule)
        found = {**trainer.validate(module, datamodule=datamodule, verbose=False)[0]}
        found |= trainer.test(module, datamodule=datamodule, verbose=False)[0]
        predictions = trainer.predict(module, datamodule=datamodule)
    return datamodule.calls, [*module.parameters(), *predictions], found


@pytest.mark.parametrize("kind", [OfLightning, Own])
def test_calls_and_metrics_equal_lightning(tmp_path, kind):
    there = work(pl.Trainer, OfLightning(), tmp_path)
    here = work(roomier.Trainer, kind(), tmp_path)
    assert here[0] == there[0]
    assert here[2] == there[2]
    for own, expected in zip(here[1], there[1], strict=True):
        assert torch.equal(own, expected)


@pytest.mark.parametrize("kind", [OfLightning, Own])
def test_hyperparameters_are_logged_and_the_state_is_saved(tmp_path, kind):
    logged = {}

    class Rows(roomier.Logger):
        name = "rows"

        def log_metrics(self, metrics, step):
            pass

        def log_hyperparams(self, params):
            logged.update(params)

    datamodule, module = kind(batch_size=2), Net(lr=0.5)
    trainer = roomier.Trainer(
        max_epochs=1, logger=Rows(), default_root_dir=tmp_path, accelerator="cpu", enable_progress_bar=False
    )
    trainer.fit(module, datamodule=datamodule)
    assert logged == {"lr": 0.5, "batch_size": 2}
    trainer.save_checkpoint(tmp_path / "a")
    assert peek(tmp_path / "a")["datamodule"] == {"num_seen": datamodule.num_seen}
    resumed = kind(batch_size=2)
    make_trainer(roomier.Trainer, tmp_path, max_epochs=1).fit(Net(), datamodule=resumed, ckpt_path=tmp_path / "a")
    assert resumed.num_seen == datamodule.num_seen


def test_different_values_of_one_hyperparameter_are_rejected(tmp_path):
    class Clashes(OfLightning):
        def __init__(self, lr: float = 0.3) -> None:
            super().__init__()
            self.save_hyperparameters("lr")

    with pytest.raises(roomier.RoomierError, match="the module and the DataModule set this hyperparameter"):
        make_trainer(roomier.Trainer, tmp_path, max_epochs=1).fit(Net(), datamodule=Clashes())


@pytest.mark.parametrize("kind", [OfLightning, Own])
def test_on_exception_precedes_teardown(tmp_path, kind):
    class Fails(Net):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("broken")

    datamodule = kind()
    with pytest.raises(RuntimeError, match="broken"):
        make_trainer(roomier.Trainer, tmp_path, max_epochs=1).fit(Fails(), datamodule=datamodule)
    assert datamodule.calls[-2:] == [("exception", "RuntimeError"), ("teardown", "fit")]


@pytest.mark.parametrize("kind", [pl.LightningDataModule, roomier.DataModule])
def test_from_datasets(tmp_path, kind):
    datamodule = kind.from_datasets(samples(), samples(4), samples(4), batch_size=2)
    trainer = make_trainer(roomier.Trainer, tmp_path, max_epochs=1)
    module = Net()
    with quiet_lightning():  # the DataModule requests pinned memory, which causes a warning without a GPU
        trainer.fit(module, datamodule=datamodule)
        assert trainer.global_step == 4
        assert set(trainer.test(module, datamodule=datamodule, verbose=False)[0]) == {"test"}


class Named:
    """A DataModule whose __init__ receives one argument with all hyperparameters, and another argument that is not
    stored."""

    def __init__(self, config: dict[str, Any], source: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters(config)
        self.source = source
        self.num_seen = 0

    def train_dataloader(self):
        self.num_seen += 1
        return DataLoader(samples(), batch_size=self.hparams["batch_size"])

    state_dict, load_state_dict = Notes.state_dict, Notes.load_state_dict


class NamedOfLightning(Named, pl.LightningDataModule):
    pass


class NamedOwn(Named, roomier.DataModule):
    pass


def written(trainer_kind: Any, module: Any, datamodule: Any, folder: Path, name: str) -> Path:
    with quiet_lightning():
        trainer = make_trainer(trainer_kind, folder, max_epochs=1, limit_val_batches=0)
        trainer.fit(module, datamodule=datamodule)
        trainer.save_checkpoint(folder / name)
    return folder / name


@pytest.mark.parametrize(("kind", "arguments"), [
    (OfLightning, {"batch_size": 2}),
    (Own, {"batch_size": 2}),
    (NamedOfLightning, {"config": {"batch_size": 2}}),
    (NamedOwn, {"config": {"batch_size": 2}}),
])  # fmt: skip
@pytest.mark.parametrize("form", ["folder", "exported file", "file of Lightning"])
def test_a_datamodule_is_created_from_a_checkpoint(tmp_path, kind, arguments, form):
    of_lightning = issubclass(kind, pl.LightningDataModule)
    if form == "file of Lightning" and not of_lightning:
        pytest.skip("Lightning's Trainer requires a LightningDataModule")
    datamodule = kind(**arguments)
    trained_by = pl.Trainer if form == "file of Lightning" else roomier.Trainer
    path = written(trained_by, Net(), datamodule, tmp_path, "a.ckpt" if trained_by is pl.Trainer else "a")
    if form == "exported file":
        path = export_lightning(path, tmp_path / "b.ckpt")
    loaded = [load_datamodule(kind, path), kind.load_from_checkpoint(path)]
    for each in loaded:
        assert type(each) is kind
        assert dict(each.hparams) == {"batch_size": 2}
        assert each.num_seen == datamodule.num_seen > 0
    if "config" in arguments:
        assert load_datamodule(kind, path, source="x").source == "x"
    else:
        assert kind.load_from_checkpoint(path, batch_size=8).hparams["batch_size"] == 8


@pytest.mark.parametrize("kind", [Own, OfLightning])
def test_a_datamodule_is_moved_and_created_from_a_file(tmp_path, kind):
    class Holds(kind):
        def state_dict(self):
            return {"mean": torch.ones(2), "num_seen": 3}

        def load_state_dict(self, state_dict):
            self.state = state_dict

    path = written(roomier.Trainer, Net(), Holds(batch_size=2), tmp_path, "a")
    (tmp_path / "hparams.yaml").write_text("batch_size: 4")
    options = {"map_location": "meta", "hparams_file": tmp_path / "hparams.yaml"}
    for loaded in (load_datamodule(Holds, path, **options), Holds.load_from_checkpoint(path, **options)):
        assert loaded.hparams["batch_size"] == 4
        assert loaded.state["mean"].device.type == "meta"
    given = kind.load_from_checkpoint(path, None, tmp_path / "hparams.yaml", weights_only=True, batch_size=8)
    assert given.hparams["batch_size"] == 8


def test_a_checkpoint_without_the_arguments_of_a_datamodule_is_rejected(tmp_path):
    path = written(roomier.Trainer, Net(), Own(), tmp_path, "a")
    with pytest.raises(roomier.core.errors.CheckpointError, match=r"NamedOwn cannot be constructed .*config"):
        NamedOwn.load_from_checkpoint(path)


@pytest.mark.more
def test_a_lightning_module_reads_folders_like_files(tmp_path):
    module = Net(lr=0.5)
    path = written(roomier.Trainer, module, OfLightning(), tmp_path, "a")
    for given in (path, str(path), export_lightning(path, tmp_path / "b.ckpt")):
        loaded = Net.load_from_checkpoint(given, map_location="cpu", weights_only=True)
        assert loaded.hparams.lr == 0.5
        assert torch.equal(loaded.net.weight, module.net.weight)
    assert Net.load_from_checkpoint(path, lr=0.25).hparams.lr == 0.25
    with pytest.raises(IsADirectoryError):
        Net.load_from_checkpoint(tmp_path)


def test_folders_can_be_read_before_a_trainer_is_created(tmp_path, monkeypatch):
    module = Net(lr=0.5)
    path = written(roomier.Trainer, module, OfLightning(), tmp_path, "a")
    saving = sys.modules[f"{pl.__name__}.core.saving"]
    monkeypatch.setattr(saving, "pl_load", saving.pl_load.args[0])  # as in a new process
    with pytest.raises(IsADirectoryError):
        Net.load_from_checkpoint(path)
    importlib.reload(roomier.trainer)
    assert torch.equal(Net.load_from_checkpoint(path).net.weight, module.net.weight)


@pytest.mark.parametrize(("per_node", "local", "rank", "is_called"), [
    (True, 0, 4, True),
    (True, 1, 1, False),
    (False, 0, 4, False),
    (False, 0, 0, True),
])  # fmt: skip
def test_data_are_prepared_once_per_node_or_once_in_total(per_node, local, rank, is_called):
    from types import SimpleNamespace

    from roomier.trainer.session import prepares

    datamodule = OfLightning()
    datamodule.prepare_data_per_node = per_node
    assert prepares(SimpleNamespace(local_rank=local, global_rank=rank), datamodule) == is_called
