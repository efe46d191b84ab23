"""Tests of the bytes that are saved for backward with a context size."""

import pytest
import torch

from roomier import Module
from roomier.models.gpt import GPT, GPTConfig
from roomier.plan import plan_from_flags
from roomier.planner.dry_runs.dry_run import dry_run
from roomier.planner.memory.kinds import Kind
from roomier.planner.workload import Workload


class Deep(Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.network = GPT(GPTConfig(512, length, num_layers=12, num_heads=8, width=64, dropout=0.0))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.network(batch, batch.roll(-1, 1))[1]
        return loss


def saved_bytes(size: int) -> int:
    """Return the bytes that a rank saves for backward if each rank has 256 tokens of each sequence."""
    length, strategy = 256 * size, {"name": "zero3", "context_parallel_size": size}
    chosen = strategy if size > 1 else "single"
    plan = plan_from_flags(strategy=chosen, devices=size, accelerator="cpu", chunked_loss=True, optimizer="adamw")
    run = dry_run(Workload.of(Deep(length), torch.zeros(2, length, dtype=torch.long)), plan)
    return max(each.end[Kind.ACTIVATION] for each in run.intervals)


@pytest.mark.more
def test_longer_sequences_on_more_ranks_save_about_as_many_bytes_per_rank() -> None:
    one = saved_bytes(1)
    for size in 2, 4:
        assert saved_bytes(size) <= 1.1 * one
