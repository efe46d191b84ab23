"""Which plans of which models ``roomier bench planner`` looks at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from roomier.bench.planner_models import MODELS
from roomier.plan import Plan

RECOMPUTE = ("none", "full", "selective")
PRECISIONS = ("32-true", "bf16-mixed")
OPTIMIZERS = ("adamw", "adafactor", "adamw8bit")
SETUPS = (
    ("single", 1),
    *((strategy, num_ranks) for num_ranks in (2, 4) for strategy in ("ddp", "zero1", "zero2", "zero3")),
    ("hsdp", 4),
)
_LORA = "llama_lora"  # the Llama with adapters, which the plan adds
_LEVERS = {  # Adafactor does not work on parameters that are cut
    strategy: tuple(
        product(RECOMPUTE, PRECISIONS, OPTIMIZERS if strategy in ("single", "ddp") else ("adamw", "adamw8bit"))
    )
    for strategy, _ in SETUPS
}


@dataclass(frozen=True)
class Case:
    """One plan of one model.

    Args:
        accumulate: micro-batches of a step.
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
        """
        Raises:
            PlanError: a rule refuses it.
        """
        parallel: dict[str, Any] = {"strategy": self.strategy, "devices": self.num_ranks, "accelerator": "cpu"}
        if self.strategy == "hsdp":
            parallel["shard_size"] = self.num_ranks // 2
        sections: dict[str, Any] = {
            "parallel": parallel,
            "precision": {"mode": self.precision},
            "batch": {"accumulate_grad_batches": self.accumulate, "gradient_clip_val": 1.0},
            "optimizer": {"name": self.optimizer, "lr": 1e-4},
            "activation": {"policy": self.recompute},
        }
        if self.model == _LORA:
            sections["adapter"] = {"lora_rank": 4}
        return Plan.from_dict(sections)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def all_cases() -> list[Case]:
    """Every model under every strategy, with every combination of the levers."""
    return [
        Case(model, strategy, num_ranks, *levers)
        for model, (strategy, num_ranks) in product(_names(), SETUPS)
        for levers in _LEVERS[strategy]
    ]


def some_cases(per_pair: int = 2) -> list[Case]:
    """Every model under every strategy and number of ranks, each with ``per_pair`` of the combinations of
    levers, others each time: any two choices are together in some case."""
    return [
        Case(model, strategy, num_ranks, *_levers(strategy, i + j + 5 * turn), accumulate=1 + (i + j + turn) % 2)
        for (i, model), (j, (strategy, num_ranks)), turn in product(
            enumerate(_names()), enumerate(SETUPS), range(per_pair)
        )
    ]


def few_cases() -> list[Case]:
    """Every model twice, each time under another strategy; every lever more than twice."""
    return list(_diagonals(2))


def _diagonals(num: int) -> Iterator[Case]:
    for i, model in enumerate(_names()):
        for turn in range(num):
            j = (3 * i + 7 * turn + i // len(SETUPS)) % len(SETUPS)
            strategy, num_ranks = SETUPS[j]
            yield Case(model, strategy, num_ranks, *_levers(strategy, i + j + 5 * turn), accumulate=1 + (i + turn) % 2)


def _levers(strategy: str, number: int) -> tuple[str, str, str]:
    levers = _LEVERS[strategy]
    return levers[5 * number % len(levers)]  # 5 divides neither 12 nor 18: all of them come


def _names() -> list[str]:
    return [*MODELS, _LORA]
