"""Length of a run, limits of loaders, and validation intervals."""

import math
import time
from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import roomier
from roomier.loggers.by_name import SilentLogger
from tests.covering import few


class Counts(roomier.Module):
    """Module that records every training batch, and the number of training batches before each validation batch."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.trained, self.validated, self.sanity = [], [], 0

    def training_step(self, batch, batch_idx):
        self.trained.append(float(batch.flatten()[0]))
        return self.net(batch).mean()

    def validation_step(self, batch, batch_idx):
        if self.trainer.sanity_checking:
            self.sanity += 1
        else:
            self.validated.append(len(self.trained))

    def test_step(self, batch, batch_idx):
        self.validated.append(batch_idx)

    def predict_step(self, batch, batch_idx):
        return batch_idx

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def numbered(count):
    return [torch.full((1, 1), float(index)) for index in range(count)]


class Stream(IterableDataset):
    """A dataset without a length."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(torch.arange(float(self.count)).unsqueeze(1))


def stream(count):
    return DataLoader(Stream(count), batch_size=1)


@pytest.mark.parametrize(
    ("keywords", "num_trained", "num_steps", "epochs"),
    [
        ({"max_epochs": 2}, 20, 20, 2),
        ({"max_epochs": 0}, 0, 0, 0),
        ({"max_steps": 7}, 7, 7, 0),
        ({"max_steps": 10}, 10, 10, 1),
        ({"max_steps": 0}, 0, 0, 0),
        ({"max_steps": 25, "max_epochs": 2}, 20, 20, 2),
        ({"max_steps": 13, "max_epochs": 2}, 13, 13, 1),
        ({"max_epochs": -1, "max_steps": 31}, 31, 31, 3),
        ({"max_epochs": 2, "accumulate_grad_batches": 4}, 20, 6, 2),
        ({"max_steps": 4, "accumulate_grad_batches": 4}, 14, 4, 1),
        ({"max_epochs": 2, "limit_train_batches": 3}, 6, 6, 2),
        ({"max_epochs": 2, "limit_train_batches": 99}, 20, 20, 2),
        ({"max_epochs": 2, "limit_train_batches": 0.25}, 4, 4, 2),
        ({"max_epochs": 2, "limit_train_batches": 1.0}, 20, 20, 2),
        ({"max_epochs": 2, "limit_train_batches": 1}, 2, 2, 2),
        ({"fast_dev_run": True}, 1, 1, 1),
        ({"fast_dev_run": 3}, 3, 3, 1),
        ({"fast_dev_run": 99}, 10, 10, 1),
        ({"max_epochs": 2, "overfit_batches": 3}, 6, 6, 2),
        ({"max_epochs": 2, "overfit_batches": 0.2}, 4, 4, 2),
    ],
    ids=str,
)
def test_lengths(make_trainer, keywords, num_trained, num_steps, epochs):
    module, trainer = Counts(), make_trainer(**keywords)
    trainer.fit(module, numbered(10))
    assert len(module.trained) == num_trained
    assert trainer.global_step == num_steps
    assert trainer.current_epoch == epochs


@pytest.mark.timeout(20)
@pytest.mark.parametrize("limit", [0, 0.0])
@pytest.mark.parametrize("length", [{"max_epochs": 3}, {"max_steps": 5}])
def test_no_training_batches(make_trainer, limit, length):
    """As in Lightning, the run ends without a step."""
    module, trainer = Counts(), make_trainer(limit_train_batches=limit, **length)
    trainer.fit(module, numbered(4))
    assert module.trained == []
    assert trainer.global_step == 0


def test_default_length_is_reported(make_trainer, capsys):
    trainer = make_trainer(callbacks=[StopsAfter(3)])
    trainer.fit(Counts(), numbered(2))
    assert "training for 1000 epochs" in capsys.readouterr().err


class StopsAfter(roomier.Callback):
    """Callback that requests a stop after ``num_batches`` training batches."""

    def __init__(self, num_batches):
        self.num_batches = num_batches

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if len(pl_module.trained) >= self.num_batches:
            trainer.should_stop = True


@pytest.mark.parametrize(
    ("minimum", "num_trained"),
    [
        ({}, 3),
        ({"min_steps": 7}, 7),
        ({"min_epochs": 2}, 10),
        ({"min_epochs": 1, "min_steps": 7}, 7),
        ({"min_epochs": 2, "min_steps": 7}, 10),
        ({"min_steps": 2}, 3),
    ],
)
def test_should_stop_waits_for_the_minimum(make_trainer, minimum, num_trained):
    module = Counts()
    make_trainer(max_epochs=4, callbacks=[StopsAfter(3)], **minimum).fit(module, numbered(5))
    assert len(module.trained) == num_trained


def test_second_fit_is_not_stopped_by_the_first(make_trainer):
    trainer = make_trainer(max_epochs=2, callbacks=[StopsAfter(3)])
    trainer.fit(Counts(), numbered(5))
    trainer.callbacks.clear()
    module = Counts()
    trainer.fit(module, numbered(5))
    assert len(module.trained) == 10


@pytest.mark.parametrize(
    ("limit", "seconds"), few([(timedelta(seconds=0.4), 0.4), ("00:00:00:01", 1.0), ({"seconds": 0.4}, 0.4)])
)
def test_max_time(make_trainer, limit, seconds):
    class Slow(Counts):
        def training_step(self, batch, batch_idx):
            time.sleep(0.12)
            return super().training_step(batch, batch_idx)

    module, started = Slow(), time.monotonic()
    make_trainer(max_time=limit).fit(module, numbered(5))
    assert time.monotonic() - started > 0.8 * seconds
    assert 0 < len(module.trained) < 10


VALIDATED_AT = [
    ({}, [10, 20]),
    ({"val_check_interval": 1.0}, [10, 20]),
    ({"val_check_interval": 0.5}, [5, 10, 15, 20]),
    ({"val_check_interval": 0.3}, [3, 6, 9, 13, 16, 19]),
    ({"val_check_interval": 4}, [4, 8, 14, 18]),
    ({"val_check_interval": 1, "max_epochs": 1}, list(range(1, 11))),
    ({"check_val_every_n_epoch": 2}, [20]),
    ({"check_val_every_n_epoch": 3, "max_epochs": 4}, [30]),
    ({"check_val_every_n_epoch": 2, "val_check_interval": 0.5}, [15, 20]),
    ({"check_val_every_n_epoch": None, "val_check_interval": 7}, [7, 14]),
    ({"check_val_every_n_epoch": None, "val_check_interval": 15, "max_epochs": 3}, [15, 30]),
    ({"limit_train_batches": 4}, [4, 8]),
    ({"limit_val_batches": 0}, []),
    ({"limit_val_batches": 0.0}, []),
    ({"limit_val_batches": 2}, [10, 10, 20, 20]),
    ({"max_steps": 12}, [10]),
    # validation runs at the step that reaches or exceeds the interval
    ({"accumulate_grad_batches": 3, "val_check_interval": 5}, [6, 10, 16, 20]),
    ({"overfit_batches": 3}, [3, 3, 3, 6, 6, 6]),
]


@pytest.mark.parametrize(("keywords", "expected"), VALIDATED_AT, ids=lambda value: str(value)[:60])
def test_validation_times(make_trainer, keywords, expected):
    module = Counts()
    num_val_batches = 5 if "limit_val_batches" in keywords or "overfit_batches" in keywords else 1
    trainer = make_trainer(**{"max_epochs": 2, "num_sanity_val_steps": 0, **keywords})
    trainer.fit(module, numbered(10), numbered(num_val_batches))
    assert module.validated == expected


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [
        ({}, [6, 12]),
        ({"val_check_interval": 4}, [4, 10]),
        ({"check_val_every_n_epoch": 2}, [12]),
        ({"check_val_every_n_epoch": None, "val_check_interval": 5}, [5, 10]),
        ({"limit_train_batches": 4}, [4, 8]),
    ],
    ids=str,
)
def test_loader_without_a_length(make_trainer, keywords, expected):
    module = Counts()
    trainer = make_trainer(max_epochs=2, num_sanity_val_steps=0, **keywords)
    trainer.fit(module, stream(6), stream(1))
    assert module.validated == expected
    assert trainer.current_epoch == 2
    assert trainer.num_training_batches == keywords.get("limit_train_batches", math.inf)


@pytest.mark.parametrize(
    ("keywords", "limit"),
    [
        ({"max_steps": 4}, "max_steps=4"),
        ({"max_time": {"hours": 1}, "max_epochs": 1}, "max_time={'hours': 1}"),
        ({"max_steps": 4, "val_check_interval": 2}, None),
        ({"max_steps": 4, "limit_train_batches": 2}, None),
        ({"max_steps": 4, "limit_val_batches": 0}, None),
        ({"max_epochs": 1}, None),
    ],
    ids=str,
)
def test_validation_at_an_unknown_end_prints_a_notice(make_trainer, capsys, keywords, limit):
    make_trainer(num_sanity_val_steps=0, **keywords).fit(Counts(), stream(6), stream(1))
    output = capsys.readouterr().err
    assert ("the training loader has no length" in output) == (limit is not None)
    assert limit is None or f"If {limit} ends training earlier, validation does not run" in output


@pytest.mark.parametrize(
    ("keywords", "field"),
    [
        ({"limit_train_batches": 0.5}, "limit_train_batches"),
        ({"limit_val_batches": 0.5}, "limit_val_batches"),
        ({"val_check_interval": 0.5}, "val_check_interval"),
        ({"overfit_batches": 0.5}, "overfit_batches"),
    ],
)
def test_fraction_of_an_unknown_length_is_rejected(make_trainer, keywords, field):
    with pytest.raises(roomier.RoomierError, match=f"{field}=0.5.*has no length.*Set it to a number"):
        make_trainer(max_epochs=1, **keywords).fit(Counts(), stream(6), stream(6))


@pytest.mark.parametrize(
    ("keywords", "problem"),
    [
        ({"val_check_interval": 11}, r"training batches per epoch \(10\)"),
        ({"limit_train_batches": 0.01}, "is less than one batch, because the loader has only 10 batches"),
        ({"val_check_interval": 0.01}, "is less than one batch, because the loader has only 10 batches"),
        ({"limit_val_batches": 0.5}, "is less than one batch, because the loader has only 1 batch[.]"),
    ],
)
def test_interval_or_limit_outside_the_loader_is_rejected(make_trainer, keywords, problem):
    with pytest.raises(roomier.RoomierError, match=problem):
        make_trainer(max_epochs=1, **keywords).fit(Counts(), numbered(10), numbered(1))


@pytest.mark.parametrize(("steps", "expected"), [(0, 0), (2, 2), (99, 5), (-1, 5)])
def test_sanity_check(make_trainer, steps, expected):
    module = Counts()
    make_trainer(max_epochs=1, num_sanity_val_steps=steps).fit(module, numbered(2), numbered(5))
    assert module.sanity == expected


def test_no_sanity_check_in_a_fast_dev_run(make_trainer):
    module = Counts()
    make_trainer(fast_dev_run=True, num_sanity_val_steps=2).fit(module, numbered(2), numbered(5))
    assert module.sanity == 0
    assert module.validated == [1]


def test_fast_dev_run_writes_no_files(make_trainer, tmp_path):
    callbacks = [roomier.callbacks.ModelCheckpoint(), roomier.callbacks.EarlyStopping("nothing")]
    trainer = make_trainer(fast_dev_run=2, logger=True, enable_checkpointing=True, callbacks=callbacks)
    trainer.fit(Counts(), numbered(4), numbered(4))
    assert list(tmp_path.iterdir()) == []
    assert [type(each) for each in trainer.loggers] == [SilentLogger]  # as in Lightning, self.logger exists


def test_overfit_batches_reads_the_same_batches_in_order(make_trainer):
    data = DataLoader(torch.arange(10.0).unsqueeze(1), batch_size=1, shuffle=True)
    module = Counts()
    make_trainer(max_epochs=3, overfit_batches=3).fit(module, data)
    assert module.trained == [0, 1, 2] * 3


def test_shuffling_changes_the_order_in_each_epoch(make_trainer):
    torch.manual_seed(0)
    data = DataLoader(torch.arange(10.0).unsqueeze(1), batch_size=1, shuffle=True)
    module = Counts()
    make_trainer(max_epochs=2).fit(module, data)
    first, second = module.trained[:10], module.trained[10:]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


@pytest.mark.parametrize(("interval", "expected"), [(1, [1, 2, 3, 4, 5, 6]), (2, [2, 4, 6]), (4, [4, 6]), (50, [6])])
def test_log_every_n_steps(make_trainer, rows, interval, expected):
    make_trainer(max_epochs=2, logger=rows, log_every_n_steps=interval).fit(Counts(), numbered(3))
    assert rows.steps("loss") == expected


@pytest.mark.parametrize(("limit", "expected"), [(None, 5), (2, 2), (0.5, 2), (1.0, 5), (99, 5)])
@pytest.mark.parametrize("stage", ["val", "test", "predict"])
def test_limits_of_evaluations(make_trainer, stage, limit, expected):
    module = Counts()
    trainer = make_trainer(**{f"limit_{stage}_batches": limit})
    verb = {"val": trainer.validate, "test": trainer.test, "predict": trainer.predict}[stage]
    found = verb(module, numbered(5))
    assert len(found if stage == "predict" else module.validated) == expected


@pytest.mark.parametrize("num_dev_batches", [1, 3])
def test_fast_dev_run_limits_evaluations(make_trainer, num_dev_batches):
    assert len(make_trainer(fast_dev_run=num_dev_batches).predict(Counts(), numbered(5))) == num_dev_batches


def test_loader_with_fewer_batches_than_its_length_is_validated(make_trainer):
    class Boastful:
        def __len__(self):
            return 5

        def __iter__(self):
            return iter(numbered(3))

    module = Counts()
    make_trainer(max_epochs=2).fit(module, Boastful(), numbered(1))
    assert module.validated == [3, 6]
