"""How many bytes each policy keeps for the backward, for each block and at the peak of a step."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from roomier import Module
from roomier.core.ranks import Ranks
from roomier.core.world import World
from roomier.engine.build import build
from roomier.engine.eager import EagerEngine
from roomier.engine.optimizers import configure
from roomier.memory.kinds import Kind
from roomier.memory.tracker import tracking
from roomier.models.gpt import GPT, GPTConfig
from roomier.plan import plan_from_flags

SEQUENCES, TOKENS, WIDTH, HEADS = 4, 64, 64, 4
INPUT = SEQUENCES * TOKENS * WIDTH * 4


class Language(Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        config = GPTConfig(
            vocab_size=8, context=TOKENS, num_layers=num_layers, num_heads=HEADS, width=WIDTH, dropout=0.0
        )
        self.gpt = GPT(config)

    def training_step(self, batch: torch.Tensor) -> Any:
        return self.gpt(batch, batch)[1]


@cache
def kept_and_peak(policy: str, num_layers: int) -> tuple[int, int]:
    """Bytes that the forward leaves for the backward, and the peak of these and of temporary ones."""
    module = Language(num_layers)
    plan = plan_from_flags(accelerator="cpu", optimizer="sgd", learning_rate=0.1, activation_checkpointing=policy)
    ranks = Ranks(World(0, 1, 0, 0, 1))
    engine, _ = build(plan, module, lambda blocks: configure(plan, module, lambda: 1, blocks), EagerEngine, ranks)
    batch = torch.zeros(SEQUENCES, TOKENS, dtype=torch.int64)
    with tracking(engine) as tracker:
        kept = 0

        def note(loss: torch.Tensor) -> None:
            nonlocal kept
            kept = tracker.now().total([Kind.ACTIVATION])

        engine.hooks.before_backward = (*engine.hooks.before_backward, note)
        engine.forward_backward(lambda batch, _: module.training_step(batch), [batch])
    engine.close()
    return kept, tracker.peak([Kind.ACTIVATION, Kind.TEMPORARY]).total([Kind.ACTIVATION, Kind.TEMPORARY])


def kept_per_block(policy: str) -> float:
    """In units of a block's input."""
    return (kept_and_peak(policy, 8)[0] - kept_and_peak(policy, 4)[0]) / 4 / INPUT


def test_what_is_kept_for_each_block() -> None:
    statistics = 1 / 16  # of two norms, mean and deviation of each row; of attention, one number for a row of scores
    assert WIDTH == 16 * HEADS == 64
    assert kept_per_block("full") == 1
    # Its input; query, key and value; of attention its result and statistics; the result of each branch; of the MLP 4.
    assert kept_per_block("selective") == 1 + 3 + 1 + statistics + 2 * 1 + 4
    # Norms: 2 inputs, 2 results and statistics; query, key and value; attention twice; before GELU and after it.
    assert kept_per_block("none") == 2 + 2 + statistics + 3 + 1 + statistics + 4 + 4
    assert kept_per_block("every_n") == (kept_per_block("none") + 1) / 2


def test_peaks_are_in_the_order_of_what_is_kept() -> None:
    peaks = {policy: kept_and_peak(policy, 8)[1] / INPUT for policy in ("full", "every_n", "selective", "none")}
    assert peaks["full"] < peaks["every_n"] < peaks["none"]
    assert peaks["full"] < peaks["selective"] < peaks["none"]
    # The inputs of all blocks, what one block keeps, and gradients within it, of which the widest is that of GELU.
    assert peaks["full"] <= 8 + kept_per_block("none") + 2 * 4
    assert peaks["full"] - kept_and_peak("full", 4)[1] / INPUT == 4, "of each further block its input alone"
