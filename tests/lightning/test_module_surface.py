"""Members of LightningModules other than steps: hyperparameters, checkpoints, copies, devices, names."""

import argparse
import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import roomier
from roomier.checkpoint import load_module, peek
from tests.lightning.both import make_trainer, quiet_lightning
from tests.lightning.modules import pl

pytestmark = pytest.mark.more

Lightning = pl.Trainer


class Line(pl.LightningModule):
    """Module that fits a line. ``hooks[name](self, ...)`` is called in the hooks that a test provides."""

    def __init__(self, width: int = 3, lr: float = 0.1, note: str = "", **hooks: Any) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=list(hooks))
        self.net = nn.Linear(width, 1)
        self.__dict__["given"] = hooks

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        if "training_step" in self.given:
            self.given["training_step"](self, batch, batch_idx)
        return self(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class Rows(roomier.Logger):
    name = "rows"

    def __init__(self) -> None:
        self.hyperparameters: dict[str, Any] = {}

    def log_metrics(self, metrics, step):
        pass

    def log_hyperparams(self, params):
        self.hyperparameters = dict(params)


def batches(count: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 3, generator=generator) for _ in range(count)]


def fit(module: Any, folder: Path, **keywords: Any) -> roomier.Trainer:
    trainer = make_trainer(roomier.Trainer, folder, **{"max_epochs": 1, **keywords})
    trainer.fit(module, batches())
    return trainer


# Hyperparameters ------------------------------------------------------------------------------------------------------


def test_hyperparameters_are_logged_saved_and_loaded(tmp_path):
    """As in Lightning, initial values are logged, and current values are saved in the checkpoint."""
    module = Line(lr=0.2, note="a")
    module.hparams["note"] = "b"
    rows = Rows()
    trainer = make_trainer(roomier.Trainer, tmp_path, max_epochs=1)
    trainer.loggers = [rows]
    trainer.logger_is_on = True
    trainer.fit(module, batches())
    assert rows.hyperparameters == {"width": 3, "lr": 0.2, "note": "a"}
    trainer.save_checkpoint(tmp_path / "a")
    assert peek(tmp_path / "a")["hyperparameters"] == {"width": 3, "lr": 0.2, "note": "b"}
    again = load_module(Line, tmp_path / "a", lr=0.5)
    assert dict(again.hparams) == {"width": 3, "lr": 0.5, "note": "b"}
    assert type(again) is Line
    assert torch.equal(again.net.weight, module.net.weight)


class Configured(pl.LightningModule):
    """Module that accepts all its hyperparameters as one argument."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.save_hyperparameters(config)
        self.net = nn.Linear(self.hparams.width, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OwnConfigured(roomier.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.save_hyperparameters(config)
        self.net = nn.Linear(self.hparams.width, 1)

    training_step = Configured.training_step
    configure_optimizers = Configured.configure_optimizers


@pytest.mark.parametrize("kind", [Configured, OwnConfigured])
@pytest.mark.parametrize("config", [{"width": 3, "depth": 2}, argparse.Namespace(width=3, depth=2)], ids=["dict", "ns"])
def test_hyperparameters_in_one_argument_are_loaded_as_one_argument(tmp_path, kind, config):
    module = kind(config)
    fit(module, tmp_path).save_checkpoint(tmp_path / "a")
    again = load_module(kind, tmp_path / "a")
    assert dict(again.hparams) == {"width": 3, "depth": 2}
    assert torch.equal(again.net.weight, module.net.weight)


def test_initial_hyperparameters_of_a_roomier_module_do_not_change():
    class Own(roomier.Module):
        def __init__(self, sizes, lr=0.1):
            super().__init__()
            self.save_hyperparameters()

    module = Own([1, 2])
    module.hparams["lr"] = 0.5
    module.hparams["sizes"].append(3)
    assert module.hparams_initial == {"sizes": [1, 2], "lr": 0.1}
    assert module.logged_hparams == {"sizes": [1, 2], "lr": 0.1}
    with pytest.raises(roomier.RoomierError, match=r"save_hyperparameters=3.*must contain named values"):
        module.save_hyperparameters(3)


# Checkpoints ----------------------------------------------------------------------------------------------------------


class Keeps(Line):
    """Module that adds entries to its checkpoints, and reads the entries of a checkpoint."""

    def on_save_checkpoint(self, checkpoint):
        self.saved = {name: checkpoint[name] for name in ("epoch", "global_step", "hyper_parameters")}
        self.saved["state_dict"] = sorted(checkpoint["state_dict"])
        checkpoint["words"] = {"list": ["a", "b"], "mean": self.net.weight.detach().mean()}

    def on_load_checkpoint(self, checkpoint):
        assert "state_dict" in checkpoint
        assert checkpoint.get("nothing", 7) == 7
        self.loaded = {name: checkpoint[name] for name in ("epoch", "global_step", "hyper_parameters", "words")}


def test_checkpoint_hooks_find_the_entries_of_lightning(tmp_path):
    module = Keeps()
    fit(module, tmp_path).save_checkpoint(tmp_path / "a")
    hyperparameters = {"width": 3, "lr": 0.1, "note": ""}
    assert module.saved == {
        "epoch": 1,
        "global_step": 3,
        "hyper_parameters": hyperparameters,
        "state_dict": ["net.bias", "net.weight"],
    }
    stored = peek(tmp_path / "a")
    assert "state_dict" not in stored  # weights are not stored twice
    mean = module.net.weight.detach().mean()

    resumed = Keeps()
    trainer = make_trainer(roomier.Trainer, tmp_path, max_epochs=2)
    trainer.fit(resumed, batches(), ckpt_path=tmp_path / "a")
    evaluated = Keeps()
    evaluated.test_step = lambda batch, batch_idx: None
    make_trainer(roomier.Trainer, tmp_path).test(evaluated, batches(), ckpt_path=tmp_path / "a")
    for each in (resumed, evaluated, load_module(Keeps, tmp_path / "a")):
        assert (each.loaded["epoch"], each.loaded["global_step"]) == (1, 3)
        assert each.loaded["hyper_parameters"] == hyperparameters
        assert each.loaded["words"]["list"] == ["a", "b"]
        assert each.loaded["words"]["mean"] == mean


class Teaches(Line):
    """Module whose teacher is not saved, and whose head is replaced if the checkpoint has a different head."""

    def __init__(self, num_heads: int = 1) -> None:
        super().__init__()
        self.teacher = nn.Linear(3, 1).requires_grad_(False)
        self.head = nn.Linear(3, num_heads)
        self.strict_loading = False

    def on_save_checkpoint(self, checkpoint):
        checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if "teacher" not in k}

    def on_load_checkpoint(self, checkpoint):
        for name in ("head.weight", "head.bias"):
            if checkpoint["state_dict"][name].shape != self.state_dict()[name].shape:
                del checkpoint["state_dict"][name]


def test_checkpoint_hooks_may_remove_and_change_weights(tmp_path, capsys):
    module = Teaches()
    fit(module, tmp_path).save_checkpoint(tmp_path / "a", weights_only=True)
    assert not any("teacher" in name for name in peek(tmp_path / "a")["module"])
    other = load_module(Teaches, tmp_path / "a", num_heads=2)
    assert torch.equal(other.net.weight, module.net.weight)
    assert not torch.equal(other.teacher.weight, module.teacher.weight)
    trained = Teaches(num_heads=2)
    head = trained.head.weight.detach().clone()
    trained.test_step = lambda batch, batch_idx: None
    make_trainer(roomier.Trainer, tmp_path).test(trained, batches(), ckpt_path=tmp_path / "a")
    assert torch.equal(trained.net.weight, module.net.weight)
    assert torch.equal(trained.head.weight, head)
    assert "strict_loading=False: ignoring 4 weights that are not in both" in capsys.readouterr().err


def test_strict_module_reports_differing_weights(tmp_path):
    module = Teaches()
    trainer = fit(module, tmp_path)
    trainer.save_checkpoint(tmp_path / "a", weights_only=True)
    module.strict_loading = True
    module.test_step = lambda batch, batch_idx: None
    with pytest.raises(roomier.core.errors.CheckpointError, match=r"teacher\.bias, teacher\.weight"):
        make_trainer(roomier.Trainer, tmp_path).test(module, batches(), ckpt_path=tmp_path / "a")


# The object itself ----------------------------------------------------------------------------------------------------


def copies(module: nn.Module) -> list[Any]:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return [copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(file, weights_only=False)]


class Portable(Line):
    """Module that can be pickled, because it contains no function of a test."""

    def __init__(self) -> None:
        super().__init__()
        self.copied: list[Any] = []

    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            self.copied = copies(self)
        return super().training_step(batch, batch_idx)


def test_copies_have_the_class_of_the_user(tmp_path):
    module = Portable()
    fit(module, tmp_path)
    made, module.copied = module.copied, []
    for each in (*made, *copies(module)):
        assert type(each) is Portable
        assert each._trainer is None
        assert each(torch.ones(1, 3)).shape == (1, 1)
    assert torch.equal(copies(module)[0].net.weight, module.net.weight)


def test_object_can_alternate_between_both_trainers(tmp_path):
    """The result equals the result of a run with one Trainer."""

    def train(kinds: list[Any]) -> Line:
        torch.manual_seed(0)
        module = Line()
        for kind in kinds:
            with quiet_lightning():
                make_trainer(kind, tmp_path, max_epochs=1).fit(module, torch.utils.data.DataLoader(batches(), None))
            assert type(module) is Line
        return module

    alone = train([Lightning] * 4)
    mixed = train([roomier.Trainer, Lightning, roomier.Trainer, Lightning])
    assert torch.equal(alone.net.weight, mixed.net.weight)


def test_methods_and_attributes_within_a_run(tmp_path, capsys):
    seen = {}

    def look(module, batch, batch_idx):
        seen["device"], seen["dtype"], seen["on_gpu"] = module.device, module.dtype, module.on_gpu
        seen["ranks"] = module.global_rank, module.local_rank, module.trainer.is_global_zero
        seen["gathered"] = module.all_gather({"a": batch, "b": [2, 0.5]})
        seen["epoch"] = module.current_epoch, module.global_step
        seen["logger"] = module.logger, module.loggers
        module.print("said", batch_idx)

    def run(kind: Any) -> dict[str, Any]:
        seen.clear()
        with quiet_lightning():
            trainer = make_trainer(kind, tmp_path, max_epochs=2)
            trainer.fit(Line(training_step=look), torch.utils.data.DataLoader(batches(), None))
        return dict(seen)

    here, there = run(roomier.Trainer), run(Lightning)
    assert capsys.readouterr().out.count("said 2") == 4
    gathered, expected = here.pop("gathered"), there.pop("gathered")
    assert here == there
    assert torch.equal(gathered["a"], expected["a"])
    assert [float(each) for each in gathered["b"]] == [float(each) for each in expected["b"]]
    assert all(isinstance(each, torch.Tensor) for each in gathered["b"])


def test_log_and_optimizers_after_a_run(tmp_path, capsys):
    module = Line()
    trainer = fit(module, tmp_path, enable_progress_bar=True)
    module.print("printed")
    assert capsys.readouterr().out == "printed\n"
    with pytest.raises(roomier.RoomierError, match=r"^log=.Line.: cannot log outside of a step or epoch"):
        module.log("loss", 0.0)
    assert module.optimizers() is trainer.manual_optimizers[0]
    assert module.optimizers(use_pl_optimizer=False) is trainer.optimizers[0]


def test_device_and_dtype_after_a_run(tmp_path):
    module = Line()
    fit(module, tmp_path, precision="bf16-true")
    assert module.dtype == module.net.weight.dtype == torch.bfloat16
    assert module.device == module.net.weight.device


def test_freezing_in_a_hook_takes_effect(tmp_path):
    class Freezes(Line):
        def on_fit_start(self):
            self.net.bias.requires_grad_(False)

        def on_train_end(self):
            self.freeze()

    module = Freezes()
    bias = module.net.bias.detach().clone()
    fit(module, tmp_path)
    assert torch.equal(module.net.bias, bias)
    assert not module.net.weight.requires_grad
    module.unfreeze()
    assert module.net.weight.requires_grad
    assert module.training


def test_callbacks_of_the_module_replace_callbacks_of_the_trainer(tmp_path):
    calls = []

    class Counts(pl.Callback):
        def __init__(self, name):
            self.name = name

        def on_train_start(self, trainer, pl_module):
            calls.append((self.name, isinstance(pl_module, Brings)))

    class Brings(Line):
        def configure_callbacks(self):
            return Counts("the module's")

    fit(Brings(), tmp_path, callbacks=[Counts("the trainer's")])
    assert calls == [("the module's", True)]


def test_model_created_in_configure_model_is_trained_and_saved(tmp_path):
    class Late(Line):
        def __init__(self):
            super().__init__()
            self.late = None

        def configure_model(self):
            if self.late is None:
                self.late = nn.Linear(3, 3)

        def forward(self, x):
            return self.net(self.late(x))

    module = Late()
    fit(module, tmp_path).save_checkpoint(tmp_path / "a")
    assert torch.equal(load_module(Late, tmp_path / "a").late.weight, module.late.weight)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("training_step", None, "Broken"),
        ("configure_optimizers", pl.LightningModule.configure_optimizers, "Broken"),
        ("configure_optimizers", lambda self: [torch.optim.SGD(self.parameters(), lr=0.1)] * 2, "2 optimizers"),
        ("validation_epoch_end", lambda self, outputs: None, "on_validation_epoch_end"),
    ],
    ids=["no step", "no optimizer", "two optimizers", "hook of Lightning 1"],
)
def test_errors_contain_the_class_of_the_user(tmp_path, name, value, message):
    kind = type("Broken", (Line,), {name: value or pl.LightningModule.training_step})
    with pytest.raises(roomier.RoomierError) as caught:
        fit(kind(), tmp_path)
    assert message in str(caught.value)
    assert "Adapter" not in str(caught.value)


def test_misspelled_hook_is_reported_but_not_methods_of_lightning(tmp_path, capsys):
    class Misspelled(Line):
        def on_train_epoch_ends(self):
            pass

    fit(Misspelled(), tmp_path)
    lines = [line for line in capsys.readouterr().err.splitlines() if "is not a hook" in line]
    assert lines == [
        "roomier: Misspelled.on_train_epoch_ends is not a hook and is never called; did you mean on_train_epoch_end?"
    ]
