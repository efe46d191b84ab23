"""validate, test and predict: inputs, results, and DataModules."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import roomier


class Line(roomier.Module):
    def __init__(self, slope=2.0):
        super().__init__()
        self.net = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.net.weight, slope)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return self(batch).mean()

    def validation_step(self, batch, batch_idx):
        self.log("v", self(batch).mean())

    def test_step(self, batch, batch_idx):
        self.log("t", self(batch).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def numbers(*values):
    return [torch.full((1, 1), float(value)) for value in values]


def loader(*values):
    return DataLoader(torch.tensor(values).float().unsqueeze(1), batch_size=1)


def test_predictions_are_in_order(make_trainer):
    outputs = make_trainer().predict(Line(), numbers(1, 2, 3))
    assert [float(output) for output in outputs] == [2, 4, 6]
    assert not outputs[0].requires_grad


def test_predictions_of_several_loaders(make_trainer):
    seen = []

    class Predicts(Line):
        def predict_step(self, batch, batch_idx, dataloader_idx):
            seen.append((dataloader_idx, batch_idx))
            return self(batch).item()

    outputs = make_trainer().predict(Predicts(), [loader(1, 2), loader(5)])
    assert outputs == [[2, 4], [10]]
    assert seen == [(0, 0), (0, 1), (1, 0)]


def test_predictions_can_be_discarded(make_trainer):
    received = []

    class Takes(roomier.Callback):
        def on_predict_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
            received.append(float(outputs))

    assert make_trainer(callbacks=[Takes()]).predict(Line(), numbers(1, 2), return_predictions=False) is None
    assert received == [2, 4]


def test_loaders_in_a_dict(make_trainer):
    results = make_trainer().validate(Line(), {"easy": loader(1, 3), "hard": loader(5)})
    assert results == [{"v/dataloader_idx_0": 4.0}, {"v/dataloader_idx_1": 10.0}]


def test_partly_read_loader_is_closed_when_training_continues(make_trainer):
    events = []

    class Opens:
        """Iterable that holds a resource while it is read, like worker processes."""

        def __iter__(self):
            events.append("open")
            try:
                yield from numbers(1, 2, 3)
            finally:
                events.append("closed")

    class Notes(Line):
        def training_step(self, batch, batch_idx):
            events.append("train")
            return super().training_step(batch, batch_idx)

    make_trainer(max_epochs=2, limit_val_batches=2, num_sanity_val_steps=1).fit(Notes(), numbers(1), Opens())
    assert events == ["open", "closed", *(["train", "open", "closed"] * 2)]


def test_evaluation_keeps_weights_and_mode(make_trainer):
    module = Line()
    module.train()
    make_trainer().validate(module, numbers(1))
    assert module.training
    assert module.net.weight.item() == 2.0
    module.eval()
    make_trainer().test(module, numbers(1))
    assert not module.training


@pytest.mark.parametrize("verb", ["validate", "test"])
def test_weights_of_a_checkpoint_are_loaded(make_trainer, tmp_path, verb):
    trainer = make_trainer(max_epochs=0)
    trainer.fit(Line(slope=7.0), numbers(1))
    trainer.save_checkpoint(tmp_path / "seven")
    module = Line(slope=2.0)
    name = {"validate": "v", "test": "t"}[verb]
    assert getattr(make_trainer(), verb)(module, numbers(1), ckpt_path=tmp_path / "seven") == [{name: 7.0}]
    assert module.net.weight.item() == 7.0


def test_extra_state_is_loaded(make_trainer, tmp_path):
    class Line2(Line):
        scale = 1.0

        def get_extra_state(self):
            return {"scale": self.scale}

        def set_extra_state(self, state):
            self.scale = state["scale"]

    saved = Line2()
    saved.scale = 3.0
    trainer = make_trainer(max_epochs=0)
    trainer.fit(saved, numbers(1))
    trainer.save_checkpoint(tmp_path / "three")
    module = Line2()
    make_trainer().validate(module, numbers(1), ckpt_path=tmp_path / "three")
    assert module.scale == Line2.load_from_checkpoint(tmp_path / "three").scale == 3.0


def test_best_checkpoint_is_loaded(make_trainer):
    """The third epoch has the best metric, so the best checkpoint differs from the last checkpoint."""

    class Falls(Line):
        def validation_step(self, batch, batch_idx):
            self.log("v", self(batch).mean())
            self.log("score", (4.0, 3.0, 1.0, 2.0)[self.current_epoch] if self.trainer.current_epoch < 4 else 0.0)

    keep_best = roomier.callbacks.ModelCheckpoint(monitor="score", mode="min")
    trainer = make_trainer(max_epochs=4, callbacks=[keep_best], enable_checkpointing=True, num_sanity_val_steps=0)
    module = Falls()
    trainer.fit(module, numbers(1), numbers(1))
    assert module.net.weight.item() == pytest.approx(2.0 - 0.4)
    [metrics] = trainer.validate(module, numbers(1), ckpt_path="best")
    assert metrics["v"] == pytest.approx(2.0 - 0.3)


class Numbers(roomier.DataModule):
    def __init__(self):
        self.calls = []

    def prepare_data(self):
        self.calls.append("prepare_data")

    def setup(self, stage):
        self.calls.append(f"setup {stage}")

    def teardown(self, stage):
        self.calls.append(f"teardown {stage}")

    def train_dataloader(self):
        self.calls.append("train")
        return numbers(1, 2)

    def val_dataloader(self):
        self.calls.append("val")
        return [loader(3), loader(4)]

    def test_dataloader(self):
        return numbers(5)

    def predict_dataloader(self):
        return numbers(6)


class Steps(Line):
    def validation_step(self, batch, batch_idx, dataloader_idx):
        self.log("v", float(batch))

    def test_step(self, batch, batch_idx):
        self.log("t", float(batch))


@pytest.mark.parametrize("by_keyword", [True, False])
def test_data_module(make_trainer, by_keyword):
    trainer, module, data = make_trainer(max_epochs=1, num_sanity_val_steps=0), Steps(slope=1.0), Numbers()
    if by_keyword:
        trainer.fit(module, datamodule=data)
    else:
        trainer.fit(module, data)
    assert data.calls == ["prepare_data", "setup fit", "train", "val", "teardown fit"]
    assert data.trainer is trainer
    assert trainer.global_step == 2
    assert trainer.validate(module) == [{"v/dataloader_idx_0": 3.0}, {"v/dataloader_idx_1": 4.0}]
    assert trainer.test(module, datamodule=data) == [{"t": 5.0}]
    assert len(trainer.predict(module, data)) == 1


def test_loaders_of_the_module(make_trainer):
    class Own(Steps):
        def train_dataloader(self):
            return numbers(1, 2, 3)

        def val_dataloader(self):
            return [loader(3), loader(4)]

        def test_dataloader(self):
            return numbers(5)

        def predict_dataloader(self):
            return numbers(6)

    trainer, module = make_trainer(max_epochs=1), Own()
    trainer.fit(module)
    assert trainer.global_step == 3
    assert trainer.validate(module) == [{"v/dataloader_idx_0": 3.0}, {"v/dataloader_idx_1": 4.0}]
    assert trainer.test(module) == [{"t": 5.0}]
    assert len(trainer.predict(module)) == 1


def test_arguments_take_precedence(make_trainer):
    class Own(Line):
        def train_dataloader(self):
            raise AssertionError("not asked")

    trainer = make_trainer(max_epochs=1)
    trainer.fit(Own(), numbers(1))
    assert trainer.global_step == 1


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_missing_data_is_rejected(make_trainer, verb):
    with pytest.raises(roomier.DataError, match=f"{verb} requires data"):
        getattr(make_trainer(), verb)(Line())


def test_last_module_is_used_by_default(make_trainer):
    trainer = make_trainer(max_epochs=1)
    with pytest.raises(roomier.RoomierError, match="there is no model to validate"):
        trainer.validate()
    module = Line()
    trainer.fit(module, numbers(0))
    assert trainer.validate(dataloaders=numbers(1)) == [{"v": 2.0}]
    assert trainer.model is trainer.lightning_module is module


def test_configure_model_builds_before_the_optimizer(make_trainer):
    class Late(Line):
        def __init__(self):
            super().__init__()
            self.head = None

        def configure_model(self):
            if self.head is None:
                self.head = nn.Linear(1, 1)

        def forward(self, x):
            return self.head(super().forward(x))

    trainer, module = make_trainer(max_steps=1), Late()
    trainer.fit(module, numbers(1))
    held = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
    assert held == {id(p) for p in module.parameters()}


def test_plain_module(make_trainer):
    """The forward of the model returns the loss, which is logged with the name of the stage."""

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(1, 1)

        def forward(self, x, y):
            return nn.functional.mse_loss(self.net(x), y)

    batches = [(torch.zeros(2, 1), torch.ones(2, 1)), (torch.ones(1, 1), torch.ones(1, 1))]
    model = Loss()
    trainer = make_trainer(max_epochs=1, optimizer="sgd", learning_rate=0.1)
    trainer.fit(model, batches, batches)
    assert set(trainer.callback_metrics) == {"train_loss", "val_loss"}
    [metrics] = trainer.test(model, batches)
    with torch.no_grad():
        expected = (2 * float(model(*batches[0])) + float(model(*batches[1]))) / 3
    assert metrics == {"test_loss": pytest.approx(expected)}
    assert set(trainer.engine.state()["module"]) == {"net.weight", "net.bias"}
