"""Recomputation that a keyword of the Trainer enables, in fits, evaluations and resumed runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from roomier import Module, Trainer
from roomier.core.wrapped_forward import WrappedForward
from roomier.models.gpt import GPT, GPTConfig
from roomier.techniques.activation import recompute
from roomier.techniques.activation.copies import Offload
from tests.covering import few

Make = Callable[..., Trainer]
LEVERS: list[dict[str, Any]] = [
    {"activation_checkpointing": True},
    {"activation_checkpointing": {"every_n": 2}},
    {"activation_checkpointing": "selective"},
    {"offload": {"activations": "cpu"}},
    {"activation_checkpointing": "selective", "offload": {"activations": "cpu"}},
    {"offload": {"activations": "disk"}},
    {"activation_checkpointing": "full", "offload": {"activations": "disk"}},
]
each_lever = pytest.mark.parametrize("levers", LEVERS, ids=str)


@pytest.fixture(autouse=True)
def moves_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "Offload", partial(Offload, min_bytes=1))


class Language(Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gpt = GPT(GPTConfig(vocab_size=20, context=8, num_layers=4, num_heads=2, width=16, dropout=0.2))
        self.num_wrapped: list[int] = []
        self.val_losses: list[Tensor] = []

    def training_step(self, batch: Tensor) -> Tensor:
        self.num_wrapped.append(sum(isinstance(each.forward, WrappedForward) for each in self.gpt.blocks))
        with torch.no_grad():
            self.gpt(batch)
        return self.gpt(batch, batch)[1]

    def validation_step(self, batch: Tensor) -> None:
        self.val_losses.append(self.gpt(batch, batch)[1])

    def predict_step(self, batch: Tensor) -> Tensor:
        return self.gpt(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ByHand(Language):
    automatic_optimization = False

    def training_step(self, batch: Tensor) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch))
            optimizer.step()


def loader() -> DataLoader[Any]:
    return DataLoader(torch.arange(48).view(6, 8) * 3 % 20, batch_size=2)


def fitted(trainer: Trainer, module: Language, **options: Any) -> dict[str, Tensor]:
    torch.manual_seed(1)
    trainer.fit(module, loader(), loader(), **options)
    assert not any(isinstance(each.forward, WrappedForward) for each in module.modules()), "undone"
    return {name: each.clone() for name, each in module.state_dict().items()}


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@each_lever
@pytest.mark.parametrize("precision", few(["32-true", "bf16-mixed", "16-mixed", "64-true"], 2))
def test_a_fit_has_the_same_results(make_trainer: Make, levers: dict[str, Any], precision: str) -> None:
    keywords = {"max_epochs": 1, "precision": precision, "gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    plain, ours = Language(), Language()
    assert_equal(fitted(make_trainer(**keywords, **levers), ours), fitted(make_trainer(**keywords), plain))
    assert set(plain.num_wrapped) == {0}
    assert set(ours.num_wrapped) == {4}
    assert torch.equal(torch.stack(ours.val_losses), torch.stack(plain.val_losses))


@each_lever
@pytest.mark.parametrize("base", few(["as_is", "nf4"]))
def test_adapters(make_trainer: Make, levers: dict[str, Any], base: str) -> None:
    keywords = {"max_epochs": 1, "precision": "bf16-mixed", "lora": {"rank": 2, "dropout": 0.2, "base": base}}
    assert_equal(fitted(make_trainer(**keywords, **levers), Language()), fitted(make_trainer(**keywords), Language()))


@pytest.mark.more
@each_lever
def test_manual_optimization(make_trainer: Make, levers: dict[str, Any]) -> None:
    assert_equal(fitted(make_trainer(max_epochs=1, **levers), ByHand()), fitted(make_trainer(max_epochs=1), ByHand()))


@pytest.mark.more
def test_fits_and_evaluations_in_a_row(make_trainer: Make) -> None:
    plain, ours = Language(), Language()
    for levers in [*LEVERS, {}]:
        trainer, plain_trainer = make_trainer(max_epochs=1, **levers), make_trainer(max_epochs=1)
        assert_equal(fitted(trainer, ours), fitted(plain_trainer, plain))
        trainer.validate(ours, loader())
        plain_trainer.validate(plain, loader())
        predicted = zip(trainer.predict(ours, loader()), plain_trainer.predict(plain, loader()), strict=True)
        assert all(torch.equal(one, other) for one, other in predicted)
    assert torch.equal(torch.stack(ours.val_losses), torch.stack(plain.val_losses))


def test_a_run_resumes_with_another_policy(make_trainer: Make, tmp_path: Path) -> None:
    whole = fitted(make_trainer(max_epochs=2), Language())
    first = make_trainer(max_epochs=1, activation_checkpointing="full", offload={"activations": "cpu"})
    fitted(first, Language())
    first.save_checkpoint(tmp_path / "half")
    second = make_trainer(max_epochs=2, activation_checkpointing="selective")
    assert_equal(fitted(second, Language(), ckpt_path=tmp_path / "half"), whole)
