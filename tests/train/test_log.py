"""``self.log``: names, defaults, reductions and outputs."""

import csv
import json

import pytest
import torch
from torch import nn

import roomier


class Logs(roomier.Module):
    """Module that calls the functions that a test provides: ``hooks[name](module)``."""

    def __init__(self, **hooks):
        super().__init__()
        self.net = nn.Linear(2, 1)
        self.__dict__["hooks"] = hooks

    def note(self, name, *args):
        hook = self.hooks.get(name)
        if hook is not None:
            hook(self, *args)

    def training_step(self, batch, batch_idx):
        self.note("training_step", batch, batch_idx)
        return self.net(batch).mean()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.note("validation_step", batch, batch_idx)

    def on_train_start(self):
        self.note("on_train_start")

    def on_train_batch_start(self, batch, batch_idx):
        self.note("on_train_batch_start", batch, batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.note("on_train_batch_end", batch, batch_idx)

    def on_train_epoch_start(self):
        self.note("on_train_epoch_start")

    def on_train_epoch_end(self):
        self.note("on_train_epoch_end")

    def on_validation_epoch_end(self):
        self.note("on_validation_epoch_end")

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self.note("test_step", batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def batch_of(value, size=2):
    return torch.full((size, 2), float(value))


def values(metrics):
    return {name: float(value) for name, value in metrics.items()}


@pytest.mark.parametrize(
    ("options", "step_names", "epoch_names"),
    [
        ({}, {"x"}, set()),
        ({"on_step": True}, {"x"}, set()),
        ({"on_step": False, "on_epoch": True}, set(), {"x"}),
        ({"on_epoch": True}, {"x_step"}, {"x_epoch"}),
        ({"on_step": True, "on_epoch": True}, {"x_step"}, {"x_epoch"}),
        ({"on_step": False, "on_epoch": False}, set(), set()),
    ],
)
def test_names_in_training(make_trainer, rows, options, step_names, epoch_names):
    module = Logs(training_step=lambda m, batch, i: m.log("x", batch[0, 0], **options))
    make_trainer(max_epochs=1, logger=rows, log_every_n_steps=1).fit(module, [batch_of(1), batch_of(3)])
    for name in step_names:
        assert rows.column(name) == [1.0, 3.0]
        assert rows.steps(name) == [1, 2]
    for name in epoch_names:
        assert rows.column(name) == [2.0]
        assert rows.steps(name) == [2]
    assert {name for _, row in rows.rows for name in row} == {"epoch", "loss", *step_names, *epoch_names}


def test_callback_metrics_contain_every_name(make_trainer):
    module = Logs(training_step=lambda m, batch, i: m.log("x", batch[0, 0], on_step=True, on_epoch=True))
    trainer = make_trainer(max_epochs=1)
    trainer.fit(module, [batch_of(1), batch_of(3)])
    assert values(trainer.callback_metrics) == {"x": 2.0, "x_step": 3.0, "x_epoch": 2.0}


@pytest.mark.parametrize(
    ("hook", "is_step"),
    [
        ("training_step", True),
        ("on_train_batch_start", True),
        ("on_train_batch_end", True),
        ("on_train_start", False),
        ("on_train_epoch_start", False),
        ("on_train_epoch_end", False),
        ("validation_step", False),
        ("on_validation_epoch_end", False),
    ],
)
def test_defaults_of_each_hook(make_trainer, rows, hook, is_step):
    """By default, values are logged per step in a training batch, and per epoch in all other hooks."""
    module = Logs(**{hook: lambda m, *_: m.log("x", 1.5)})
    trainer = make_trainer(max_epochs=1, logger=rows, log_every_n_steps=1)
    trainer.fit(module, [batch_of(0)] * 3, [batch_of(0)])
    assert rows.column("x") == ([1.5] * 3 if is_step else [1.5])
    assert values(trainer.callback_metrics) == {"x": 1.5}


@pytest.mark.parametrize(
    ("reduce_fx", "expected"),
    [("mean", (1 * 1 + 2 * 3 + 6 * 2) / 6), ("sum", 9.0), ("min", 1.0), ("max", 6.0), (torch.mean, 19 / 6), (max, 6.0)],
)
@pytest.mark.parametrize("as_tensor", [True, False])
def test_reductions(make_trainer, reduce_fx, expected, as_tensor):
    """The mean weights each batch by its size: 1, 3 and 2."""

    def log(module, batch, batch_idx):
        value = batch[0, 0] if as_tensor else float(batch[0, 0])
        module.log("x", value, reduce_fx=reduce_fx)

    [metrics] = make_trainer().validate(
        Logs(validation_step=log), [batch_of(1, size=1), batch_of(2, size=3), batch_of(6, size=2)]
    )
    assert metrics == {"x": pytest.approx(expected)}


def test_batch_size_can_be_passed(make_trainer):
    """With the number of tokens as batch_size, the mean of token means is the mean over all tokens."""
    module = Logs(validation_step=lambda m, batch, i: m.log("x", batch[0, 0], batch_size=(9, 1)[i]))
    [metrics] = make_trainer().validate(module, [batch_of(1), batch_of(2)])
    assert metrics == {"x": pytest.approx(1.1)}


@pytest.mark.parametrize("weights", [(0, 4), torch.tensor([0, 4])], ids=["ints", "tensors"])
def test_weight_zero_does_not_count(make_trainer, weights):
    module = Logs(validation_step=lambda m, batch, i: m.log("x", batch[0, 0], batch_size=weights[i]))
    [metrics] = make_trainer().validate(module, [batch_of(float("nan")), batch_of(2)])
    assert metrics == {"x": 2.0}


def test_mean_of_16_bit_values_has_higher_precision(make_trainer):
    """1.0078125 is a bfloat16 number, but 511 times this number is not."""
    value = torch.tensor(1.0078125, dtype=torch.bfloat16)
    module = Logs(validation_step=lambda m, batch, i: m.log("x", value, batch_size=511))
    [metrics] = make_trainer().validate(module, [batch_of(0)])
    assert metrics == {"x": 1.0078125}


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_float_is_not_rounded_to_the_precision_of_the_weights(make_trainer, precision):
    def log(module, batch, batch_idx):
        for name in ("mean", "sum", "min", "max"):
            module.log(name, 1.001, reduce_fx=name)
        module.log("mixed", 1.001 if batch_idx else torch.tensor(1.001, dtype=torch.float64), reduce_fx="min")

    [metrics] = make_trainer(precision=precision).validate(Logs(validation_step=log), [batch_of(0)] * 2)
    expected = {"mean": 1.001, "sum": 2.002, "min": 1.001, "max": 1.001, "mixed": 1.001}
    assert metrics == {name: pytest.approx(value, rel=1e-6) for name, value in expected.items()}


def test_log_dict_passes_its_options(make_trainer, rows):
    module = Logs(
        training_step=lambda m, batch, i: m.log_dict({"a": 1.0, "b": batch[0, 0]}, on_step=False, on_epoch=True)
    )
    make_trainer(max_epochs=1, logger=rows).fit(module, [batch_of(1), batch_of(2)])
    assert (rows.column("a"), rows.column("b")) == ([1.0], [1.5])


def test_progress_bar_and_logger_receive_selected_values(make_trainer, rows):
    def log(module, batch, batch_idx):
        module.log("bar", 1.0, prog_bar=True, logger=False)
        module.log("row", 2.0)
        module.log("neither", 3.0, logger=False)
        module.log("both", 4.0, prog_bar=True, on_step=True, on_epoch=True)

    trainer = make_trainer(max_epochs=1, logger=rows, log_every_n_steps=1)
    trainer.fit(Logs(training_step=log), [batch_of(1)])
    logged = {name for _, row in rows.rows for name in row}
    assert logged == {"epoch", "loss", "row", "both_step", "both_epoch"}
    assert values(trainer.progress_bar_metrics) == {"bar": 1.0, "both_step": 4.0, "both_epoch": 4.0}
    assert set(trainer.callback_metrics) == {"bar", "row", "neither", "both", "both_step", "both_epoch"}
    assert trainer.logged_metrics["row"] == 2.0


def test_several_loaders_get_a_suffix(make_trainer):
    def log(module, batch, batch_idx):
        module.log("x", batch[0, 0])
        module.log("all", batch[0, 0], add_dataloader_idx=False)

    loaders = [torch.utils.data.DataLoader(batch_of(value, size=1), 1) for value in (1, 2)]
    trainer = make_trainer()
    results = trainer.validate(Logs(validation_step=log), loaders)
    assert results == [
        {"x/dataloader_idx_0": 1.0, "all": 1.5},
        {"x/dataloader_idx_1": 2.0, "all": 1.5},
    ]
    assert set(trainer.callback_metrics) == {"x/dataloader_idx_0", "x/dataloader_idx_1", "all"}


def test_metrics_are_available_at_the_end_of_the_epoch(make_trainer):
    """The module's hook can read the metrics. Callbacks can read the metrics that steps logged."""
    seen = {}

    class Looks(roomier.Callback):
        def on_validation_epoch_end(self, trainer, pl_module):
            seen["callback in validation"] = values(trainer.callback_metrics)

        def on_validation_end(self, trainer, pl_module):
            seen["after validation"] = values(trainer.callback_metrics)

        def on_train_epoch_end(self, trainer, pl_module):
            seen["callback in training"] = values(trainer.callback_metrics)

    def validation_epoch_end(module):
        seen["validation"] = values(module.trainer.callback_metrics)
        module.log("late", 7.0)

    module = Logs(
        training_step=lambda m, batch, i: m.log("t", batch[0, 0], on_step=False, on_epoch=True),
        validation_step=lambda m, batch, i: m.log("v", batch[0, 0]),
        on_validation_epoch_end=validation_epoch_end,
        on_train_epoch_end=lambda m: seen.update(training=values(m.trainer.callback_metrics)),
    )
    trainer = make_trainer(max_epochs=1, callbacks=[Looks()], num_sanity_val_steps=0)
    trainer.fit(module, [batch_of(1), batch_of(3)], [batch_of(5)])
    assert seen == {
        "callback in validation": {"v": 5.0},
        "validation": {"v": 5.0},
        "after validation": {"v": 5.0, "late": 7.0},
        "callback in training": {"v": 5.0, "late": 7.0, "t": 2.0},
        "training": {"v": 5.0, "late": 7.0, "t": 2.0},
    }


def test_monitor_reads_values_of_the_module_at_the_end_of_the_training_epoch(make_trainer):
    """EarlyStopping reads the metrics after the module's hook of the same epoch, as in Lightning."""
    stopping = roomier.callbacks.EarlyStopping(
        monitor="x", patience=1, mode="min", check_on_train_epoch_end=True, verbose=False
    )
    module = Logs(on_train_epoch_end=lambda m: m.log("x", float((3, 2, 1, 1, 0)[m.current_epoch])))
    trainer = make_trainer(max_epochs=5, callbacks=[stopping])
    trainer.fit(module, [batch_of(1)])
    assert stopping.best_score == 1.0
    assert trainer.current_epoch == 4


def test_same_name_in_a_step_and_at_the_end_of_the_epoch(make_trainer, rows):
    """Two hooks log different values with the same name. Both are kept separately."""
    module = Logs(
        training_step=lambda m, batch, i: m.log("x", batch[0, 0]),
        on_train_epoch_end=lambda m: m.log("x", 9.0),
        validation_step=lambda m, batch, i: m.log("v", batch[0, 0]),
        on_validation_epoch_end=lambda m: m.log("v", 2 * float(m.trainer.callback_metrics["v"])),
    )
    trainer = make_trainer(max_epochs=1, logger=rows, log_every_n_steps=1)
    trainer.fit(module, [batch_of(1), batch_of(3)], [batch_of(4)])
    assert rows.column("x") == [1.0, 3.0, 9.0]
    assert rows.column("v") == [8.0]


def test_sanity_check_leaves_no_values(make_trainer, rows):
    module = Logs(validation_step=lambda m, batch, i: m.log("v", batch[0, 0]))
    seen = []
    module.hooks["on_train_start"] = lambda m: seen.append(dict(m.trainer.callback_metrics))
    trainer = make_trainer(max_epochs=1, logger=rows, num_sanity_val_steps=1)
    trainer.fit(module, [batch_of(1)], [batch_of(4), batch_of(6)])
    assert seen == [{}]
    assert rows.column("v") == [5.0]


def test_each_epoch_starts_a_new_reduction(make_trainer, rows):
    module = Logs(
        training_step=lambda m, batch, i: m.log("t", float(m.current_epoch), on_step=False, on_epoch=True),
        validation_step=lambda m, batch, i: m.log("v", float(m.current_epoch), reduce_fx="sum"),
    )
    make_trainer(max_epochs=3, logger=rows, num_sanity_val_steps=0).fit(module, [batch_of(1)] * 2, [batch_of(1)] * 2)
    assert rows.column("t") == [0.0, 1.0, 2.0]
    assert rows.column("v") == [0.0, 2.0, 4.0]
    assert rows.steps("v") == [2, 4, 6]


def test_rows_of_the_log_file(make_trainer, tmp_path):
    module = Logs(
        training_step=lambda m, batch, i: m.log("t", batch[0, 0]),
        validation_step=lambda m, batch, i: m.log("v", batch[0, 0]),
    )
    trainer = make_trainer(max_epochs=2, logger=True, log_every_n_steps=2)
    trainer.fit(module, [batch_of(value) for value in (1, 2, 3)], [batch_of(7)])
    lines = (tmp_path / "version_0" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    picked = [{key: row[key] for key in ("step", "epoch", "t", "v") if key in row} for row in rows]
    assert picked == [
        {"step": 2, "epoch": 0, "t": 2.0},
        {"step": 3, "epoch": 0, "v": 7.0},
        {"step": 4, "epoch": 1, "t": 1.0},
        {"step": 6, "epoch": 1, "t": 3.0},
        {"step": 6, "epoch": 1, "v": 7.0},
    ]


def test_results_of_validate_after_fit(make_trainer):
    """Values of this evaluation do not mix with values of the fit."""
    module = Logs(
        training_step=lambda m, batch, i: m.log("t", batch[0, 0]),
        validation_step=lambda m, batch, i: m.log("v", batch[0, 0]),
        test_step=lambda m, batch, i: m.log("u", batch[0, 0]),
    )
    trainer = make_trainer(max_epochs=1)
    trainer.fit(module, [batch_of(1)], [batch_of(4)])
    assert trainer.validate(module, [batch_of(8)]) == [{"v": 8.0}]
    assert trainer.test(module, [batch_of(9)]) == [{"u": 9.0}]
    assert trainer.global_step == 1


@pytest.mark.parametrize(
    ("value", "options", "problem"),
    [
        (torch.ones(2), {}, "must be a scalar"),
        ("text", {}, "must be a number or"),
        (None, {}, "must be a number or"),
        (1.0, {"reduce_fx": "median"}, "is not a known reduction"),
        (1.0, {"reduce_fx": lambda x: x}, "is not a known reduction"),
        (1.0, {"on_epoch": "no"}, "on_epoch='no': must be a bool, for 'x'"),
        (1.0, {"prog_bar": "yes"}, "prog_bar='yes': must be a bool"),
    ],
)
def test_invalid_values_are_rejected(make_trainer, value, options, problem):
    module = Logs(validation_step=lambda m, batch, i: m.log("x", value, **options))
    with pytest.raises(roomier.RoomierError, match=f"log.*{problem}"):
        make_trainer().validate(module, [batch_of(1)])


def test_log_dict_rejects_other_types(make_trainer):
    module = Logs(validation_step=lambda m, batch, i: m.log_dict([("x", 1.0)]))
    with pytest.raises(roomier.RoomierError, match=r"log_dict='list': must be a mapping .* self\.log_dict\(\{"):
        make_trainer().validate(module, [batch_of(1)])


def test_log_without_a_trainer_does_nothing():
    """A module also works in a custom loop."""
    module = Logs(training_step=lambda m, batch, i: m.log("x", 1.0))
    assert module.training_step(batch_of(1), 0).shape == ()


def test_tensor_of_one_element_and_an_int(make_trainer):
    def log(module, batch, batch_idx):
        module.log("one", torch.tensor([[2.0]]))
        module.log("int", 3)
        module.log("whole", torch.tensor(4))
        module.log("grad", module.net.weight.sum() * 0 + 5)

    [metrics] = make_trainer().validate(Logs(validation_step=log), [batch_of(1)])
    assert metrics == {"one": 2.0, "int": 3.0, "whole": 4.0, "grad": 5.0}


def test_logged_values_have_no_graph(make_trainer):
    module = Logs(training_step=lambda m, batch, i: m.log("x", m.net(batch).mean(), on_step=True, on_epoch=True))
    trainer = make_trainer(max_epochs=1)
    trainer.fit(module, [batch_of(1)])
    assert not any(value.requires_grad for value in trainer.callback_metrics.values())


def rows_of(folder):
    with (folder / "version_0" / "metrics.csv").open(newline="") as file:
        return [{name: float(cell) for name, cell in row.items() if cell} for row in csv.DictReader(file)]


@pytest.mark.parametrize("options", [{}, {"on_step": False, "on_epoch": True}])
def test_column_names_of_the_trainer_keep_both_values(options, tmp_path, make_trainer, capsys):
    def log(module, batch, batch_idx):
        module.log("loss", 7.0, **options)
        module.log("epoch", 8.0, **options)

    trainer = make_trainer(max_epochs=2, log_every_n_steps=1, logger=True)
    trainer.fit(Logs(training_step=log), [batch_of(1), batch_of(2)])
    rows = rows_of(tmp_path)
    assert {row["loss"] for row in rows if "loss" in row} == {7.0}
    assert {row["epoch"] for row in rows if "epoch" in row} == {8.0}
    steps = [row for row in rows if "trainer/loss" in row]
    assert [row["trainer/epoch"] for row in steps] == [0, 0, 1, 1]
    assert len({row["trainer/loss"] for row in steps}) == 2
    output = capsys.readouterr().err
    assert output.count("column 'loss' contains the logged value. The value of the Trainer is in 'trainer/loss'") == 1
    assert output.count("column 'epoch' contains the logged value. The value of the Trainer is in 'trainer/epoch'") == 1


def test_validation_loss_has_a_separate_column(tmp_path, make_trainer):
    def log(module, batch, batch_idx):
        module.log("loss", 7.0)

    trainer = make_trainer(max_epochs=2, log_every_n_steps=1, logger=True, num_sanity_val_steps=0)
    trainer.fit(Logs(validation_step=log), [batch_of(1)], [batch_of(1)])
    first, *rows = rows_of(tmp_path)
    assert first["loss"] != 7.0  # no validation has run yet
    assert [row.get("loss") for row in rows] == [7.0, None, 7.0]
    assert "trainer/loss" in rows[1]


def test_other_rows_keep_their_columns(tmp_path, make_trainer):
    make_trainer(max_epochs=1, log_every_n_steps=1, logger=True).fit(Logs(), [batch_of(1)])
    assert [sorted(row) for row in rows_of(tmp_path)] == [["epoch", "loss", "step", "time"]]
