"""On several ranks, validate, test and predict return the same values as on one rank, even with uneven last batches."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAccuracy

import roomier
from tests.covering import covering, few

STRATEGIES = ["ddp", "zero2", "zero3"]
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Measures(roomier.Module):
    """Module that logs in all forms, and records the arguments of its steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(3, 1)
        self.accuracy = BinaryAccuracy()
        self.by_hand = MeanMetric()
        self.seen: list[int] = []
        self.outputs: list[float] = []

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x).squeeze(-1)

    def training_step(self, batch, batch_idx):
        return self(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        out = self(x)
        loss = (out - y).square()
        self.accuracy(out, y)
        self.by_hand.update(loss)
        self.outputs.extend(loss.tolist())
        self.seen.append(self.trainer.run.now.batch_number)
        self.log("mean", loss.mean())
        self.log("sum", loss.sum(), reduce_fx="sum")
        self.log("min", loss.min(), reduce_fx="min")
        self.log("max", loss.max(), reduce_fx="max")
        self.log("half", loss.mean(), batch_size=0.5)
        if len(self.trainer.num_val_batches) == 1:  # one metric object supports one loader
            self.log("accuracy", self.accuracy)
        if self.trainer.run.now.batch_number == 1:
            self.log("of one", loss.mean())

    test_step = validation_step

    def on_validation_epoch_end(self):
        with warnings.catch_warnings():  # torchmetrics warns on a rank without a batch
            warnings.simplefilter("ignore")
            self.log("by hand", self.by_hand.compute())
        self.log("listed", sum(self.outputs) / max(len(self.outputs), 1), batch_size=len(self.outputs))
        self.by_hand.reset()

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        number = self.trainer.run.now.batch_number
        assert batch_idx == number // self.trainer.world_size
        self.seen.append(number)
        return {"out": self(batch[0]), "idx": number}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data(num_samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_samples, 3, generator=generator)
    return TensorDataset(x, torch.randint(2, (num_samples,), generator=generator))


def evaluated(verb: str, strategy: str, size: int, num_samples: int, **keywords: Any) -> tuple[Any, list[int], Any]:
    module = Measures()
    spread = {"strategy": strategy, "devices": size} if size > 1 else {}
    trainer = roomier.Trainer(**QUIET, **spread, **keywords)
    with torch.no_grad():
        result = getattr(trainer, verb)(module, DataLoader(data(num_samples), batch_size=4))
    return result, module.seen, len(module.outputs)


@pytest.mark.parametrize(("num_samples", "size"), few(covering([17, 3, 40], [2, 4])))  # 1, 5 and 10 batches
@pytest.mark.parametrize("verb", few(["validate", "test"]))
def test_values_equal_one_rank(on_ranks, verb: str, size: int, num_samples: int):
    (alone,), seen_alone, num_outputs = evaluated(verb, "single", 1, num_samples)
    assert "mean" in alone
    of_ranks = on_ranks(size, evaluated, verb, STRATEGIES[num_samples % 3], size, num_samples)
    for (metrics,), _, _ in of_ranks:
        assert metrics == of_ranks[0][0][0]  # bit-identical on all ranks
        assert metrics == pytest.approx(alone, rel=1e-6)
    assert sorted(idx for _, seen, _ in of_ranks for idx in seen) == seen_alone
    assert sum(number for _, _, number in of_ranks) == num_outputs


@pytest.mark.more
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_limit_counts_the_batches_of_all_ranks(on_ranks, strategy: str):
    (alone,), _, _ = evaluated("validate", "single", 1, 40, limit_val_batches=3)
    for (metrics,), _, _ in on_ranks(2, evaluated, "validate", strategy, 2, 40, limit_val_batches=3):
        assert metrics == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize("num_samples", few([3, 17]))
def test_predictions_of_all_ranks_in_order(on_ranks, num_samples: int):
    alone, _, _ = evaluated("predict", "single", 1, num_samples)
    of_ranks = on_ranks(4, evaluated, "predict", "zero3", 4, num_samples)
    for predictions, _, _ in of_ranks:
        assert [each["idx"] for each in predictions] == list(range(len(alone)))
        for mine, theirs in zip(predictions, alone, strict=True):
            torch.testing.assert_close(mine["out"], theirs["out"])
    assert sorted(idx for _, seen, _ in of_ranks for idx in seen) == list(range(len(alone)))


def two_loaders(size: int) -> Any:
    spread = {"strategy": "zero3", "devices": size} if size > 1 else {}
    loaders = [DataLoader(data(number), batch_size=4) for number in (9, 3)]
    return roomier.Trainer(**QUIET, **spread).validate(Measures(), loaders)


@pytest.mark.more
def test_several_loaders(on_ranks):
    alone = two_loaders(1)
    for each in on_ranks(2, two_loaders, 2):
        assert each == [pytest.approx(metrics, rel=1e-6) for metrics in alone]


def kept_attributes() -> dict[str, Any]:
    """A rank without a batch runs a batch for the other ranks, and the module of this rank is unchanged afterwards."""

    class Keeps(Measures):
        def __init__(self) -> None:
            super().__init__()
            self.nested = {"lists": [[]], "count": 0}
            self.count = 0
            self.last = None
            self.register_buffer("total", torch.zeros(1))

        def validation_step(self, batch, batch_idx):
            self.nested["lists"][0].append(batch_idx)
            self.nested["count"] += 1
            self.count += 1
            self.last = self.total + 1
            self.total += 1
            self.made_here = True
            return self(batch[0])

        def on_validation_epoch_end(self):
            self.result = [self.nested, self.count, self.last, self.total.item(), hasattr(self, "made_here")]

    module = Keeps()
    roomier.Trainer(**QUIET, strategy="zero3", devices=2).validate(module, DataLoader(data(4), batch_size=4))
    return module.result


@pytest.mark.more
def test_forward_for_other_ranks_has_no_side_effects(on_ranks):
    first, second = on_ranks(2, kept_attributes)
    assert first[:2] == [{"lists": [[0]], "count": 1}, 1]
    assert (first[3], first[4]) == (1.0, True)
    assert second == [{"lists": [[]], "count": 0}, 0, None, 0.0, False]


def fitted(size: int) -> dict[str, float]:
    module = Measures()
    spread = {"strategy": "zero2", "devices": size} if size > 1 else {}
    trainer = roomier.Trainer(**QUIET, **spread, max_epochs=2)
    batches = DataLoader(data(16), batch_size=8 // size)
    trainer.fit(module, batches, DataLoader(data(17), batch_size=4))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_validation_within_fit(on_ranks):
    alone = fitted(1)
    for metrics in on_ranks(2, fitted, 2):
        assert metrics == pytest.approx(alone, rel=1e-5)


class Normalises(Measures):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        return super().forward(self.norm(x))

    def on_validation_epoch_end(self):
        self.statistics = self.norm.running_mean.tolist()


def normalised(strategy: str) -> list[float]:
    module = Normalises()
    trainer = roomier.Trainer(**QUIET, strategy=strategy, devices=2, max_steps=3, num_sanity_val_steps=0)
    trainer.fit(module, DataLoader(data(16), batch_size=2), DataLoader(data(8), batch_size=4))
    trainer.validate(module, DataLoader(data(8), batch_size=4))
    return module.statistics


@pytest.mark.parametrize("strategy", few(["ddp", "zero2"]))
def test_all_ranks_evaluate_with_the_statistics_of_the_first(on_ranks, strategy: str):
    first, second = on_ranks(2, normalised, strategy)
    assert first == second
    assert first != [0.0, 0.0, 0.0]


def outputs_of_first_batch(num_samples: int) -> list[float]:
    """Run user code on the first batch of an evaluation. With zero3, all ranks must run this code."""

    class Shows(Measures):
        def validation_step(self, batch, batch_idx):
            if batch_idx == 0:
                self.shown = self(torch.ones(1, 3)).tolist()
            return self(batch[0])

    module = Shows()
    roomier.Trainer(**QUIET, strategy="zero3", devices=2).validate(module, DataLoader(data(num_samples), batch_size=4))
    return getattr(module, "shown", [])


@pytest.mark.more
@pytest.mark.parametrize("num_samples", [4, 12])  # 1 batch and 3 batches
def test_every_rank_counts_its_batches_from_zero(on_ranks, num_samples: int):
    first, second = on_ranks(2, outputs_of_first_batch, num_samples)
    assert len(first) == 1
    assert second == (first if num_samples > 4 else [])  # a rank without a batch runs a forward without side effects
