"""Lightning's callbacks with roomier's Trainer: callbacks are used directly, replaced with a notice, or rejected."""

from __future__ import annotations

import os
import pkgutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import roomier
from roomier import callbacks as own
from roomier.core.errors import RoomierError
from roomier.trainer.lightning import callbacks as lightning_callbacks
from tests.lightning.both import quiet_lightning
from tests.lightning.modules import pl

pytestmark = pytest.mark.more

NAMES = [name for name in pl.callbacks.__all__ if name not in ("Callback", "Checkpoint", "BasePredictionWriter")]


class Net(pl.LightningModule):
    """Module whose validation loss is best after the second epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.head(self.backbone(batch[0])).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", [0.5, 0.25, 0.75, 1.0][min(self.current_epoch, 3)])

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.head(self.backbone(batch[0]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=0.1)


def loader(num_samples: int = 8) -> Any:
    return DataLoader(TensorDataset(torch.ones(num_samples, 4)), batch_size=4)


def trainer_of(kind: Any, folder: Path, *callbacks: Any, **keywords: Any) -> Any:
    quiet = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
    return kind(**{**quiet, "default_root_dir": folder, "callbacks": list(callbacks), **keywords})


def fit(kind: Any, folder: Path, *callbacks: Any, **keywords: Any) -> Any:
    torch.manual_seed(0)
    trainer = trainer_of(kind, folder, *callbacks, **{"max_epochs": 4, **keywords})
    with quiet_lightning():
        trainer.fit(Net(), loader(), loader(4))
    return trainer


def notices(captured: Any) -> list[str]:
    return [line for line in captured.err.splitlines() if "Lightning's" in line]


# All callbacks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_each_callback_of_lightning_is_accepted_or_rejected_with_a_message(name: str) -> None:
    ways = [
        name in lightning_callbacks.AS_THEY_ARE,
        name in lightning_callbacks.MADE,
        name in lightning_callbacks.REFUSED,
    ]
    assert sum(ways) == 1


def test_names_of_roomier_in_the_messages_exist() -> None:
    for sentence in lightning_callbacks.REFUSED.values():
        for word in sentence.replace("(", " ").split():
            if word.startswith("roomier.callbacks."):
                assert hasattr(own, word.rpartition(".")[2]), sentence


def test_all_callbacks_of_lightning_are_covered() -> None:
    modules = {each.name for each in pkgutil.iter_modules(pl.callbacks.__path__)}
    assert {"early_stopping", "model_checkpoint", "timer"} <= modules
    assert set(NAMES) <= {*lightning_callbacks.AS_THEY_ARE, *lightning_callbacks.MADE, *lightning_callbacks.REFUSED}


# Used directly --------------------------------------------------------------------------------------------------------


def test_early_stopping_stops_like_lightning(tmp_path: Path) -> None:
    stops = [pl.callbacks.EarlyStopping("val_loss", patience=1) for _ in range(2)]
    trainers = [fit(kind, tmp_path, stop) for kind, stop in zip((pl.Trainer, roomier.Trainer), stops, strict=True)]
    theirs, ours = [(each.stopped_epoch, each.wait_count, float(each.best_score)) for each in stops]
    assert ours == theirs == (2, 1, 0.25)
    assert [each.current_epoch for each in trainers] == [3, 3]
    assert trainers[1].early_stopping_callback is stops[1]


def test_early_stopping_reads_values_logged_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    class Late(Net):
        def on_train_epoch_end(self) -> None:
            self.log("late", 1.0)

    stop = pl.callbacks.EarlyStopping("late", patience=1, check_on_train_epoch_end=True)
    trainer = trainer_of(roomier.Trainer, tmp_path, stop, max_epochs=4, logger=False, enable_checkpointing=False)
    trainer.fit(Late(), loader())
    assert stop.stopped_epoch == 1


def test_timer_ends_training(tmp_path: Path) -> None:
    timer = pl.callbacks.Timer(duration={"microseconds": 1})
    with quiet_lightning():
        trainer = fit(roomier.Trainer, tmp_path, timer)
    assert trainer.global_step <= 1
    assert timer.time_elapsed("train") > 0


def test_lambdas_are_called(tmp_path: Path) -> None:
    called: list[int] = []
    callback = pl.callbacks.LambdaCallback(on_train_epoch_start=lambda trainer, module: called.append(1))
    fit(roomier.Trainer, tmp_path, callback, max_epochs=2)
    assert called == [1, 1]


def test_states_of_lightning_callbacks_are_resumed(tmp_path: Path) -> None:
    class Counts(pl.Callback):
        def __init__(self, name: str) -> None:
            self.name, self.count = name, 0

        @property
        def state_key(self) -> str:
            return f"Counts[{self.name}]"

        def on_train_batch_end(self, *_: Any) -> None:
            self.count += 1

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.count = state_dict["count"]

    whole, stop = [Counts("a"), Counts("b")], pl.callbacks.EarlyStopping("val_loss", patience=3)
    fit(roomier.Trainer, tmp_path / "whole", *whole, stop)
    first = [Counts("a"), Counts("b")]
    fit(roomier.Trainer, tmp_path / "parts", *first, pl.callbacks.EarlyStopping("val_loss", patience=3), max_epochs=2)
    again, stop_again = [Counts("a"), Counts("b")], pl.callbacks.EarlyStopping("val_loss", patience=3)
    trainer = trainer_of(roomier.Trainer, tmp_path / "parts", *again, stop_again, max_epochs=4)
    trainer.fit(Net(), loader(), loader(4), ckpt_path="last")
    assert [each.count for each in again] == [each.count for each in whole] == [8, 8]
    assert (stop_again.wait_count, float(stop_again.best_score)) == (stop.wait_count, float(stop.best_score))


def test_configure_callbacks_may_return_lightning_callbacks(tmp_path: Path, capsys: Any) -> None:
    class Configures(Net):
        def configure_callbacks(self) -> Any:
            self.best = pl.callbacks.ModelCheckpoint(monitor="val_loss")
            return [self.best, pl.callbacks.EarlyStopping("val_loss", patience=1)]

    module, trainer = Configures(), trainer_of(roomier.Trainer, tmp_path, max_epochs=4)
    trainer.fit(module, loader(), loader(4))
    assert len(trainer.checkpoint_callbacks) == 1  # the default callback was replaced
    assert os.path.basename(module.best.best_model_path) == "epoch=1-step=4"
    assert trainer.current_epoch == 3
    trainer.fit(module, loader(), loader(4))
    assert len(trainer.checkpoint_callbacks) == 1


# Replaced -------------------------------------------------------------------------------------------------------------


def test_model_checkpoint_object_is_updated(tmp_path: Path, capsys: Any) -> None:
    shown: dict[str, dict[str, Any]] = {}
    for kind in (pl.Trainer, roomier.Trainer):
        given = pl.callbacks.ModelCheckpoint(
            dirpath=tmp_path / kind.__module__,
            monitor="val_loss",
            save_top_k=2,
            save_last="link",
            filename="at-{epoch}",
        )
        during: list[str] = []

        class Reads(pl.Callback):
            def on_train_epoch_start(self, trainer: Any, pl_module: Any, given=given, during=during) -> None:
                during.append(given.best_model_path)

        trainer = fit(kind, tmp_path, given, Reads())
        best, worst = given.best_model_path, given.kth_best_model_path
        names = [Path(path).stem for path in (best, worst, *given.best_k_models, *during)]
        figures = [given.best_model_score, given.kth_value, given.current_score, *given.best_k_models.values()]
        shown[kind.__module__] = {
            "names": names,
            "figures": [float(each) for each in figures],
            "folder": given.dirpath == str(tmp_path / kind.__module__),
            "monitor": given.monitor,
            "of the trainer": trainer.checkpoint_callback.best_model_path == best,
            "last": os.path.exists(given.last_model_path),
        }
    theirs, ours = shown.values()
    assert ours == theirs
    assert ours["names"][:2] == ["at-epoch=1", "at-epoch=0"]
    assert len(notices(capsys.readouterr())) == 1


def test_model_checkpoint_resumes_with_its_ledger(tmp_path: Path) -> None:
    whole = pl.callbacks.ModelCheckpoint(monitor="val_loss", save_top_k=2)
    fit(roomier.Trainer, tmp_path / "whole", whole)
    fit(
        roomier.Trainer,
        tmp_path / "parts",
        pl.callbacks.ModelCheckpoint(monitor="val_loss", save_top_k=2),
        max_epochs=2,
    )
    for kind in (pl, own):  # roomier's callback reads the ledger of Lightning's callback, which roomier replaced
        again = (kind.callbacks if kind is pl else kind).ModelCheckpoint(monitor="val_loss", save_top_k=2)
        trainer = trainer_of(roomier.Trainer, tmp_path / "parts", again, max_epochs=4)
        trainer.fit(Net(), loader(), loader(4), ckpt_path="last")
        assert [Path(path).name for path in again.best_k_models] == [Path(path).name for path in whole.best_k_models]
        assert again.best_model_score == whole.best_model_score == 0.25


def test_best_checkpoint_is_found_as_best_and_by_path(tmp_path: Path) -> None:
    given = pl.callbacks.ModelCheckpoint(monitor="val_loss")
    trainer = fit(roomier.Trainer, tmp_path, given)
    module = Net()
    for ckpt_path in ("best", given.best_model_path):
        (metrics,) = trainer.validate(module, loader(4), ckpt_path=ckpt_path, verbose=False)
        assert metrics.keys() == {"val_loss"}
        assert trainer.ckpt_path == given.best_model_path
    trainer.validate(module, loader(4), verbose=False)
    assert trainer.ckpt_path is None  # a model was passed, so its weights are used
    trainer.validate(dataloaders=loader(4), verbose=False)
    assert trainer.ckpt_path == given.best_model_path
    assert trainer.predict(dataloaders=loader(4), ckpt_path="last") is not None


def test_learning_rates_are_stored_in_the_object_of_the_user(tmp_path: Path) -> None:
    given = pl.callbacks.LearningRateMonitor("epoch")
    fit(roomier.Trainer, tmp_path, given, max_epochs=2)
    assert given.lrs == {"lr-SGD": [0.1, 0.1]}


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (lambda folder: pl.callbacks.ModelSummary(max_depth=2), "ModelSummary"),
        (lambda folder: pl.callbacks.RichModelSummary(max_depth=2), "RichModelSummary"),
        (lambda folder: pl.callbacks.TQDMProgressBar(refresh_rate=10), "ProgressBar"),
        (lambda folder: pl.callbacks.RichProgressBar(), "ProgressBar"),
        (lambda folder: pl.callbacks.DeviceStatsMonitor(cpu_stats=True), "DeviceStatsMonitor"),
        (lambda folder: pl.callbacks.OnExceptionCheckpoint(folder), "OnExceptionCheckpoint"),
        (lambda folder: pl.callbacks.WeightAveraging(), "WeightAveraging"),
        (lambda folder: pl.callbacks.EMAWeightAveraging(decay=0.5), "WeightAveraging"),
        (lambda folder: pl.callbacks.BackboneFinetuning(1), "BackboneFinetuning"),
        (lambda folder: pl.callbacks.GradientAccumulationScheduler({0: 1, 2: 2}), "GradientAccumulationScheduler"),
        (lambda folder: pl.callbacks.StochasticWeightAveraging(0.05, 1), "StochasticWeightAveraging"),
    ],
)
def test_callbacks_that_use_the_loops_of_lightning_are_replaced(
    given: Any, kind: str, tmp_path: Path, capsys: Any
) -> None:
    with quiet_lightning():
        callback = given(tmp_path)
    trainer = fit(roomier.Trainer, tmp_path, callback, max_epochs=3)
    assert sum(isinstance(each, getattr(own, kind)) for each in trainer.callbacks) == 1
    assert not any(each is callback for each in trainer.callbacks)
    assert f"runs as roomier.callbacks.{kind}" in notices(capsys.readouterr())[0]
    assert trainer.current_epoch == 3


def test_checkpoint_names_are_kept_with_a_notice_about_folders(tmp_path: Path, capsys: Any) -> None:
    with quiet_lightning():
        callback = pl.callbacks.ModelCheckpoint(monitor="val_los")
    with pytest.raises(roomier.RoomierError, match=r"^ModelCheckpoint\(monitor\)='val_los'"):
        fit(roomier.Trainer, tmp_path, callback, max_epochs=1)
    assert "folders, for ckpt_path= and roomier.checkpoint.load_module(cls, path)" in capsys.readouterr().err


def test_class_instead_of_a_callback_is_rejected() -> None:
    with pytest.raises(roomier.RoomierError, match=r"must be an instance, not a class. Pass EarlyStopping\(...\)"):
        roomier.Trainer(callbacks=[pl.callbacks.EarlyStopping])  # type: ignore[list-item]


def test_weight_averaging_equals_lightning(tmp_path: Path) -> None:
    class Later(pl.callbacks.EMAWeightAveraging):
        def should_update(self, step_idx: Any = None, epoch_idx: Any = None) -> bool:
            return step_idx is not None and step_idx >= 3

    weights = []
    for kind in (pl.Trainer, roomier.Trainer):
        trainer = fit(kind, tmp_path, Later(decay=0.5))
        weights.append([each.detach().clone() for each in trainer.lightning_module.parameters()])
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-6, atol=1e-7)


def test_finetuning_equals_lightning_and_is_resumed(tmp_path: Path) -> None:
    class Thaws(pl.callbacks.BaseFinetuning):
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.backbone)

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=0.01)

    found = []
    for kind in (pl.Trainer, roomier.Trainer):
        trainer = fit(kind, tmp_path / kind.__module__, Thaws(), max_epochs=3)
        found.append([each.detach().clone() for each in trainer.lightning_module.parameters()])
        assert [len(group["params"]) for group in trainer.optimizers[0].param_groups] == [2, 2]
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-7)
    fit(roomier.Trainer, tmp_path / "parts", Thaws(), max_epochs=2)
    again = trainer_of(roomier.Trainer, tmp_path / "parts", Thaws(), max_epochs=3)
    module = Net()
    again.fit(module, loader(), loader(4), ckpt_path="last")
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), found[1], strict=True))


@pytest.mark.parametrize("interval", ["batch", "epoch", "batch_and_epoch"])
def test_prediction_writer_receives_the_arguments_of_lightning(interval: str, tmp_path: Path) -> None:
    class Writes(pl.callbacks.BasePredictionWriter):
        def __init__(self) -> None:
            super().__init__(interval)
            self.seen: list[Any] = []

        def write_on_batch_end(
            self, trainer: Any, module: Any, prediction: Any, batch_indices: Any, *rest: Any
        ) -> None:
            self.seen.append((prediction.tolist(), batch_indices, len(rest[0][0]), *rest[1:]))

        def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
            self.seen.append(([each.tolist() for each in predictions], batch_indices))

    torch.manual_seed(0)
    module, writers = Net(), [Writes(), Writes()]
    for kind, writer in zip((pl.Trainer, roomier.Trainer), writers, strict=True):
        trainer = trainer_of(kind, tmp_path, writer, logger=False, enable_checkpointing=False)
        with quiet_lightning():
            assert trainer.predict(module, loader(6), return_predictions=False) is None
    assert writers[1].seen == writers[0].seen
    assert writers[1].seen


# Rejected -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: pl.callbacks.LearningRateFinder(), "auto_lr_find=True"),
        (lambda: pl.callbacks.BatchSizeFinder(), "auto_scale_batch_size=True"),
        (lambda: pl.callbacks.ModelPruning("l1_unstructured"), "torch.nn.utils.prune"),
        (lambda: pl.callbacks.ThroughputMonitor(len), "roomier.callbacks.Throughput"),
    ],
)
def test_unsupported_callbacks_are_rejected_with_a_replacement(make: Any, said: str) -> None:
    with pytest.raises(RoomierError, match="uses the internals of Lightning's loops") as caught:
        roomier.Trainer(accelerator="cpu", callbacks=[make()])
    assert said in caught.value.action


def test_overridden_method_that_would_not_be_called_is_reported() -> None:
    class Names(pl.callbacks.ModelCheckpoint):
        def format_checkpoint_name(self, *arguments: Any, **keywords: Any) -> str:
            return "mine"

        def mine(self) -> str:
            return "not used"

    with pytest.raises(RoomierError, match="would not call its methods format_checkpoint_name") as caught:
        roomier.Trainer(accelerator="cpu", callbacks=Names())
    assert "mine" not in caught.value.problem.replace("format_checkpoint_name", "")


def test_custom_progress_bar_is_ignored_with_a_notice(capsys: Any) -> None:
    class Bar(pl.callbacks.TQDMProgressBar):
        def init_train_tqdm(self, *arguments: Any) -> Any:
            return {}

    roomier.Trainer(accelerator="cpu", callbacks=Bar())
    assert "its methods init_train_tqdm are not called" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda given: setattr(given, "CHECKPOINT_NAME_LAST", "newest"), "CHECKPOINT_NAME_LAST"),
    ],
)
def test_unsupported_options_of_model_checkpoint_are_reported(change: Any, said: str) -> None:
    given = pl.callbacks.ModelCheckpoint()
    change(given)
    with pytest.raises(RoomierError, match=said):
        roomier.Trainer(accelerator="cpu", callbacks=[given])
