"""A budget for activation memory is met and used, and does not change training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from roomier import Trainer
from roomier.core.errors import TrainingError
from roomier.core.torch_private import version_of
from roomier.techniques.activation import budget as budget_module
from roomier.techniques.activation.block_forward import Keep
from roomier.techniques.activation.profile import Call, InterceptionTime
from tests.activation.budgets import (
    Language,
    Net,
    Taken,
    assert_same_training,
    engine_for,
    measured_peak,
    rank_correlation,
    recompute_of,
    take_step,
    tokens,
    train,
)
from tests.covering import few

TOLERANCE = 1.03
WINDOWS = [[tokens(seed=seed)] for seed in range(4)]


@functools.cache
def trained(budget: float | int | str) -> Taken:
    return train(Language(), budget, WINDOWS)


@pytest.fixture(scope="module", autouse=True)
def equal_blocks_take_equal_time() -> Iterator[None]:
    """Replace measured times, so that the choice does not depend on the load of the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget_module, "lost_ns", count_operations)
        yield


def count_operations(call: Call, keep: Keep, interception: InterceptionTime) -> int:
    num_products = len(call.product_spans)
    return 1000 * {Keep.INPUT: 30, Keep.PRODUCTS: 30 - num_products, Keep.ALL: 0}[keep]


@pytest.fixture(scope="module")
def plain() -> Taken:
    return trained("none")


@pytest.fixture(scope="module")
def bounds() -> tuple[int, int]:
    return trained(0.0).peak_bytes, trained(1.0).peak_bytes


@pytest.mark.parametrize("num_budgets", few([4, 10]))
def test_budgets_are_met_and_used(plain: Taken, bounds: tuple[int, int], num_budgets: int) -> None:
    least, most = bounds
    budgets = [least + round((most - least) * part / (num_budgets - 1)) for part in range(num_budgets)]
    sweep = [trained(0.0), *(trained(budget) for budget in budgets[1:-1]), trained(1.0)]
    for budget, taken in zip(budgets, sweep, strict=True):
        assert taken.peak_bytes <= TOLERANCE * budget
        assert taken.predicted_bytes == pytest.approx(taken.peak_bytes, rel=0.01)
        assert_same_training(taken, plain)
    lost_ns = [taken.lost_ns or 0 for taken in sweep]
    assert lost_ns == sorted(lost_ns, reverse=True)
    assert rank_correlation(budgets, lost_ns) <= -0.9
    assert sweep[0].flops > 1.2 * plain.flops
    assert sweep[-1].flops == plain.flops
    block_bytes = (most - least) / 8
    for budget, taken in zip(budgets, sweep, strict=True):
        assert budget - taken.peak_bytes < 1.1 * block_bytes  # the activations of another block would not fit


@pytest.mark.more
def test_a_fraction_is_between_the_minimum_and_the_maximum(plain: Taken, bounds: tuple[int, int]) -> None:
    least, most = bounds
    assert trained(0.0).keeps[:-1] == [Keep.INPUT] * 7  # the backward of the last block begins immediately
    assert trained(1.0).keeps == [Keep.ALL] * 8
    assert most == pytest.approx(plain.peak_bytes, rel=0.01)
    assert least < 0.4 * most
    half = trained(0.5)
    assert 0.4 * (most - least) < half.peak_bytes - least < 0.52 * (most - least)


@pytest.mark.more
def test_accumulated_micro_batches_are_all_measured() -> None:
    windows = [[tokens(4, seed=seed), tokens(16, seed=seed), tokens(8, seed=seed)] for seed in range(4)]
    plain, taken = (train(Language(num_layers=4), budget, windows) for budget in ("none", 0.5))
    assert taken.predicted_bytes == pytest.approx(taken.peak_bytes, rel=0.01)
    assert taken.peak_bytes < 0.8 * plain.peak_bytes
    assert_same_training(taken, plain)


def test_a_budget_that_is_too_small_raises_before_the_third_step() -> None:
    module = Net(Language())
    engine = engine_for(module, "2MiB")
    for window in WINDOWS[:2]:
        take_step(engine, module, window)
    weights = [version_of(each) for each in module.parameters()]
    with pytest.raises(TrainingError, match=r"activation.budget='2.0 MiB'.*GiB.*smaller micro-batches"):
        take_step(engine, module, WINDOWS[2])
    assert [version_of(each) for each in module.parameters()] == weights


def test_the_minimum_in_the_error_is_sufficient() -> None:
    module = Net(Language())
    engine = engine_for(module, "2MiB")
    for window in WINDOWS[:2]:
        take_step(engine, module, window)
    with pytest.raises(TrainingError) as caught:
        take_step(engine, module, WINDOWS[2])
    least_mib = float(caught.value.problem.split("(")[1].split(" MiB")[0])
    taken = trained(round((least_mib + 0.05) * 2**20))
    assert taken.peak_bytes <= (least_mib + 0.05) * 2**20


def test_the_choice_is_reported_one_time(capsys: pytest.CaptureFixture[str]) -> None:
    train(Language(num_layers=2), 0.5, WINDOWS)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "budget" in line]
    assert "of 2 blocks" in line
    assert "predicted peak" in line
    assert "ms of a step" in line


@pytest.mark.more
def test_a_larger_batch_is_measured_before_the_next_choice() -> None:
    module = Net(Language())
    small, large = [tokens(4)], [tokens(16)]
    budget = trained(0.3).peak_bytes
    engine = engine_for(module, budget)
    for _ in range(4):
        take_step(engine, module, small)
    assert [block.keep for block in recompute_of(engine).blocks] == [Keep.ALL] * 8
    # the engine measures the first of these two steps
    assert measured_peak(engine, module, large) <= TOLERANCE * budget
    keeps = [block.keep for block in recompute_of(engine).blocks]
    assert Keep.INPUT in keeps
    take_step(engine, module, small)
    # no batch was larger, so nothing was measured again
    assert [block.keep for block in recompute_of(engine).blocks] == keeps


def test_a_failed_step_has_no_effect(plain: Taken) -> None:
    module = Net(Language())
    engine = engine_for(module, 0.5)
    torch.manual_seed(1)
    losses = [take_step(engine, module, WINDOWS[0])]
    state = torch.get_rng_state()
    with pytest.raises(TypeError):
        engine.forward_backward(lambda batch, _: module.training_step(batch), [(None,)])
    with pytest.raises(KeyError):
        engine.forward_backward(lambda batch, _: fail_after(module)(batch), WINDOWS[1])
    torch.set_rng_state(state)
    losses += [take_step(engine, module, window) for window in WINDOWS[1:]]
    assert losses == plain.losses
    assert len({block.keep for block in recompute_of(engine).blocks}) > 1


class Counted(Net):
    num_terms = 1

    def num_loss_terms(self, batch: Any) -> int:
        return self.num_terms


def test_a_step_that_is_rejected_before_its_forward_is_not_measured() -> None:
    module = Counted(Language())
    engine = engine_for(module, 0.5)
    take_step(engine, module, WINDOWS[0])
    before = [block.forward for block in recompute_of(engine).blocks]
    module.num_terms = 0
    with pytest.raises(TrainingError, match="num_loss_terms"):
        engine.forward_backward(lambda batch, _: module.training_step(batch), [*WINDOWS[1], *WINDOWS[2]])
    assert [block.forward for block in recompute_of(engine).blocks] == before


def fail_after(module: Net) -> Callable[[Any], Tensor]:
    def step(batch: Any) -> Tensor:
        module.training_step(batch)
        raise KeyError("after the forward")

    return step


def test_a_step_without_a_loss_is_not_measured() -> None:
    module = Net(Language())
    engine = engine_for(module, 0.5)
    take_step(engine, module, WINDOWS[0])
    assert engine.forward_backward(lambda batch, _: None, WINDOWS[1]) is None
    take_step(engine, module, WINDOWS[2])
    take_step(engine, module, WINDOWS[3])
    assert len({block.keep for block in recompute_of(engine).blocks}) > 1


class Trained(Net):
    """Module for a Trainer."""

    def __init__(self) -> None:
        super().__init__(Language(num_layers=4))

    def train_dataloader(self) -> list[tuple[Tensor]]:
        return [tokens(seed=seed) for seed in range(4)]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def test_with_the_trainer_and_after_a_resume(make_trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    def fit(budget: str | float, max_epochs: int, **keywords: Any) -> dict[str, Tensor]:
        module = Trained()
        torch.manual_seed(1)
        trainer = make_trainer(activation_checkpointing=budget, max_epochs=max_epochs)
        trainer.fit(module, **keywords)
        trainer.save_checkpoint(tmp_path / f"{budget}-{max_epochs}")
        return module.state_dict()

    plain = fit("none", 2)
    for name, each in fit(0.5, 2).items():
        assert torch.equal(each, plain[name]), name
    fit("5MiB", 1)
    for name, each in fit("5MiB", 2, ckpt_path=tmp_path / "5MiB-1").items():
        assert torch.equal(each, plain[name]), name
