"""A model on the meta device is built in the tier of its parameters, one region at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from roomier.api.blocks import find_blocks
from roomier.core.ranks import Ranks
from roomier.core.world import World
from roomier.engine.facts import Facts
from roomier.engine.materialise import take_weights
from roomier.engine.offload import NUM_BUFFERS, offloaded_parameters
from roomier.engine.weights_file import WeightsFile
from roomier.models.gpt import GPT, GPTConfig
from roomier.plan import plan_from_flags
from roomier.techniques.precision.policy import precision_of
from tests.covering import few

CPU = torch.device("cpu")
ALONE = Ranks(World(0, 1, 0, 0, 1))


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("source", ["initial values", "file", "memory"])
def test_values(source: str, precision: str, tmp_path: Path) -> None:
    config = GPTConfig(vocab_size=23, context=12, num_layers=3, num_heads=2, width=16, dropout=0.0, tied_head=True)
    torch.manual_seed(0)
    expected = GPT(config).to(torch.bfloat16 if precision == "bf16-true" else torch.float32)
    plan = plan_from_flags(offload={"parameters": "disk", "folder": str(tmp_path)}, precision=precision)
    torch.manual_seed(0)
    with torch.device("cpu" if source == "memory" else "meta"):
        network = GPT(config)
    weights = None
    if source == "file":
        save_file(
            {name: each for name, each in expected.state_dict().items() if name != "head.weight"},
            tmp_path / "a.safetensors",
        )
        weights = WeightsFile(tmp_path / "a.safetensors")
    given = None if weights is None else weights.check(network)
    taken = take_weights(network, plan, ALONE, given=given)
    mode = precision_of(precision, CPU)
    mode.convert_module(network)
    facts = Facts(network, tuple(find_blocks(network)), CPU, mode, ALONE)
    parameters = offloaded_parameters(plan, facts, taken, min_bytes=1)
    if taken is not None:
        taken.restore(network, network, CPU)
    if weights is not None:
        weights.read_into(network, parameters.prepare_to_write)
    parameters.settle()
    parameters.show_stored()
    assert network.head.weight is network.tokens.weight
    state = network.state_dict()
    for name, each in expected.state_dict().items():
        assert torch.equal(state[name], each), name
    parameters.install()
    tokens = torch.arange(12)[None]
    assert torch.equal(network(tokens), expected(tokens))
    parameters.close()
    assert torch.equal(network.tokens.weight, expected.tokens.weight)


WIDTH, DEPTH = 1024, 16
MODEL_MIB = 2 * WIDTH * WIDTH * 4 * DEPTH / 2**20
BLOCK_MIB = MODEL_MIB / DEPTH
MARGIN_MIB = 24  # margin for loaded code and fragmentation of the allocator
MEASURE = """
import ctypes, gc, sys
from pathlib import Path
from tests.offload.test_construction import DEPTH, construct, resident_mib

construct(2, Path(sys.argv[1]), None)  # excludes memory that the first use of code allocates
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
Path("/proc/self/clear_refs").write_text("5")  # resets the peak
before = resident_mib("VmRSS")
construct(DEPTH, Path(sys.argv[1]), Path(sys.argv[2]) if sys.argv[2:] else None)
print(resident_mib("VmHWM") - before)
"""


class Deep(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        linear = partial(nn.Linear, WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(nn.Sequential(linear(), nn.ReLU(), linear()) for _ in range(depth))


def construct(depth: int, folder: Path, file: Path | None) -> None:
    plan = plan_from_flags(offload={"parameters": "disk", "folder": str(folder)})
    with torch.device("meta"):
        network = Deep(depth)
    weights = None if file is None else WeightsFile(file)
    taken = take_weights(network, plan, ALONE, given=None if weights is None else weights.check(network))
    facts = Facts(network, tuple(find_blocks(network)), CPU, precision_of("32-true", CPU), ALONE)
    parameters = offloaded_parameters(plan, facts, taken)
    assert taken is not None
    taken.restore(network, network, CPU)
    if weights is not None:
        weights.read_into(network, parameters.prepare_to_write)
    parameters.release()


def resident_mib(field: str) -> float:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[field].split()[0]) / 1024


def stored(folder: Path) -> Path:
    """Return the index of one file per layer. The pages of an open file are counted as memory of the process."""
    files = {}
    for layer in range(DEPTH):
        names = [f"layers.{layer}.{part}.weight" for part in (0, 2)]
        save_file({name: torch.ones(WIDTH, WIDTH) for name in names}, folder / f"{layer}.safetensors")
        files |= dict.fromkeys(names, f"{layer}.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    return index


@pytest.mark.more
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(),
    reason="resets the peak memory of a process in /proc, which only Linux supports",
)
@pytest.mark.parametrize("has_file", few([False, True]))
def test_only_the_ring_and_one_parameter_are_in_memory(has_file: bool, tmp_path: Path) -> None:
    arguments = [str(tmp_path)]
    if has_file:
        arguments.append(str(stored(tmp_path)))
    run = subprocess.run([sys.executable, "-c", MEASURE, *arguments], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    peak_mib = float(run.stdout.split()[-1])
    limit_mib = (NUM_BUFFERS + 1) * BLOCK_MIB + MARGIN_MIB
    assert limit_mib < 0.6 * MODEL_MIB
    assert peak_mib < limit_mib
