"""The plans and models that ``roomier bench planner`` compares."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from roomier.bench.planner_models import MODELS
from roomier.plan import Plan

RECOMPUTE = ("none", "full", "selective")
BUDGETS = ("budget 0.25", "budget 0.5", "budget 0.75")
PRECISIONS = ("32-true", "bf16-mixed")
OPTIMIZERS = ("adamw", "adafactor", "adamw8bit")
SETUPS = (
    ("single", 1),
    *((strategy, num_ranks) for num_ranks in (2, 4) for strategy in ("ddp", "zero1", "zero2", "zero3")),
    ("hsdp", 4),
)
_LORA = "llama_lora"  # the Llama with adapters, which the plan adds to the model
_WITHOUT_BLOCKS = ("lstm", "lstm_padded", "recommender")  # models without blocks to recompute


@dataclass(frozen=True)
class Case:
    """One plan for one model.

    Attributes:
        model: key of :data:`roomier.bench.planner_models.MODELS`, or ``"llama_lora"``.
        strategy: value of ``Trainer(strategy=...)``.
        num_ranks: number of ranks.
        recompute: policy of activation checkpointing. For an activation budget, the word ``budget`` and the fraction,
            such as ``"budget 0.5"``.
        precision: precision mode of the Plan.
        optimizer: value of ``Trainer(optimizer=...)``.
        accumulate: number of micro-batches per step.
    """

    model: str
    strategy: str
    num_ranks: int
    recompute: str
    precision: str
    optimizer: str
    accumulate: int = 1

    @property
    def network(self) -> str:
        """The key of :data:`roomier.bench.planner_models.MODELS`."""
        return "llama" if self.model == _LORA else self.model

    def plan(self) -> Plan:
        """Return the plan.

        Raises:
            PlanError: a rule rejects the plan.
        """
        parallel: dict[str, Any] = {"strategy": self.strategy, "devices": self.num_ranks, "accelerator": "cpu"}
        if self.strategy == "hsdp":
            parallel["shard_size"] = self.num_ranks // 2
        policy, _, fraction = self.recompute.partition(" ")
        budget = {"budget_fraction": float(fraction)} if fraction else {}
        sections: dict[str, Any] = {
            "parallel": parallel,
            "precision": {"mode": self.precision},
            "batch": {"accumulate_grad_batches": self.accumulate, "gradient_clip_val": 1.0},
            "optimizer": {"name": self.optimizer, "lr": 1e-4},
            "activation": {"policy": policy, **budget},
        }
        if self.model == _LORA:
            sections["adapter"] = {"lora_rank": 4}
        return Plan.from_dict(sections)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON data."""
        return asdict(self)


def all_cases() -> list[Case]:
    """Return a case for every combination of model, strategy and options."""
    return [
        Case(model, strategy, num_ranks, *levers)
        for model in _names()
        for strategy, num_ranks in SETUPS
        for levers in _levers(model)
    ]


def some_cases(per_pair: int = 2) -> list[Case]:
    """Return cases for every combination of model, strategy and number of ranks.

    Each of these combinations has ``per_pair`` cases with different options, so that every pair of options occurs in at
    least one case.
    """
    return [
        _case(model, setup, i + j + 5 * turn, accumulate=1 + (i + j + turn) % 2)
        for i, model in enumerate(_names())
        for j, setup in enumerate(SETUPS)
        for turn in range(per_pair)
    ]


def few_cases() -> list[Case]:
    """Return two cases with different strategies for every model. Every option occurs in at least two cases."""
    cases = []
    for i, model in enumerate(_names()):
        for turn in range(2):
            j = 3 * i + 7 * turn + i // len(SETUPS)
            cases.append(_case(model, SETUPS[j % len(SETUPS)], i + j + 5 * turn, accumulate=1 + (i + turn) % 2))
    return cases


def budget_cases() -> list[Case]:
    """Return cases with several activation budgets: on one rank, all models that have blocks; on two ranks, a GPT."""
    names = [name for name in _names() if name not in _WITHOUT_BLOCKS]
    cases = [
        Case(model, "single", 1, budget, PRECISIONS[(i + j) % 2], "adamw", accumulate=1 + i % 2)
        for i, model in enumerate(names)
        for j, budget in enumerate(BUDGETS)
    ]
    strategies = ("ddp", "zero1", "zero2", "zero3")
    return [
        *cases,
        *(
            Case("gpt", strategy, 2, budget, PRECISIONS[i % 2], "adamw")
            for i, strategy in enumerate(strategies)
            for budget in BUDGETS
        ),
    ]


def _case(model: str, setup: tuple[str, int], number: int, accumulate: int) -> Case:
    levers = _levers(model)
    # The number of combinations is never a multiple of 5, so steps of 5 reach all combinations.
    return Case(model, *setup, *levers[5 * number % len(levers)], accumulate=accumulate)


def _levers(model: str) -> list[tuple[str, str, str]]:
    policies = ("none",) if model in _WITHOUT_BLOCKS else RECOMPUTE
    return list(product(policies, PRECISIONS, OPTIMIZERS))


def _names() -> list[str]:
    return [*MODELS, _LORA]
