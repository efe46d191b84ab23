"""Runs that Lightning saved can be resumed, and have the same losses as in Lightning. Reading a file executes no
code."""

from __future__ import annotations

import argparse
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from roomier import Trainer
from roomier.callbacks import EarlyStopping, ModelCheckpoint
from roomier.checkpoint.export.lightning_file import export_lightning
from roomier.checkpoint.lightning import LightningFile, is_lightning_file
from roomier.core.errors import CheckpointError, RoomierError
from tests.checkpoint.lightning_runs import OwnModule, fit_in_lightning, lightning_module, loader
from tests.covering import few
from tests.ranks.pool import RankPool

pytestmark = pytest.mark.filterwarnings("ignore:::lightning")
TOLERANCE = 1e-6


def saved_by_lightning(folder: Path, num_epochs: int = 2, **arguments: Any) -> Path:
    torch.manual_seed(3)
    fit_in_lightning(lightning_module(**arguments), num_epochs, save_at=folder / "theirs.ckpt")
    return folder / "theirs.ckpt"


@pytest.mark.parametrize("kind", few(["each step", "each epoch", "sgd"]))
def test_a_resumed_run_has_the_losses_of_lightning(
    tmp_path: Path, make_trainer: Callable[..., Trainer], kind: str
) -> None:
    path = saved_by_lightning(tmp_path, kind=kind)
    expected = fit_in_lightning(lightning_module(kind=kind), 4, ckpt_path=path)

    theirs, own = lightning_module(kind=kind), OwnModule(kind=kind)
    for module in (theirs, own):
        trainer = make_trainer(max_epochs=4)
        trainer.fit(module, loader(), loader(), ckpt_path=path)
        assert len(module.losses) == 12
        assert module.losses == pytest.approx(expected, abs=TOLERANCE)
        assert (trainer.global_step, trainer.current_epoch) == (24, 4)


def test_a_consolidated_file_can_be_resumed_and_a_sharded_folder_is_rejected(
    tmp_path: Path, make_trainer: Callable[..., Trainer]
) -> None:
    path = saved_by_lightning(tmp_path)
    content = torch.load(path, weights_only=False)
    names = [name for name, _ in OwnModule().named_parameters()]
    for state in content["optimizer_states"]:  # FSDP names the parameters
        state["state"] = {names[number]: each for number, each in state["state"].items()}
        for group in state["param_groups"]:
            group["params"] = [names[number] for number in group["params"]]
    (tmp_path / "sharded").mkdir()
    (tmp_path / "sharded" / ".metadata").write_bytes(pickle.dumps(Recorded()))
    torch.save(content, tmp_path / "sharded.consolidated")
    losses = []
    for each in (path, tmp_path / "sharded.consolidated"):
        module = OwnModule()
        make_trainer(max_epochs=3).fit(module, loader(), loader(), ckpt_path=each)
        losses.append(module.losses)
    assert losses[0] == losses[1] != []

    for name in ("ckpt_path", "weights"):
        with pytest.raises(
            RoomierError, match=rf"{name}=.*sharded torch.distributed.checkpoint.*consolidate_checkpoint {tmp_path}"
        ):
            make_trainer(max_epochs=3).fit(OwnModule(), loader(), loader(), **{name: tmp_path / "sharded"})
    assert Recorded.made == []


@pytest.mark.parametrize("at_step", [2, 6, 8])
def test_a_run_saved_within_an_epoch_resumes_exactly(
    tmp_path: Path, make_trainer: Callable[..., Trainer], at_step: int
) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint as TheirCheckpoint

    saves = TheirCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    torch.manual_seed(3)
    undisturbed = fit_in_lightning(lightning_module(), 3, callbacks=[saves], enable_checkpointing=True)

    module = OwnModule()
    make_trainer(max_epochs=3).fit(module, loader(), loader(), ckpt_path=tmp_path / f"step={at_step}.ckpt")

    assert module.losses == pytest.approx(undisturbed[at_step:], abs=TOLERANCE)


def test_on_load_checkpoint_can_change_the_checkpoint_as_in_lightning(
    tmp_path: Path, make_trainer: Callable[..., Trainer]
) -> None:
    def without_momentum(checkpoint: dict[str, Any]) -> None:
        for state in checkpoint["optimizer_states"][0]["state"].values():
            state["momentum_buffer"] = torch.zeros_like(state["momentum_buffer"])
        checkpoint["state_dict"]["net.2.bias"] += 1.0

    path = saved_by_lightning(tmp_path, kind="sgd")
    theirs = lightning_module(kind="sgd")
    theirs.on_load_checkpoint = without_momentum
    expected = fit_in_lightning(theirs, 3, ckpt_path=path)
    module = OwnModule(kind="sgd")
    module.on_load_checkpoint = without_momentum  # type: ignore[method-assign]

    make_trainer(max_epochs=3).fit(module, loader(), ckpt_path=path)

    assert module.losses == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("argument", ["ckpt_path", "weights"])
def test_layers_that_on_load_checkpoint_creates_without_an_optimizer_are_rejected(
    tmp_path: Path, make_trainer: Callable[..., Trainer], argument: str
) -> None:
    first = make_trainer(max_epochs=1)
    first.fit(OwnModule(), loader())
    first.save_checkpoint(tmp_path / "saved")
    module = OwnModule()

    def new_head(checkpoint: dict[str, Any]) -> None:
        module.net[2] = nn.Linear(checkpoint["state_dict"]["net.2.weight"].shape[1], 1)

    module.on_load_checkpoint = new_head  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match=r"new parameters: net\.2\.weight, net\.2\.bias, but .* would not train"):
        make_trainer(max_epochs=2).fit(module, loader(), **{argument: tmp_path / "saved"})


def test_early_stopping_and_model_checkpoint_restore_the_state_of_lightning(
    tmp_path: Path, make_trainer: Callable[..., Trainer]
) -> None:
    import lightning.pytorch.callbacks as theirs

    arguments: dict[str, Any] = {"dirpath": tmp_path, "monitor": "val", "save_top_k": 2, "filename": "{epoch}"}
    torch.manual_seed(3)
    callbacks = [theirs.EarlyStopping("val", patience=7), theirs.ModelCheckpoint(**arguments)]
    fit_in_lightning(lightning_module(lr=1e-4), 2, callbacks=callbacks, enable_checkpointing=True)
    early, books = EarlyStopping("val", patience=7), ModelCheckpoint(**arguments)
    trainer = make_trainer(max_epochs=3, limit_train_batches=0, callbacks=[early, books], enable_checkpointing=True)

    trainer.fit(OwnModule(lr=1e-4), loader(), loader(), ckpt_path=tmp_path / "epoch=1.ckpt")

    assert float(early.best_score) == pytest.approx(float(callbacks[0].best_score))
    assert books.best_model_path == str(tmp_path / "epoch=1.ckpt")
    assert sorted(books.best_k_models) == [str(tmp_path / f"epoch={epoch}.ckpt") for epoch in (0, 1)]


def test_a_better_checkpoint_replaces_a_lightning_file_without_deleting_it(
    tmp_path: Path, make_trainer: Callable[..., Trainer]
) -> None:
    import lightning.pytorch.callbacks as theirs

    arguments: dict[str, Any] = {"dirpath": tmp_path, "monitor": "val", "filename": "{epoch}"}
    torch.manual_seed(3)
    fit_in_lightning(lightning_module(), 1, callbacks=[theirs.ModelCheckpoint(**arguments)], enable_checkpointing=True)
    books = ModelCheckpoint(**arguments)
    trainer = make_trainer(max_epochs=2, callbacks=[books], enable_checkpointing=True)

    trainer.fit(OwnModule(), loader(), loader(), ckpt_path=tmp_path / "epoch=0.ckpt")

    assert books.best_model_path == str(tmp_path / "epoch=1")
    assert (tmp_path / "epoch=0.ckpt").is_file()


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_evaluation_reads_the_weights(tmp_path: Path, make_trainer: Callable[..., Trainer], verb: str) -> None:
    path = saved_by_lightning(tmp_path, 1)
    module = OwnModule()
    module.test_step = module.validation_step  # type: ignore[method-assign]
    module.predict_step = lambda batch, batch_idx: module(batch[0])  # type: ignore[method-assign]

    getattr(make_trainer(), verb)(module, loader(), ckpt_path=path)

    for name, expected in LightningFile(path).state_dict.items():
        assert torch.equal(module.state_dict()[name], expected), name


def test_a_fit_can_start_with_the_weights(tmp_path: Path, make_trainer: Callable[..., Trainer]) -> None:
    path = saved_by_lightning(tmp_path, 1)
    expected = fit_in_lightning(_loaded(path), 1)
    module = OwnModule()

    trainer = make_trainer(max_epochs=1)
    trainer.fit(module, loader(), weights=path)

    assert module.losses == pytest.approx(expected, abs=TOLERANCE)
    assert trainer.global_step == 6


def _loaded(path: Path) -> Any:
    module = lightning_module()
    module.load_state_dict(LightningFile(path).state_dict)
    return module


class Plain(nn.Module):
    """Module whose layers are in an attribute or at the top level."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.net = OwnModule().net

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = nn.functional.mse_loss(self.inner.net(inputs), targets)
        return loss


def test_weights_of_a_submodule_are_matched_in_a_plain_model(
    tmp_path: Path, make_trainer: Callable[..., Trainer]
) -> None:
    path = saved_by_lightning(tmp_path, 1)
    model = Plain()

    make_trainer(max_steps=1, optimizer="sgd", learning_rate=1e-30).fit(model, loader(), weights=path)

    for name, expected in LightningFile(path).state_dict.items():
        assert torch.equal(model.inner.state_dict()[name], expected), name


def test_load_from_checkpoint_creates_the_module_from_its_hyperparameters(tmp_path: Path) -> None:
    path = saved_by_lightning(tmp_path, 1, width=5, lr=0.25)

    module = OwnModule.load_from_checkpoint(path)

    assert (module.lr, module.net[0].out_features) == (0.25, 5)
    assert all(torch.equal(module.state_dict()[n], each) for n, each in LightningFile(path).state_dict.items())
    with pytest.raises(CheckpointError, match=r"other|shape|size"):
        OwnModule.load_from_checkpoint(path, width=6)


def test_the_loss_scale_is_restored(tmp_path: Path, make_trainer: Callable[..., Trainer]) -> None:
    path = saved_by_lightning(tmp_path, 1)
    content = torch.load(path, weights_only=True)
    scale = {
        "scale": 1024.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 7,
    }
    torch.save({**content, "MixedPrecision": scale}, path)  # Lightning has a loss scale only on GPUs
    trainer = make_trainer(max_epochs=1, precision="16-mixed")

    trainer.fit(OwnModule(), loader(), ckpt_path=path)

    assert trainer.engine.scaler is not None
    state = trainer.engine.scaler.state()
    assert (state["scale"], state["_growth_tracker"]) == (1024.0, 7)
    trainer.save_checkpoint(tmp_path / "own")
    assert LightningFile(export_lightning(tmp_path / "own", tmp_path / "out.ckpt")).scaler == scale


def test_manual_optimization_with_several_optimizers_resumes(
    tmp_path: Path, make_trainer: Callable[..., Trainer]
) -> None:
    torch.manual_seed(3)
    fit_in_lightning(by_hand(), 2, save_at=tmp_path / "x.ckpt")
    expected = fit_in_lightning(by_hand(), 4, ckpt_path=tmp_path / "x.ckpt")
    module = by_hand()
    trainer = make_trainer(max_epochs=4)

    trainer.fit(module, loader(), ckpt_path=tmp_path / "x.ckpt")

    assert module.losses == pytest.approx(expected, abs=TOLERANCE)
    assert trainer.global_step == 48


def by_hand() -> Any:
    import lightning.pytorch as pl

    class ByHand(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)
            self.losses: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                loss = nn.functional.mse_loss(self.second(self.first(batch[0])), batch[1])
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
                self.losses.append(loss.item())
            if self.trainer.is_last_batch:
                self.lr_schedulers().step()

        def configure_optimizers(self) -> Any:
            adam = torch.optim.Adam(self.first.parameters(), lr=0.05)
            sgd = torch.optim.SGD(self.second.parameters(), lr=0.05, momentum=0.9)
            return [adam, sgd], [torch.optim.lr_scheduler.ExponentialLR(adam, 0.9)]

    return ByHand()


class OneArgument(OwnModule):
    def __init__(self, hparams: Any) -> None:
        super().__init__(width=hparams.width)


def test_hyperparameters_in_one_argument_are_passed_in_this_argument(tmp_path: Path) -> None:
    state_dict = OwnModule(width=5).state_dict()
    given = {"hyper_parameters": {"width": 5}, "hparams_name": "hparams", "state_dict": state_dict}
    torch.save(given, tmp_path / "x.ckpt")

    assert OneArgument.load_from_checkpoint(tmp_path / "x.ckpt").net[0].out_features == 5


def continued(path: Path, strategy: str, batch_size: int) -> list[float]:
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = Trainer(
        strategy=strategy, devices=2, accelerator="cpu", max_epochs=4, enable_checkpointing=False, **quiet
    )
    module = OwnModule()
    trainer.fit(module, loader(batch_size), ckpt_path=path)
    return module.losses


@pytest.mark.parametrize("strategy", few(["ddp", "zero2", "zero3"]))
def test_two_ranks_resume_the_run_of_one(
    tmp_path: Path, on_ranks: RankPool, make_trainer: Callable[..., Trainer], strategy: str
) -> None:
    path = saved_by_lightning(tmp_path)
    expected = fit_in_lightning(lightning_module(), 4, ckpt_path=path)

    by_rank = on_ranks(2, continued, path, strategy, 2)

    mean = [sum(losses) / 2 for losses in zip(*by_rank, strict=True)]
    assert mean == pytest.approx(expected, abs=TOLERANCE)


class Recorded:
    """Class that records the creation of objects."""

    made: list[int] = []  # noqa: RUF012 - read by the test

    def __reduce__(self) -> tuple[Any, ...]:
        return (Recorded.made.append, (1,))


def write(path: Path, **content: Any) -> Path:
    torch.save({"state_dict": OwnModule().state_dict(), "pytorch-lightning_version": "2.6.0", **content}, path)
    return path


def test_harmless_hyperparameters_become_plain_values(tmp_path: Path) -> None:
    from lightning.fabric.utilities.data import AttributeDict

    given = {
        "nested": AttributeDict(a=AttributeDict(b=1)),
        "arguments": argparse.Namespace(folder=Path("/data/set"), depth=3),
        "lr": np.float64(0.1),
        "count": np.int32(7),
    }

    read = LightningFile(write(tmp_path / "x.ckpt", hyper_parameters=given)).hyperparameters

    plain = {"nested": {"a": {"b": 1}}, "arguments": {"folder": "/data/set", "depth": 3}, "lr": 0.1, "count": 7}
    assert read == plain
    assert type(read["lr"]) is float


def test_objects_that_would_execute_code_are_rejected_and_not_created(tmp_path: Path) -> None:
    path = write(tmp_path / "x.ckpt", hyper_parameters={"thing": random.Random(1)})

    with pytest.raises(CheckpointError, match=r"random\.Random.*weights_only=False"):
        LightningFile(path)

    path = write(tmp_path / "y.ckpt", hyper_parameters={"thing": Recorded()})
    with pytest.raises(CheckpointError, match=r"contains objects of|executing code"):
        OwnModule.load_from_checkpoint(path)
    assert Recorded.made == []


@pytest.mark.parametrize("num_bytes", [0, 1, 400, -30])
def test_a_damaged_file_is_rejected(tmp_path: Path, make_trainer: Callable[..., Trainer], num_bytes: int) -> None:
    path = write(tmp_path / "x.ckpt")
    path.write_bytes(path.read_bytes()[:num_bytes])

    with pytest.raises(CheckpointError, match=r"ckpt_path=.*cannot be read"):
        make_trainer(max_epochs=1).fit(OwnModule(), loader(), ckpt_path=path)


def test_other_files_are_rejected(tmp_path: Path, make_trainer: Callable[..., Trainer]) -> None:
    torch.save({"weights": torch.ones(2)}, tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match="no 'state_dict'"):
        make_trainer(max_epochs=1).fit(OwnModule(), loader(), ckpt_path=tmp_path / "x.ckpt")
    (tmp_path / "y.ckpt").write_bytes(pickle.dumps({"state_dict": {}}, protocol=4))
    with pytest.raises(CheckpointError):
        LightningFile(tmp_path / "y.ckpt")
    assert not is_lightning_file(tmp_path)


def test_a_file_with_only_weights_cannot_be_resumed(tmp_path: Path, make_trainer: Callable[..., Trainer]) -> None:
    path = write(tmp_path / "x.ckpt")

    with pytest.raises(CheckpointError, match=r"optimizer_states.*only the weights.*fit\(\.\.\., weights="):
        make_trainer(max_epochs=1).fit(OwnModule(), loader(), ckpt_path=path)


@pytest.mark.parametrize(
    ("own", "problem"),
    [
        ({"kind": "sgd"}, "another optimizer|groups"),
        ({"width": 9}, "shape"),
        ({"kind": "each step"}, "schedulers"),
    ],
)
def test_the_checkpoint_of_another_run_is_rejected_without_changes(
    tmp_path: Path, make_trainer: Callable[..., Trainer], own: dict[str, Any], problem: str
) -> None:
    path = saved_by_lightning(tmp_path, 1)
    module = OwnModule(**own)
    before = {name: each.clone() for name, each in module.state_dict().items()}

    with pytest.raises(CheckpointError, match=rf"ckpt_path=.*({problem})"):
        make_trainer(max_epochs=2).fit(module, loader(), ckpt_path=path)

    assert all(torch.equal(before[name], each) for name, each in module.state_dict().items())


def test_an_optimizer_of_the_trainer_rejects_the_states_of_the_modules_optimizer(
    tmp_path: Path, make_trainer: Callable[..., Trainer]
) -> None:
    path = saved_by_lightning(tmp_path, 1)

    with pytest.raises(RoomierError, match="adamw"):
        make_trainer(max_epochs=2, optimizer="adamw", learning_rate=0.1).fit(Plain(), loader(), ckpt_path=path)
