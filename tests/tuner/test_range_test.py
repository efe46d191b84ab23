"""The range test: learning rates, end of the test, and rejected arguments."""

import math
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import roomier
from roomier.core.errors import RoomierError
from roomier.train.settling import job
from roomier.tuner import Tuner, lr_find
from tests.tuner.conftest import Named, Net, shuffled


class Recording(Net):
    """Module that records the learning rates of its optimizer in the class, because a copy is trained."""

    rates: ClassVar[list[list[float]]] = []

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.rates.append([group["lr"] for group in optimizer.param_groups])


@pytest.fixture(autouse=True)
def nothing_recorded() -> None:
    Recording.rates.clear()


@pytest.mark.parametrize("mode", ["exponential", "linear"])
def test_rates_rise_from_the_first_to_the_last(make_trainer, loader, mode: str) -> None:
    curve = lr_find(make_trainer(), Recording(), loader, min_lr=1e-4, max_lr=1e-2, num_training=21, mode=mode)
    used = [rate for [rate] in Recording.rates]
    assert used == pytest.approx(list(curve.learning_rates))
    assert (used[0], used[-1], len(used)) == (pytest.approx(1e-4), pytest.approx(1e-2), 21)
    middle = 1e-3 if mode == "exponential" else (1e-4 + 1e-2) / 2
    assert used[10] == pytest.approx(middle)
    assert len(curve.results["loss"]) == len(curve.results["lr"]) == 21


def test_groups_keep_their_ratios_and_accumulation_its_steps(make_trainer, loader) -> None:
    class TwoGroups(Recording):
        def configure_optimizers(self) -> Any:
            groups = [
                {"params": self.network[0].parameters(), "lr": self.lr / 10},
                {"params": self.network[3].parameters()},
            ]
            return torch.optim.SGD(groups, self.lr)

    trainer = make_trainer(accumulate_grad_batches=2)
    lr_find(trainer, TwoGroups(), loader, min_lr=1e-4, max_lr=1e-2, num_training=5, update_attr=False)
    assert [low / high for low, high in Recording.rates] == pytest.approx([0.1] * 5)
    assert [high for _, high in Recording.rates][::4] == pytest.approx([1e-4, 1e-2])


def test_one_cycle_is_measured_by_its_maximum_rate(make_trainer, loader) -> None:
    class Cycle(Recording):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)
            steps = int(self.trainer.estimated_stepping_batches)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.lr, total_steps=steps)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    lr_find(make_trainer(max_epochs=1), Cycle(), loader, min_lr=1e-4, max_lr=1e-2, num_training=5, attr_name="lr")
    assert [rate for [rate] in Recording.rates][::4] == pytest.approx([1e-4, 1e-2])


def test_stops_if_the_loss_grows_or_is_not_finite(make_trainer, loader, net: Net) -> None:
    curve = lr_find(make_trainer(), net, loader, min_lr=1e-3, max_lr=1e5, num_training=60)
    assert 10 < len(curve.losses) < 60
    assert curve.losses[-1] > 4 * min(curve.losses)
    curve = lr_find(make_trainer(), net, loader, min_lr=1e-3, max_lr=1e30, num_training=60, early_stop_threshold=None)
    assert 10 < len(curve.losses) < 60
    assert all(map(math.isfinite, curve.losses))


def test_suggestion_is_written_to_the_named_attribute(make_trainer, loader) -> None:
    class Other(Net):
        def __init__(self) -> None:
            super().__init__()
            self.speed = None

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), self.speed)

    net = Other()
    found = Tuner(make_trainer()).lr_find(net, loader, min_lr=1e-4, attr_name="speed")
    assert net.speed == found.suggestion()
    assert net.lr == 1e-3
    net = Other()
    make_trainer(max_steps=1, auto_lr_find="speed").fit(net, loader)
    assert 1e-3 < net.speed < 1.0


def test_hparams_are_sufficient(make_trainer, loader) -> None:
    class InHparams(Net):
        def __init__(self, learning_rate: float = 1e-3) -> None:
            super().__init__()
            del self.lr
            self.hparams.pop("lr", None)
            self.hparams["learning_rate"] = learning_rate

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), self.hparams.learning_rate)

    net = InHparams()
    Tuner(make_trainer()).lr_find(net, loader, min_lr=1e-4)
    assert net.hparams.learning_rate != 1e-3


def test_lightning_modules_and_plain_networks(make_trainer, loader) -> None:
    lightning = pytest.importorskip("lightning.pytorch")

    class Lit(lightning.LightningModule):
        def __init__(self, lr: float = 1e-3) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Linear(8, 1)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = (self.net(batch[0]) - batch[1]).square().mean()
            self.log("loss", loss)
            self.logger.experiment.add_scalar("loss", 1.0, 0)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), self.hparams.lr)

    lit = Lit()
    trainer = make_trainer(max_steps=2, auto_lr_find=True, logger="tensorboard")
    trainer.fit(lit, loader)
    assert lit.hparams.lr != 1e-3
    assert trainer.optimizers[0].param_groups[0]["lr"] == lit.hparams.lr
    assert lit.trainer is trainer

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 1)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (self.net(x) - y).square().mean()

    trainer = make_trainer(max_steps=2, auto_lr_find=True, optimizer="adamw")
    trainer.fit(Plain(), [{"x": torch.randn(8, 8), "y": torch.ones(8, 1)} for _ in range(4)])
    assert trainer.plan.optimizer.lr == trainer.optimizers[0].param_groups[0]["lr"] != 1e-3


def test_module_with_manual_optimization(make_trainer, loader) -> None:
    class ByHand(Recording):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            optimizer = self.optimizers()
            loss = super().training_step(batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.rates.append([optimizer.param_groups[0]["lr"]])
            optimizer.step()
            return loss

    curve = lr_find(make_trainer(), ByHand(), loader, min_lr=1e-4, max_lr=1e-2, num_training=5)
    assert sorted({rate for [rate] in ByHand.rates}) == pytest.approx(list(curve.learning_rates))
    assert len(curve.losses) == 5


def test_plot_is_in_the_run_folder_and_a_resume_skips_the_search(make_trainer, loader, tmp_path: Path, capsys):
    keywords = {"auto_lr_find": True, "optimizer": "sgd", "logger": "jsonl", "enable_checkpointing": True}
    first = make_trainer(max_steps=2, **keywords)
    first.fit(Named(), loader)
    found = first.plan.optimizer.lr
    assert (tmp_path / "version_0" / "lr_find.png").is_file()
    resumed = make_trainer(max_steps=3, **keywords)
    resumed.fit(Named(), loader, ckpt_path="last")
    assert resumed.global_step == 3
    assert resumed.optimizers[0].param_groups[0]["lr"] == found
    assert "skipped, because the fit resumes" in capsys.readouterr().err
    resumed.fit(resumed.model, loader)
    assert "has been fitted before" in capsys.readouterr().err


def test_assigned_checkpoint_skips_the_search(make_trainer, loader, net: Net, capsys) -> None:
    make_trainer(max_steps=2, enable_checkpointing=True).fit(net, loader)
    resumed, model = make_trainer(max_steps=3, auto_lr_find=True, enable_checkpointing=True), Net()
    resumed.ckpt_path = "last"
    resumed.fit(model, loader)
    assert (resumed.global_step, model.lr) == (3, 1e-3)
    assert "skipped, because the fit resumes" in capsys.readouterr().err


def test_resumed_module_has_the_found_rate(make_trainer, loader, capsys) -> None:
    first = Net()
    make_trainer(max_steps=2, auto_lr_find=True, enable_checkpointing=True).fit(first, loader)
    resumed, model = make_trainer(max_steps=3, auto_lr_find=True), Net()
    resumed.fit(model, loader, ckpt_path="last")
    assert model.lr == model.hparams.lr == first.lr != Net().lr
    assert resumed.optimizers[0].param_groups[0]["lr"] == first.lr
    assert "this run configured" not in capsys.readouterr().err


def test_restarted_job_skips_the_search(make_trainer, loader, net: Net, monkeypatch, capsys) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    make_trainer(max_steps=2, enable_checkpointing=True).fit(net, loader)
    monkeypatch.setattr(job, "_num_fits", Counter())  # as in a new process
    restarted, model = make_trainer(max_steps=3, auto_lr_find=True, enable_checkpointing=True), Net()
    restarted.fit(model, loader)
    assert (restarted.global_step, model.lr) == (3, 1e-3)
    output = capsys.readouterr().err
    assert "skipped, because the fit resumes" in output
    assert output.count("this job was restarted") == 1


def test_fast_dev_run_skips_the_search(make_trainer, loader, net: Net) -> None:
    make_trainer(fast_dev_run=True, auto_lr_find=True, auto_scale_batch_size=True).fit(net, loader)
    assert net.lr == 1e-3


class Fixed(Net):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Two(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.SGD(self.network[0].parameters(), self.lr),
            torch.optim.SGD(self.network[3].parameters(), self.lr),
        ]


class NoRate(Named):
    def __init__(self) -> None:
        super().__init__()
        del self.lr
        self.hparams.clear()


@pytest.mark.parametrize(
    ("net", "arguments", "words"),
    [
        (Net, {"mode": "log"}, "mode='log'"),
        (Net, {"min_lr": 0.0}, "min_lr=0.0"),
        (Net, {"min_lr": 1.0, "max_lr": 0.5}, "max_lr=0.5.*greater than min_lr=1.0"),
        (Net, {"num_training": 1}, "num_training=1"),
        (Net, {"early_stop_threshold": 0.5}, "early_stop_threshold=0.5"),
        (Net, {"attr_name": "rate"}, "attr_name='rate'.*must be an attribute of Net"),
        (NoRate, {"update_attr": True}, r"auto_lr_find='NoRate'.*Trainer\(optimizer="),
        (Fixed, {"update_attr": True}, "attr_name='lr'.*no effect on the learning rates in .* of Fixed"),
        (Two, {}, "lr_find='2 optimizers'"),
        (Net, {"update_attr": True, "num_training": 5}, "no rate can be suggested"),
    ],
)
def test_invalid_arguments_are_rejected_and_change_nothing(
    make_trainer, net, arguments: dict[str, Any], words: str
) -> None:
    module = net()
    weights = {name: each.clone() for name, each in module.state_dict().items()}
    with pytest.raises(RoomierError, match=words):
        lr_find(make_trainer(max_steps=2), module, shuffled(), **arguments)
    assert all(torch.equal(each, weights[name]) for name, each in module.state_dict().items())
    assert getattr(module, "lr", 1e-3) == 1e-3


@pytest.mark.parametrize("keyword", ["auto_lr_find", "auto_scale_batch_size"])
@pytest.mark.parametrize("value", [1, "no way", None])
def test_flags_are_checked_by_the_trainer(make_trainer, keyword: str, value: object) -> None:
    with pytest.raises(RoomierError, match=keyword):
        make_trainer(**{keyword: value})


def test_error_of_the_module_is_raised(make_trainer, loader) -> None:
    class Breaks(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ZeroDivisionError("own")

    with pytest.raises(ZeroDivisionError, match="own"):
        lr_find(make_trainer(max_steps=2), Breaks(), loader)
    assert roomier.Trainer is not None
