"""The loop around the steps of a pipeline: metrics, predictions, statistics of BatchNorm, checkpoints, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import roomier
from roomier.callbacks import Callback, EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint, WeightAveraging
from roomier.checkpoint.export.plain import plain_model
from roomier.core.errors import RoomierError
from tests.ranks.pool import RankFailed, RankPool


class Net(roomier.Module):
    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Tanh()) for _ in range(4)
        )
        self.leave = nn.Linear(8, 1)
        self.error = torchmetrics.MeanAbsoluteError()
        self.double()
        self.fails_at = fails_at

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        for block in self.blocks:
            h = h + block(h)
        out: Tensor = self.leave(h)
        return out

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == self.fails_at and self.trainer.global_rank == 1:
            raise ValueError("no such sample")
        self.log("input", batch[0].mean(), on_epoch=True)
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        out: Tensor = self(batch[0])
        self.error(out, batch[1])
        self.log("error", self.error)
        self.log("val_loss", nn.functional.mse_loss(out, batch[1]))
        return out

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.03)


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(35, size, generator=generator, dtype=torch.float64) for size in (4, 1)]
    return DataLoader(TensorDataset(*tensors), batch_size=4)  # the last batch has 3 samples


INTERLEAVED = {"schedule": "interleaved_1f1b", "stages_per_rank": 2}


def trainer_of(folder: str, num_stages: int, settings: Any = (), **options: Any) -> roomier.Trainer:
    strategy = {"name": "ddp", "pipeline_parallel_size": num_stages, **dict(settings)}
    return roomier.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        **{
            "strategy": "single" if num_stages == 1 else strategy,
            "devices": num_stages,
            "precision": "64-true",
            "seeding": "events",
            "accumulate_grad_batches": 2,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **options,
        },
    )


def run(folder: str, num_stages: int) -> Any:
    net = Net()
    roomier.seed_everything(3)
    best = ModelCheckpoint(monitor="val_loss")
    callbacks = [EarlyStopping("error", patience=0), best]
    trainer = trainer_of(folder, num_stages, max_epochs=6, callbacks=callbacks)
    before = trainer.validate(net, loader())  # runs the full network on each rank
    trainer.fit(net, loader(), loader())
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if not name.endswith("_step")}
    outputs = torch.cat(trainer.predict(net, loader()))
    after = trainer.validate(net, loader())
    return trainer.global_step, float(best.best_model_score), metrics, before, after, outputs


def test_metrics_and_predictions_are_those_of_one_process(on_ranks: RankPool, tmp_path: Any) -> None:
    step, best, metrics, before, after, outputs = run(str(tmp_path / "one"), 1)
    for results in on_ranks(2, run, str(tmp_path / "two"), 2):
        assert results[0] == step
        assert results[1] == pytest.approx(best, rel=1e-9)
        for own, expected in zip([results[2], *results[3], *results[4]], [metrics, *before, *after], strict=True):
            assert own == pytest.approx({name: expected[name] for name in own}, rel=1e-9)
            assert {"error", "val_loss"} <= own.keys()
        torch.testing.assert_close(results[5], outputs, rtol=1e-9, atol=1e-12)


def trained(
    folder: str, num_stages: int, max_steps: int, ckpt_path: str | None = None, settings: Any = ()
) -> dict[str, Tensor]:
    """Train until ``max_steps``, save a checkpoint, and return this rank's weights."""
    net = Net()
    roomier.seed_everything(3 if ckpt_path is None else 4)
    trainer = trainer_of(folder, num_stages, settings, max_steps=max_steps, enable_checkpointing=False)
    trainer.fit(net, loader(), ckpt_path=ckpt_path)
    trainer.save_checkpoint(f"{folder}/{num_stages}")
    return {name: each.detach().clone() for name, each in net.named_parameters() if not each.is_meta}


@pytest.mark.more
@pytest.mark.parametrize(
    ("first", "second", "settings"),
    [(1, 2, {}), (2, 1, {}), (2, 4, {}), (4, 2, {}), (2, 1, INTERLEAVED), (1, 3, INTERLEAVED)],
)
def test_a_run_resumes_with_another_number_of_stages(
    on_ranks: RankPool, tmp_path: Any, first: int, second: int, settings: dict[str, Any]
) -> None:
    expected = trained(str(tmp_path / "whole"), 1, 7)
    folder = str(tmp_path / "parts")
    trained(folder, 1, 3) if first == 1 else on_ranks(first, trained, folder, first, 3, None, settings)
    arguments = (folder, second, 7, f"{folder}/{first}", settings)
    results = [trained(*arguments)] if second == 1 else on_ranks(second, trained, *arguments)
    weights = {name: each for of_rank in results for name, each in of_rank.items()}
    assert weights.keys() == expected.keys()
    for name, each in expected.items():
        torch.testing.assert_close(weights[name], each, rtol=1e-10, atol=1e-12, msg=name)


def fit_and_export(folder: str) -> tuple[dict[str, Tensor], str]:
    """Return this rank's weights, and the error of an export of this rank's module."""
    net = Net()
    trainer = trainer_of(folder, 2, max_steps=2, enable_checkpointing=False)
    trainer.fit(net, loader())
    trainer.save_checkpoint(f"{folder}/saved")
    with pytest.raises(RoomierError) as error:
        net.to_torchscript()
    return {name: each.detach() for name, each in net.named_parameters() if not each.is_meta}, str(error.value)


def test_the_checkpoint_of_stages_is_exported(on_ranks: RankPool, tmp_path: Any) -> None:
    results = on_ranks(2, fit_and_export, str(tmp_path))
    model = plain_model(tmp_path / "saved", Net)
    for weights, error in results:
        assert "must not be sharded or divided into stages. Export the checkpoint" in error
        for name, each in weights.items():
            assert torch.equal(each, model.get_parameter(name))
    assert isinstance(model, Net)
    x = loader().dataset[:3][0]
    assert torch.equal(model.to_torchscript(method="trace", example_inputs=x)(x), model(x))


class ReadsLate(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if len(batch[0]) == 3:  # the last batch
            loss = loss + self.enter.weight.square().sum()
        return loss


def fit_with_late_read(folder: str) -> None:
    trainer_of(folder, 2, max_epochs=1, enable_checkpointing=False).fit(ReadsLate(), loader())


def test_a_parameter_of_another_stage_is_named(on_ranks: RankPool, tmp_path: Any) -> None:
    with pytest.raises(
        RankFailed, match=r"training_step='enter\.weight': is used on another stage than with the first"
    ):
        on_ranks(2, fit_with_late_read, str(tmp_path))


def fit_with_error(folder: str) -> None:
    trainer = trainer_of(folder, 2, max_epochs=1, enable_checkpointing=False)
    trainer.fit(Net(fails_at=3), loader())


class OwnBackward(Net):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class OwnStep(Net):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)


class OwnStart(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.start = batch_idx


class ReadsGradients(Callback):
    def on_after_backward(self, trainer: Any, pl_module: roomier.Module) -> None:
        pass


def error_of(folder: str, kind: type[Net], callbacks: list[Any], settings: Any = ()) -> str:
    net = kind()
    trainer = trainer_of(folder, 2, settings, max_epochs=1, callbacks=callbacks)
    with pytest.raises(RoomierError) as caught:
        trainer.fit(net, loader())
    assert not any(each.is_meta for each in net.parameters())  # the model has kept its weights
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "callbacks", "settings", "text"),
    [
        (OwnBackward, [], {}, "backward='OwnBackward': is not supported with stages"),
        (OwnStep, [], {}, "optimizer_step='OwnStep': is not supported with stages"),
        (Net, [WeightAveraging()], {}, "callbacks='WeightAveraging': is not supported with stages"),
        (Net, [OnExceptionCheckpoint("")], {}, "OnExceptionCheckpoint='ddp': is not supported, because each rank has"),
        (OwnStart, [], INTERLEAVED, "on_train_batch_start='OwnStart': is not supported with several stages per rank"),
        (Net, [ReadsGradients()], INTERLEAVED, "on_after_backward='ReadsGradients': is not supported with several"),
    ],
    ids=["backward", "optimizer_step", "averaging", "on exception", "on_train_batch_start", "on_after_backward"],
)
def test_what_needs_the_full_model_or_gradients_is_rejected(
    on_ranks: RankPool, tmp_path: Any, kind: type[Net], callbacks: list[Any], settings: Any, text: str
) -> None:
    assert all(text in each for each in on_ranks(2, error_of, str(tmp_path), kind, callbacks, settings))


def test_an_error_names_the_stage_and_the_micro_batch(on_ranks: RankPool, tmp_path: Any) -> None:
    with pytest.raises(RankFailed, match="forward pass of micro-batch 1 on stage 1 of 2"):
        on_ranks(2, fit_with_error, str(tmp_path))
