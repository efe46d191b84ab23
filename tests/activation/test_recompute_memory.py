"""Bytes that each policy saves for backward, per block and at the peak of a step."""

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
from roomier.models.gpt import GPT, GPTConfig
from roomier.plan import plan_from_flags
from roomier.planner.memory.kinds import Kind
from roomier.planner.memory.tracker import tracking

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
    """Return the bytes that the forward saves for backward, and the peak including temporary tensors."""
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
    """Return the saved bytes per block, in units of the size of a block's input."""
    return (kept_and_peak(policy, 8)[0] - kept_and_peak(policy, 4)[0]) / 4 / INPUT


def test_saved_bytes_per_block() -> None:
    statistics = 1 / 16  # mean and deviation of each row in two norms, and one number per row of attention scores
    assert WIDTH == 16 * HEADS == 64
    assert kept_per_block("full") == 1
    # The input; query, key and value; result and statistics of attention; the result of each branch; 4 of the MLP.
    assert kept_per_block("selective") == 1 + 3 + 1 + statistics + 2 * 1 + 4
    # Norms: 2 inputs, 2 results and statistics; query, key and value; attention twice; before and after GELU.
    assert kept_per_block("none") == 2 + 2 + statistics + 3 + 1 + statistics + 4 + 4
    assert kept_per_block("every_n") == (kept_per_block("none") + 1) / 2


def test_peaks_have_the_order_of_the_saved_bytes() -> None:
    peaks = {policy: kept_and_peak(policy, 8)[1] / INPUT for policy in ("full", "every_n", "selective", "none")}
    assert peaks["full"] < peaks["every_n"] < peaks["none"]
    assert peaks["full"] < peaks["selective"] < peaks["none"]
    # The inputs of all blocks, the activations of one block, and the gradients in this block, the widest of which is
    # the gradient of GELU.
    assert peaks["full"] <= 8 + kept_per_block("none") + 2 * 4
    assert peaks["full"] - kept_and_peak("full", 4)[1] / INPUT == 4, "each additional block saves only its input"
