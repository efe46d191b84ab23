"""Plans in which the planner chooses the number of ranks that share a sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from roomier import Module, Trainer
from roomier.callbacks import MemoryForecast
from roomier.core.errors import PlanError, RoomierError
from roomier.core.ranks import Ranks
from roomier.core.world import World
from roomier.models.gpt import GPT, GPTConfig
from roomier.plan import Plan
from roomier.planner.choice import Choice
from roomier.planner.choosing.choose import choose
from roomier.planner.forecast import Forecast, StepTime
from roomier.planner.hardware.spec import machine_of
from roomier.planner.memory.kinds import Interval, Kind
from roomier.train.settling.context import check_is_divided_by_roomier
from tests.planner.made_up_prices import auto, language
from tests.ranks.pool import RankPool

LENGTH, NUM_SAMPLES = 1024, 8
CONFIG = GPTConfig(vocab_size=16, context=LENGTH, num_layers=4, num_heads=4, width=64, dropout=0.0)
MACHINE = machine_of("h100:4")
STATES, ACTIVATIONS, SAVED = 100, 1600, 400  # bytes; with full recomputation, SAVED bytes of activations remain


class Prices:
    """Prices of a model whose activations are divided by the context size, on links of different speed."""

    def __init__(self, exchange_s: float = 0.1, states_bytes: int = STATES) -> None:
        self.exchange_s, self.states_bytes = exchange_s, states_bytes
        self.sizes: set[int] = set()

    def estimate(self, plan: Plan, micro_batch: int) -> Forecast:
        size, policy = plan.parallel.context_parallel_size, plan.activation.policy
        self.sizes.add(size)
        step_s = 1.0 + 0.3 * (policy != "none") + self.exchange_s * (size - 1)
        if {plan.offload.activations, plan.offload.optimizer_states, plan.offload.parameters} != {"none"}:
            step_s += 5
        activations = (ACTIVATIONS if policy == "none" else SAVED) // size
        held = {Kind.PARAMETER: self.states_bytes, Kind.ACTIVATION: activations}
        interval = Interval("forward", "", held, held, held)
        return Forecast(plan, MACHINE, micro_batch, "dry run", (interval,), time=StepTime(step_s))


def chosen(prices: Prices, budget_bytes: int, **options: Any) -> tuple[Choice, Plan | None]:
    plan = auto(devices=4, accelerator="cuda", accumulate_grad_batches=3)
    choice = choose(language(1), plan, MACHINE, budget_bytes=budget_bytes, prices=prices, **options)
    return choice, None if choice.chosen is None else choice.chosen.plan


def test_no_size_is_evaluated_if_activations_fit_or_are_not_the_reason() -> None:
    for prices, budget_bytes in (Prices(), STATES + ACTIVATIONS), (Prices(states_bytes=9000), STATES + SAVED):
        chosen(prices, budget_bytes)
        assert prices.sizes == {1}


@pytest.mark.parametrize(("exchange_s", "size"), [(0.1, 2), (0.4, 1)])
def test_a_size_replaces_recomputation_if_it_is_faster(exchange_s: float, size: int) -> None:
    prices = Prices(exchange_s)
    choice, plan = chosen(prices, STATES + ACTIVATIONS // 2)
    assert plan is not None
    assert plan.parallel.context_parallel_size == size
    assert plan.activation.policy == ("none" if size == 2 else "selective")
    assert plan.batch.accumulate_grad_batches == 3 * size
    assert plan.batch.seeding == ("events" if size == 2 else "stream")
    assert choice.chosen is not None
    assert choice.chosen.global_batch == 4 * 3
    assert 4 not in prices.sizes


def test_the_smallest_size_that_fits_is_chosen() -> None:
    for size in 2, 4:
        _, plan = chosen(Prices(exchange_s=9.0), STATES + SAVED // size)
        assert plan is not None
        assert plan.parallel.context_parallel_size == size


def test_micro_batches_that_callbacks_count_keep_their_ranks() -> None:
    prices = Prices()
    _, plan = chosen(prices, STATES + SAVED // 2, keeps_micro_batch="a hook counts them")
    assert prices.sizes == {1}
    assert plan is None or plan.parallel.context_parallel_size == 1


def test_without_supported_blocks_the_next_plan_is_chosen() -> None:
    def check(plan: Plan) -> None:
        if plan.parallel.context_parallel_size > 1:
            raise PlanError("context_parallel_size", 2, "a block mixes tokens", "Use 1")

    choice, plan = chosen(Prices(), STATES + ACTIVATIONS // 2, check=check)
    assert plan is not None
    assert (plan.parallel.context_parallel_size, plan.activation.policy) == (1, "selective")
    assert any("a block mixes tokens" in each.reason for each in choice.considered)


class Language(Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = GPT(CONFIG)
        self.read: list[int] = []

    def training_step(self, batch: Tensor) -> Tensor:
        self.read += batch[:, 0].tolist()
        loss: Tensor = self.network(batch % 16, batch % 16)[1]
        return loss


class Sequences(Dataset[Tensor]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return index + torch.arange(LENGTH)


def test_a_loader_that_divides_its_data_among_all_ranks_is_rejected() -> None:
    sampler = DistributedSampler(Sequences(), num_replicas=2, rank=0)
    loaders = type("Loaders", (), {"train_loader": DataLoader(Sequences(), sampler=sampler)})()
    ranks = type("TwoRanks", (Ranks,), {"__init__": lambda self: setattr(self, "world", World(0, 2))})()
    with pytest.raises(PlanError, match="DistributedSampler divides the training data"):
        check_is_divided_by_roomier(auto(), loaders, ranks)


def fit(budget: str, strategy: Any = "auto", **options: Any) -> dict[str, Any]:
    module, callback = Language(), MemoryForecast()
    trainer = Trainer(
        strategy=strategy,
        devices=2,
        accelerator="cpu",
        optimizer="adamw",
        memory_budget=budget,
        max_epochs=1,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    try:
        trainer.fit(module, DataLoader(Sequences(), batch_size=1))
    except RoomierError as error:
        return {"error": str(error)}
    assert callback.record is not None
    assert trainer.choice is not None
    parallel, plans = trainer.plan.parallel, trainer.choice.considered
    return {
        "sizes": (parallel.context_parallel_size, {each.plan.parallel.context_parallel_size for each in plans}),
        "fitting": {each.plan.parallel.context_parallel_size for each in plans if each.fits},
        "is_within_budget": callback.record.measured_bytes <= trainer.choice.budget_bytes,
        "step_samples": trainer.plan.batch.accumulate_grad_batches * parallel.num_data_ranks,
        "num_steps": trainer.global_step,
        "read": sorted(module.read),
    }


@pytest.mark.more
def test_auto_chooses_a_context_size_if_no_other_plan_fits(on_ranks: RankPool) -> None:
    for each in on_ranks(2, fit, "6MiB"):
        assert each == {
            "sizes": (2, {1, 2}),
            "fitting": {2},
            "is_within_budget": True,
            "step_samples": 2,
            "num_steps": NUM_SAMPLES // 2,
            "read": list(range(NUM_SAMPLES)),
        }


@pytest.mark.more
@pytest.mark.parametrize("name", [pytest.param("zero3", marks=pytest.mark.slow), "auto"])
def test_a_budget_with_a_given_context_size(on_ranks: RankPool, name: str) -> None:
    strategy = {"name": name, "context_parallel_size": 2}
    for each in on_ranks(2, fit, "8MiB", strategy, activation_checkpointing="full"):
        assert each["sizes"] == (2, {2})
        assert each["is_within_budget"]
        assert (each["step_samples"], each["num_steps"]) == (1, NUM_SAMPLES)


@pytest.mark.more
def test_a_budget_that_is_too_small_for_a_given_context_size(on_ranks: RankPool) -> None:
    strategy = {"name": "zero3", "context_parallel_size": 2}
    for each in on_ranks(2, fit, "7MiB", strategy):
        assert "zero3, 2 ranks per sequence, adamw, 1 x 1 samples needs" in each["error"]
        assert "'context_parallel_size': 2" in each["error"].partition("Use Trainer(")[2]
