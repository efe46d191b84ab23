"""Steps of schedulers, and the metrics that schedulers monitor."""

import math

import pytest
import torch
from torch import nn

import roomier


class Scheduled(roomier.Module):
    """The test provides the scheduler dictionary. ``values`` are logged as ``watched`` in each validation."""

    def __init__(self, make_config, values=()):
        super().__init__()
        self.net = nn.Linear(2, 1)
        self.make_config, self.values, self.rates = make_config, list(values), []

    def training_step(self, batch, batch_idx):
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        self.log("step_loss", float(len(self.rates)))
        return self.net(batch).mean()

    def validation_step(self, batch, batch_idx):
        if self.values:
            self.log("watched", self.values[self.current_epoch])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return {"optimizer": optimizer, "lr_scheduler": self.make_config(optimizer)}


@pytest.fixture
def data():
    return [torch.ones(1, 2)] * 4


def halving(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, [1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5]),
        ({"frequency": 2}, [1] * 8),
        ({"interval": "step"}, [0.5**k for k in range(8)]),
        ({"interval": "step", "frequency": 3}, [1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.25]),  # counted from 0 in each epoch
    ],
)
def test_interval_and_frequency(make_trainer, data, config, expected):
    module = Scheduled(lambda optimizer: {"scheduler": halving(optimizer), **config})
    make_trainer(max_epochs=2).fit(module, data)
    assert module.rates == expected


def test_step_is_an_optimizer_step(make_trainer, data):
    module = Scheduled(lambda optimizer: {"scheduler": halving(optimizer), "interval": "step"})
    make_trainer(max_epochs=2, accumulate_grad_batches=2).fit(module, data)
    assert module.rates == [1, 1, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125]


def test_scheduler_without_a_dict_steps_each_epoch(make_trainer, data):
    module = Scheduled(halving)
    make_trainer(max_epochs=3).fit(module, data[:1])
    assert module.rates == [1, 0.5, 0.25]


def plateau(optimizer, **options):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, **options)


def test_reduce_on_plateau_watches_its_metric(make_trainer, data):
    module = Scheduled(
        lambda optimizer: {"scheduler": plateau(optimizer), "monitor": "watched"}, values=[3.0, 2.0, 2.0, 2.0, 1.0]
    )
    make_trainer(max_epochs=5, num_sanity_val_steps=0).fit(module, data[:1], data[:1])
    assert module.rates == [1, 1, 1, 0.5, 0.25]


def test_reduce_on_plateau_each_step(make_trainer, data):
    """The scheduler reads the value that this step logged."""
    module = Scheduled(lambda optimizer: {"scheduler": plateau(optimizer), "interval": "step", "monitor": "step_loss"})
    make_trainer(max_epochs=1).fit(module, data)
    assert module.rates == [1, 1, 0.5, 0.25]


def test_missing_metric_is_an_error(make_trainer, data):
    module = Scheduled(lambda optimizer: {"scheduler": plateau(optimizer), "monitor": "step_los"})
    with pytest.raises(roomier.TrainingError, match=r"monitor='step_los'.*Did you mean 'step_loss'"):
        make_trainer(max_epochs=1).fit(module, data)


def test_missing_metric_prints_a_notice_if_not_strict(make_trainer, data, capsys):
    config = {"monitor": "watched", "strict": False}
    module = Scheduled(lambda optimizer: {"scheduler": plateau(optimizer), **config})
    make_trainer(max_epochs=2).fit(module, data)
    assert module.rates == [1] * 8
    assert "monitor='watched'" in capsys.readouterr().err


def test_named_schedule(make_trainer, data):
    """The length of the schedule is the length of the run, which has two epochs of two steps."""

    module = Plain()
    trainer = make_trainer(
        max_epochs=2,
        accumulate_grad_batches=2,
        optimizer="sgd",
        learning_rate=1.0,
        lr_schedule={"name": "cosine", "warmup_steps": 1, "min_lr_ratio": 0.1},
    )
    trainer.fit(module, data)
    assert trainer.estimated_stepping_batches == 4
    cosine = [0.1 + 0.9 * (1 + math.cos(math.pi * step / 3)) / 2 for step in range(3)]
    assert module.rates == pytest.approx([1, 1, *(rate for rate in cosine for _ in range(2))])


def test_longer_run_keeps_the_saved_schedule_with_a_notice(make_trainer, data, capsys, tmp_path):
    class Cosine(Scheduled):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_epochs)
            return [optimizer], [schedule]

    trainer = make_trainer(max_epochs=2)
    trainer.fit(Cosine(None), data)
    trainer.save_checkpoint(tmp_path / "two")
    make_trainer(max_epochs=2).fit(Cosine(None), data, ckpt_path=tmp_path / "two")
    assert "from the checkpoint, instead of" not in capsys.readouterr().err
    make_trainer(max_epochs=3).fit(Cosine(None), data, ckpt_path=tmp_path / "two")
    assert "T_max=2 from the checkpoint" in capsys.readouterr().err


class Plain(Scheduled):
    def __init__(self):
        super().__init__(None)

    def configure_optimizers(self):
        return None


def cosine(step, num_steps):
    return (1 + math.cos(math.pi * step / num_steps)) / 2


@pytest.mark.parametrize(
    ("changed", "num_steps"),
    [({"max_epochs": 4}, 16), ({"max_epochs": 4, "accumulate_grad_batches": 2}, 8 + 4), ({"max_steps": 10}, 10)],
    ids=str,
)
def test_named_schedule_ends_with_the_resumed_run(make_trainer, data, capsys, tmp_path, changed, num_steps):
    keywords = {"optimizer": "sgd", "learning_rate": 1.0, "lr_schedule": "cosine"}
    trainer = make_trainer(max_epochs=2, **keywords)
    trainer.fit(Plain(), data)
    trainer.save_checkpoint(tmp_path / "two")
    module = Plain()
    trainer = make_trainer(**keywords, **changed)
    trainer.fit(module, data, ckpt_path=tmp_path / "two")
    size = changed.get("accumulate_grad_batches", 1)
    expected = [cosine(step, num_steps) for step in range(8, num_steps) for _ in range(size)]
    assert module.rates == pytest.approx(expected, rel=1e-12)
    assert f"now ends at step {num_steps}, but at step 8 in the checkpoint" in capsys.readouterr().err
    trainer.save_checkpoint(tmp_path / "all")
    make_trainer(**keywords, **changed).fit(Plain(), data, ckpt_path=tmp_path / "all")
    assert "the schedule now ends" not in capsys.readouterr().err


def test_named_schedule_resumes_bit_for_bit_if_unchanged(make_trainer, data, capsys, tmp_path):
    keywords = {"max_epochs": 3, "optimizer": "sgd", "learning_rate": 0.3, "lr_schedule": "cosine"}
    straight, first, second = Plain(), Plain(), Plain()
    make_trainer(**keywords).fit(straight, data)
    first.on_train_batch_end = lambda *_: (
        first.trainer.save_checkpoint(tmp_path / "5") if len(first.rates) == 5 else None
    )
    make_trainer(**keywords).fit(first, data)
    make_trainer(**keywords).fit(second, data, ckpt_path=tmp_path / "5")
    assert second.rates == straight.rates[5:]
    assert "the schedule now ends" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [
        ({"max_epochs": 3}, 9),
        ({"max_epochs": 3, "max_steps": 5}, 5),
        ({"max_steps": 50}, 50),
        ({"max_epochs": 3, "limit_train_batches": 2}, 3),
        ({"max_epochs": 3, "accumulate_grad_batches": 1}, 15),
        ({"max_epochs": -1}, math.inf),
        ({"fast_dev_run": 2}, 1),
    ],
)
def test_estimated_stepping_batches(make_trainer, data, keywords, expected):
    """Five batches in windows of two: three steps per epoch. ``configure_optimizers`` may read the number."""
    seen = []

    class Asks(Scheduled):
        def configure_optimizers(self):
            seen.append(self.trainer.estimated_stepping_batches)
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def on_train_start(self):
            self.trainer.should_stop = True

    trainer = make_trainer(**{"accumulate_grad_batches": 2, **keywords})
    trainer.fit(Asks(None), [*data, data[0]])
    assert seen == [expected]
    assert trainer.estimated_stepping_batches == expected


def test_schedulers_are_found_by_their_names(make_trainer, data):
    module = Scheduled(lambda optimizer: {"scheduler": halving(optimizer), "name": "rate"})
    trainer = make_trainer(max_epochs=1)
    trainer.fit(module, data)
    [config] = trainer.lr_scheduler_configs
    assert config.name == "rate"
    assert module.lr_schedulers() is config.scheduler


def test_optimizer_from_both_sources_is_rejected(make_trainer, data):
    with pytest.raises(roomier.PlanError, match=r"optimizer='adamw'.*SGD as well"):
        make_trainer(max_steps=1, optimizer="adamw").fit(Scheduled(halving), data)


def test_missing_optimizer_is_rejected(make_trainer, data):
    class NoOptimizer(Scheduled):
        def configure_optimizers(self):
            return None

    with pytest.raises(roomier.PlanError, match=r"NoOptimizer configures no optimizer.*Trainer\(optimizer="):
        make_trainer(max_steps=1).fit(NoOptimizer(None), data)


def test_exhausted_schedule_reports_its_length_and_a_solution(make_trainer, data, capsys, tmp_path):
    def one_cycle(optimizer):
        total_steps = module.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=total_steps)
        return {"scheduler": schedule, "interval": "step"}

    module = Scheduled(one_cycle)
    trainer = make_trainer(max_epochs=2)
    trainer.fit(module, data)
    trainer.save_checkpoint(tmp_path / "two")
    module = Scheduled(one_cycle)
    with pytest.raises(roomier.TrainingError, match=r"OneCycleLR.*reached total_steps=8.*new fit from the we"):
        make_trainer(max_epochs=3).fit(module, data, ckpt_path=tmp_path / "two")
    assert "total_steps=8 from the checkpoint, instead of total_steps=12" in capsys.readouterr().err
