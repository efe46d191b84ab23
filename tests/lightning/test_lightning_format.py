"""Checkpoints as files that Lightning reads, and the conversion of folders."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import roomier
from roomier import RoomierError, Trainer
from roomier.callbacks import ModelCheckpoint
from roomier.cli.main import main
from tests.covering import few
from tests.lightning.both import make_trainer, quiet_lightning
from tests.lightning.modules import Regression, in_order, pl


class Wide(Regression):
    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        self.save_hyperparameters()


class Own(roomier.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def trained(module: Any, folder: Path, saves: Any, max_epochs: int = 3, path: Any = None) -> Trainer:
    trainer = make_trainer(Trainer, folder, callbacks=[saves], enable_checkpointing=True, max_epochs=max_epochs)
    trainer.fit(module, in_order(), in_order(2, 5), ckpt_path=path)
    return trainer


def assert_same_weights(one: nn.Module, other: nn.Module) -> None:
    for own, expected in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(own, expected, rtol=0, atol=0)


@pytest.mark.parametrize("is_async", few([True, False]))
@pytest.mark.parametrize("kind", [Wide, Own])
def test_files_are_ranked_and_read_by_torch(kind: Any, is_async: bool, tmp_path: Path) -> None:
    saves = ModelCheckpoint(
        tmp_path / "saves", monitor="val_loss", save_top_k=2, save_last=True, format="lightning", async_save=is_async
    )
    torch.manual_seed(1)
    module = kind(width=6)
    trained(module, tmp_path, saves, max_epochs=4)
    names = sorted(each.name for each in (tmp_path / "saves").iterdir())
    assert len(names) == 4  # the two best, the newest and the link
    assert names[-1] == "last.ckpt"
    assert all(re.fullmatch(r"epoch=\d-step=\d+\.ckpt", name) for name in names[:-1])
    content = torch.load(tmp_path / "saves" / "last.ckpt", weights_only=True)
    assert content["hyper_parameters"] == {"width": 6}
    assert content["global_step"] == 40
    assert {"optimizer_states", "lr_schedulers", "callbacks", "loops", "epoch"} <= content.keys()
    for name, each in module.state_dict().items():
        assert torch.equal(content["state_dict"][name], each)
    assert saves.best_model_path.endswith(".ckpt")
    assert_same_weights(kind.load_from_checkpoint(tmp_path / "saves" / "last.ckpt"), module)


def test_lightning_continues_from_the_file(tmp_path: Path) -> None:
    runs = []
    for kind, extra in ((Trainer, {"format": "lightning"}), (pl.Trainer, {})):
        torch.manual_seed(1)
        first = Wide()
        base = ModelCheckpoint if kind is Trainer else pl.callbacks.ModelCheckpoint
        saves = base(tmp_path / kind.__module__, monitor="val_loss", save_top_k=-1, **extra)
        keywords: dict[str, Any] = {"callbacks": [saves], "enable_checkpointing": True, "max_epochs": 2}
        with quiet_lightning():
            make_trainer(kind, tmp_path, **keywords).fit(first, in_order(), in_order(2, 5))
            module = Wide()
            path = tmp_path / kind.__module__ / "epoch=1-step=20.ckpt"
            make_trainer(pl.Trainer, tmp_path, max_epochs=4).fit(module, in_order(), in_order(2, 5), ckpt_path=path)
        runs.append(module)
    assert_same_weights(*runs)


def test_a_run_resumes_from_its_file(tmp_path: Path) -> None:
    whole, first, rest = (torch.manual_seed(1) and Wide() for _ in range(3))
    trained(whole, tmp_path / "whole", ModelCheckpoint(), max_epochs=4)
    saves = ModelCheckpoint(monitor="val_loss", mode="max", save_top_k=2, format="lightning", save_last=True)
    trainer = trained(first, tmp_path / "parts", saves, max_epochs=2)
    more = ModelCheckpoint(
        saves.dirpath, monitor="val_loss", mode="max", save_top_k=2, format="lightning", save_last=True
    )
    resumed = trained(rest, tmp_path / "parts", more, max_epochs=4, path="last")
    assert resumed.global_step == 40
    assert_same_weights(rest, whole)
    assert str(resumed.ckpt_path).endswith(".ckpt")
    assert trainer.checkpoint_callback is saves
    folder = Path(saves.dirpath)
    assert len([each for each in folder.iterdir() if not each.is_symlink()]) in (2, 3)
    assert {Path(each).exists() for each in more.best_k_models} == {True}


def test_the_format_of_lightnings_callback_is_an_attribute(tmp_path: Path) -> None:
    mine = pl.callbacks.ModelCheckpoint(tmp_path / "saves", filename="mine")
    mine.format = "lightning"
    module = Wide()
    trained(module, tmp_path, mine)
    assert mine.best_model_path == str(tmp_path / "saves" / "mine.ckpt")
    with quiet_lightning():
        assert_same_weights(Wide.load_from_checkpoint(mine.best_model_path), module)


def test_the_trainer_writes_a_file(tmp_path: Path) -> None:
    module = Wide()
    trainer = trained(module, tmp_path, ModelCheckpoint())
    for _ in range(2):  # the second file replaces the first
        trainer.save_checkpoint(tmp_path / "one.ckpt", format="lightning")
    assert torch.load(tmp_path / "one.ckpt", weights_only=True)["global_step"] == 30
    assert sorted(each.name for each in tmp_path.glob("*one*")) == ["one.ckpt"]


def test_an_unknown_format_is_rejected() -> None:
    with pytest.raises(RoomierError, match=r"ModelCheckpoint\(format\)='zip'"):
        ModelCheckpoint(format="zip")  # type: ignore[arg-type]


def test_the_readme_of_a_folder_names_a_working_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves = ModelCheckpoint(tmp_path / "saves", filename="mine")
    module = Wide(width=5)
    trained(module, tmp_path, saves)
    text = (tmp_path / "saves" / "mine" / "README.txt").read_text()
    [command] = [line.strip() for line in text.splitlines() if line.strip().startswith("roomier export")]
    monkeypatch.chdir(tmp_path / "saves")
    assert not main(command.split()[1:])
    with quiet_lightning():
        assert_same_weights(Wide.load_from_checkpoint(tmp_path / "saves" / "mine.ckpt"), module)
    roomier.checkpoint.verify(tmp_path / "saves" / "mine")
    roomier.checkpoint.save(tmp_path / "plain", {"x": torch.ones(2)})
    assert not (tmp_path / "plain" / "README.txt").exists()


def sharded_file(folder: str) -> dict[str, Any]:
    torch.manual_seed(1)
    module = Wide()
    saves = ModelCheckpoint(Path(folder) / "saves", filename="mine", format="lightning")
    keywords: dict[str, Any] = {"devices": 2, "strategy": "zero3", "callbacks": [saves], "enable_checkpointing": True}
    make_trainer(Trainer, folder, max_epochs=1, **keywords).fit(module, in_order(), in_order(2, 5))
    return torch.load(saves.best_model_path, weights_only=True)


def test_a_sharded_run_writes_one_file(on_ranks: Any, tmp_path: Path) -> None:
    first, second = on_ranks(2, sharded_file, str(tmp_path))
    assert [each.name for each in (tmp_path / "saves").iterdir()] == ["mine.ckpt"]
    assert first["state_dict"].keys() == Wide().state_dict().keys()
    for name, each in first["state_dict"].items():
        assert each.shape == Wide().state_dict()[name].shape
        assert torch.equal(each, second["state_dict"][name])
