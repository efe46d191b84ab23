"""``profiler="simple"``, ``"advanced"`` and ``"pytorch"``, and Lightning's profiler objects."""

import copy

import pytest
import torch
from lightning.pytorch import profilers
from torch import nn

import roomier

pytestmark = pytest.mark.more

STEPS = 5


class Net(roomier.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 2)

    def training_step(self, batch, batch_idx):
        with self.trainer.profiler.profile("own action"):
            return slow_product(self.net, batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch).mean())

    def on_train_epoch_end(self):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def slow_product(net, batch):
    return net(batch).square().mean()


class Watches(roomier.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        pass


@pytest.fixture
def data():
    return [torch.ones(3, 2)] * STEPS


def fitted(make_trainer, profiler, data, **keywords):
    module = Net()
    trainer = make_trainer(
        max_epochs=1,
        profiler=profiler,
        callbacks=[Watches()],
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,
        **keywords,
    )
    trainer.fit(module, data, data[:2])
    return trainer, module


def test_simple_reports_actions(make_trainer, data, tmp_path, capsys):
    roomier.seed_everything(0)
    plain, _ = fitted(make_trainer, None, data)
    roomier.seed_everything(0)
    trainer, module = fitted(make_trainer, "simple", data, logger=True)
    counts = {name: len(all_s) for name, all_s in trainer.profiler.durations_s.items()}
    assert counts == {
        "train_dataloader_next": STEPS + 1,  # the last call reaches the end of the loader
        "run_training_batch": STEPS,
        "training_step": STEPS,
        "own action": STEPS,
        "clip_gradients": STEPS,
        "optimizer_step": STEPS,
        "validation_step": 2,
        "[Callback]Watches.on_train_batch_end": STEPS,
        "[LightningModule]Net.on_train_epoch_end": 1,
    } | {name: count for name, count in counts.items() if name.startswith("[Callback]")}
    totals = {name: sum(all_s) for name, all_s in trainer.profiler.durations_s.items()}
    assert totals["own action"] <= totals["training_step"] <= totals["run_training_batch"]
    assert torch.equal(trainer.callback_metrics["val_loss"], plain.callback_metrics["val_loss"])
    report = (tmp_path / "version_0" / "profile" / "simple.txt").read_text()
    assert "optimizer_step" in report
    assert report in capsys.readouterr().err + "\n"
    assert not {"training_step", "validation_step"} & vars(module).keys()
    assert plain.global_step == trainer.global_step == STEPS


def test_a_profiled_run_computes_the_same(make_trainer, data):
    weights = []
    for profiler in (None, "simple", "advanced"):
        roomier.seed_everything(0)
        _, module = fitted(make_trainer, profiler, data)
        weights.append(module.net.weight.detach().clone())
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])


def test_advanced_reports_functions(make_trainer, data, capsys):
    trainer, _ = fitted(make_trainer, "advanced", data)
    assert "slow_product" in capsys.readouterr().err
    assert "slow_product" in trainer.profiler.summary()
    assert copy.deepcopy(trainer).profiler.summary() == ""


def test_pytorch_reports_operations(make_trainer, data, capfd):
    fitted(make_trainer, "pytorch", [*data, *data])
    assert "aten::" in capfd.readouterr().err  # the operations with the longest time


@pytest.mark.parametrize("kind", [profilers.SimpleProfiler, profilers.AdvancedProfiler, profilers.PassThroughProfiler])
def test_profilers_of_lightning(make_trainer, data, kind, tmp_path):
    profiler = kind() if kind is profilers.PassThroughProfiler else kind(dirpath=tmp_path, filename="report")
    trainer, _ = fitted(make_trainer, profiler, data)
    assert trainer.profiler is profiler
    if kind is not profilers.PassThroughProfiler:
        [report] = tmp_path.glob("fit-report*")
        assert "training_step" in report.read_text()


def test_evaluations_are_profiled(make_trainer, data, capsys):
    make_trainer(profiler="simple").validate(Net(), data)
    assert "validation_step" in capsys.readouterr().err
