"""A sharded model with a chunked loss trains like a bare loop without a chunked loss."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from roomier import Trainer
from roomier.plan import Plan
from roomier.plan.parts import LossPlan
from tests.covering import few
from tests.parallel.parity import Batch, Setup, distance, train_bare, train_on_ranks, whole_weights
from tests.parallel.tasks import Language, TiedLanguage
from tests.ranks.pool import RankPool


@dataclass(frozen=True)
class Chunked(Setup):
    """Setup with chunks of five tokens, which do not divide a batch."""

    chunk_tokens: int | None = 5

    def plan(self) -> Plan:
        return dataclasses.replace(super().plan(), loss=LossPlan(chunked=True, chunk_tokens=self.chunk_tokens))


LAYOUTS = [("ddp", 2, None), ("zero1", 2, None), ("zero2", 2, None), ("zero3", 2, None), ("hsdp", 4, 2)]


CASES = [(Language, *layout) for layout in LAYOUTS] + [(TiedLanguage, "ddp", 2, None), (TiedLanguage, "zero3", 2, None)]


@pytest.mark.parametrize("num_ranks", few([2, 4]))
def test_each_strategy(on_ranks: RankPool, num_ranks: int) -> None:
    same = {"accumulate": 2, "clip": 0.5, "terms": "none on one", "num_steps": 3}
    cases = [(task, Chunked(*layout, **same)) for task, *layout in CASES if layout[1] == num_ranks]
    for (task, setup), trained in zip(cases, on_ranks.each(num_ranks, train_on_ranks, cases), strict=True):
        assert distance(trained[1], trained[0]).weights == 0.0, (task.__name__, setup.strategy)
        apart = distance(trained[0], train_bare(task, setup))
        assert max(apart.losses, apart.norms, apart.weights) < 1e-5, (task.__name__, setup.strategy, apart)


@pytest.mark.more
def test_each_strategy_in_bf16(on_ranks: RankPool) -> None:
    """In one step, rounding errors do not grow."""
    tasks = [(Language, "ddp"), (Language, "zero3"), (TiedLanguage, "zero2")]
    cases = [(task, Chunked(strategy, 2, precision="bf16-mixed", num_steps=1)) for task, strategy in tasks]
    for (task, setup), [trained, *_] in zip(cases, on_ranks.each(2, train_on_ranks, cases), strict=True):
        apart = distance(trained, train_bare(task, setup, in_parts=True))
        assert apart.losses < 1e-5, (task.__name__, setup.strategy, apart)
        assert apart.weights < 2**-8, (task.__name__, setup.strategy, apart)


class Evaluated(Language):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:  # type: ignore[override]
        return self.loss(batch)

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        logits, loss = self.network(batch["input_ids"], batch["labels"])
        self.log("val_loss", loss)
        self.log("entropy", torch.distributions.Categorical(logits=logits).entropy().mean())
        return {"loss": loss, "logits": logits}

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits: Tensor = self.network(batch["input_ids"])
        return logits


def run_trainer(num_ranks: int, strategy: str, chunked_loss: int | bool) -> tuple[dict[str, float], Tensor, Any]:
    """Return the metrics, predictions and weights of a fit with validation, of a prediction, and of a fit without
    chunks."""
    options: dict[str, Any] = {
        "strategy": strategy,
        "devices": num_ranks,
        "accelerator": "cpu",
        "max_epochs": 1,
        "optimizer": {"name": "sgd", "lr": 0.01},
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    module = Evaluated()
    whole = module.make_batch(16, torch.Generator().manual_seed(1))
    samples = [{name: values[index] for name, values in whole.items()} for index in range(16)]
    loader = DataLoader(samples, batch_size=4 // num_ranks)  # type: ignore[arg-type]
    trainer = Trainer(chunked_loss=chunked_loss, **options)
    trainer.fit(module, loader, loader)
    measured = {
        name: value.item() for name, value in trainer.callback_metrics.items() if name in ("val_loss", "entropy")
    }
    predicted = trainer.predict(module, loader)
    assert all(type(each) is Tensor for each in predicted)
    Trainer(**options).fit(module, loader)
    return measured, torch.cat(predicted), whole_weights(module)


@pytest.mark.more
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_trainer_evaluates_and_predicts(on_ranks: RankPool, strategy: str) -> None:
    measured, predicted, weights = on_ranks(2, run_trainer, 2, strategy, 5)[0]
    expected, real, theirs = run_trainer(1, "single", False)
    assert measured == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(torch.sort(predicted.flatten()).values, torch.sort(real.flatten()).values)
    for name, each in weights.items():
        torch.testing.assert_close(each, theirs[name], rtol=1e-5, atol=1e-6)
