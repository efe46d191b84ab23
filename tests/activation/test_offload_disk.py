"""Activations on disk: equal gradients, disk errors, and regions of the file."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from roomier import Module, Trainer
from roomier.callbacks import MemoryForecast
from roomier.core.errors import TierError
from roomier.core.wrapped_forward import install, unwrap
from roomier.models.gpt import GPT, GPTConfig
from roomier.techniques.activation.block_forward import BlockForward, Keep
from roomier.techniques.activation.copies import Offload
from roomier.techniques.activation.disk_copies import GROWTH_BYTES, DiskCopies, FileRegion, Regions
from roomier.techniques.tiers.scratch import Scratch
from tests.activation.kinds import KINDS
from tests.activation.steps import assert_equal, step_of, use_no_cache
from tests.activation.test_offload import CPU, NUM_BLOCKS, Net, _is_block
from tests.covering import few


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Scratch]:
    scratch = Scratch(tmp_path)
    yield scratch
    scratch.close()


@contextmanager
def on_disk(blocks: list[nn.Module], keep: Keep, scratch: Scratch) -> Iterator[DiskCopies]:
    copies = DiskCopies(CPU, scratch)
    offload = Offload(CPU, 1, copies)
    for block in blocks:
        install(block, BlockForward(block, keep, offload))
    try:
        yield copies
    finally:
        for block in blocks:
            unwrap(block)


@pytest.mark.parametrize("keep", Keep)
@pytest.mark.parametrize("kind", few(KINDS))
def test_every_kind_of_model_has_the_same_gradients(kind: str, keep: Keep, scratch: Scratch) -> None:
    def step(keeps: Keep | None) -> Any:
        torch.manual_seed(0)
        network, loss = KINDS[kind]()
        network.train()
        if keeps is None:
            use_no_cache(network)
        blocks = [] if keeps is None else [each for each in network.modules() if _is_block(each)]
        with on_disk(blocks, keeps or Keep.ALL, scratch) as copies:
            steps = [step_of(network, loss) for _ in range(2)]
        if keeps is not None:
            assert copies.bytes_written >= copies.bytes_read
        return steps

    for ours, theirs in zip(step(keep), step(None), strict=True):
        assert_equal(ours, theirs)


def test_regions_are_used_again_in_later_steps(scratch: Scratch) -> None:
    net = Net()
    with on_disk(list(net.blocks), Keep.ALL, scratch) as copies:
        reserved, traffic = [], []
        for _ in range(4):
            net.loss().backward()
            scratch.wait_for(lambda: copies._write.is_done)
            reserved.append(scratch.reserved_bytes)
            traffic.append((copies.bytes_written, copies.bytes_read))
    assert reserved == reserved[:1] * 4
    assert [each[0] for each in traffic] == [traffic[0][0] * (step + 1) for step in range(4)]
    assert [each[1] for each in traffic] == [traffic[0][1] * (step + 1) for step in range(4)]
    written, read = traffic[0]
    # In backward, the activations of the last two blocks are still in memory, and x and the mask have one copy each.
    assert (NUM_BLOCKS - 2) / NUM_BLOCKS * written * 0.9 <= read < written


def test_errors_of_the_disk_are_raised_in_the_step(scratch: Scratch) -> None:
    net = Net()
    with on_disk(list(net.blocks), Keep.ALL, scratch):
        loss = net.loss()
        os.truncate(scratch.path, 0)
        with pytest.raises(TierError, match="truncated"):
            loss.backward()
        with pytest.raises(TierError, match="truncated"):
            net.loss()


def test_a_graph_that_is_not_used_frees_its_regions(scratch: Scratch) -> None:
    net = Net()
    with on_disk(list(net.blocks), Keep.ALL, scratch) as copies:
        for _ in range(3):
            net.loss()
            scratch.wait_for(lambda: copies._write.is_done)
    assert scratch.reserved_bytes == 4096 + GROWTH_BYTES


actions = st.lists(st.tuples(st.booleans(), st.integers(1, 40 * 2**20)), max_size=40)


@given(actions=actions)
def test_regions_never_overlap(actions: list[tuple[bool, int]]) -> None:
    class File:
        reserved_bytes = 4096

        def reserve(self, num_bytes: int) -> int:
            assert num_bytes % 4096 == 0
            self.reserved_bytes += num_bytes
            return self.reserved_bytes - num_bytes

    file = File()
    regions = Regions(file)  # type: ignore[arg-type]
    held: list[FileRegion] = []
    most_bytes = 0
    for frees, number in actions:
        if frees and held:
            held.pop(number % len(held))
        else:
            held.append(regions.allocate(number))
        places = sorted((each.position, each.position + each.num_bytes) for each in held)
        assert all(end <= start for (_, end), (start, _) in pairwise(places))
        assert all(start >= 4096 and end <= file.reserved_bytes for start, end in places)
        most_bytes = max(most_bytes, sum(end - start for start, end in places))
    held.clear()
    before = regions.reserved_bytes
    if before:
        regions.allocate(before)  # all free parts are merged
        assert regions.reserved_bytes == before <= 2 * most_bytes + 2 * GROWTH_BYTES


PEAK = """
import sys
import torch
from roomier import Module, Trainer
from roomier.models.gpt import GPT, GPTConfig

class Language(Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gpt = GPT(GPTConfig(vocab_size=64, context=256, width=128, num_heads=4, num_layers=int(sys.argv[2])))
        self.losses = []

    def training_step(self, batch):
        loss = self.gpt(batch, batch)[1]
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

module = Language()
offload = None if sys.argv[1] == "none" else {"activations": "disk", "folder": sys.argv[1]}
options = dict(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
batches = list(torch.randint(64, (2, 16, 256)))
Trainer(max_epochs=1, offload=offload, enable_model_summary=False, **options).fit(module, batches)
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]
print(*module.losses, int(peak) * 1024)
"""


def peak_and_losses(folder: str, num_layers: int) -> tuple[int, list[str]]:
    """Return the peak memory of a new process that trains, and its losses."""
    arguments = [sys.executable, "-c", PEAK, folder, str(num_layers)]
    output = subprocess.run(arguments, stdout=subprocess.PIPE, check=True).stdout.decode().split()
    return int(output[-1]), output[:-1]


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads the peak memory of a process from /proc, which only Linux has"
)
@pytest.mark.slow
def test_activations_leave_the_memory_of_the_process(tmp_path: Path) -> None:
    peaks = {}
    for num_layers in (4, 16):
        (in_memory, losses), (on_disk, same) = (peak_and_losses(each, num_layers) for each in ("none", str(tmp_path)))
        assert losses == same
        peaks[num_layers] = in_memory, on_disk
    in_memory, on_disk = (peaks[16][index] - peaks[4][index] for index in range(2))
    # 12 blocks save about 16 tensors of 2 MiB each. On disk, only parameters and gradients remain: 1.6 MiB per block.
    assert in_memory > 12 * 15 * 2**21
    assert on_disk < 0.2 * in_memory


class Language(Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gpt = GPT(GPTConfig(vocab_size=32, context=128, width=128, num_heads=2, num_layers=6))

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.gpt(batch, batch)[1]
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.more
def test_forecast_of_activations_on_disk(make_trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    forecast = MemoryForecast()
    offload = {"activations": "disk", "folder": str(tmp_path)}
    trainer = make_trainer(max_epochs=1, offload=offload, callbacks=[forecast])
    trainer.fit(Language(), list(torch.randint(32, (4, 16, 128))))
    assert forecast.record is not None
    assert forecast.record.forecast_bytes == pytest.approx(forecast.record.measured_bytes, rel=0.01)
    saved_bytes = 6 * 15 * 2**20  # the smallest tensor of a block has 1 MiB
    assert forecast.record.measured_bytes < 0.7 * saved_bytes
