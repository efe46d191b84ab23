"""Parameters leave a simulated accelerator, which detects missing synchronizations."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from roomier.api.blocks import find_blocks
from roomier.techniques.offload.parameters import OffloadedParameters
from roomier.techniques.offload.regions import regions_of
from roomier.techniques.offload.residency import record_sizes
from tests.offload.training_on_device import compare, tier_of
from tests.simulator import simulated
from tests.simulator.gpt import GPT, batches
from tests.simulator.workers import SimulatedRanks

FAST = [
    (False, None, "cpu", "LATE"),
    (False, torch.bfloat16, "disk", "OTHERS_FIRST"),
    (True, torch.bfloat16, "cpu", "OTHERS_FIRST"),
    (True, None, "disk", "LATE"),
]
ALL = product((False, True), (None, torch.bfloat16), ("cpu", "disk"), ("LATE", "OTHERS_FIRST", "IMMEDIATE"))


@pytest.mark.parametrize(
    ("is_sharded", "dtype", "kind", "schedule"),
    [pytest.param(*case, marks=[] if case in FAST else pytest.mark.slow) for case in ALL],
)
def test_same_bits_without_races_and_host_waits(
    on_simulated: SimulatedRanks, is_sharded: bool, dtype: torch.dtype | None, kind: str, schedule: str
) -> None:
    for found in on_simulated(1 + is_sharded, compare, is_sharded, kind, dtype, schedule=schedule):
        assert found == {"races": [], "differences": 0}


def memory_in_step(num_blocks: int) -> tuple[int, int]:
    """Return the peak memory of the device in a step, minus the memory before the step, and the size of a block."""
    network = GPT(width=64, num_blocks=num_blocks).to(simulated.DEVICE)
    blocks = find_blocks(network)
    regions = regions_of(network, blocks, 1, lambda module: False)
    with tier_of("cpu", record_sizes(regions)) as tier:
        parameters = OffloadedParameters(network, blocks, regions, tier, torch.device(simulated.DEVICE))
        parameters.install()
        tokens = batches(1, 1)[0][:, :3].to(simulated.DEVICE)
        peaks = []
        for _ in range(2):
            parameters.gradients.begin_step()
            parameters.settle()
            torch.accelerator.reset_peak_memory_stats()
            before = torch.accelerator.memory_allocated()
            network(tokens).backward()
            parameters.gradients.leave_complete()
            peaks.append(torch.accelerator.max_memory_allocated() - before)
        parameters.close()
    return peaks[-1], max(region.num_bytes for region in regions)


def test_at_most_four_blocks_are_on_the_device(on_simulated: SimulatedRanks) -> None:
    """Two blocks with parameters, and one block with its gradients and the memory from which they are copied."""
    [(peak_bytes, block_bytes)] = on_simulated(1, memory_in_step, 12)
    assert peak_bytes < 5 * block_bytes
