"""No rank holds a full copy of a sharded model. The tests measure the resident memory in MiB while the model is
built."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from roomier.engine.materialise import built_in_parts
from tests.covering import few
from tests.engine.materialised import built, plan_for, ranks_here
from tests.ranks.pool import RankPool

WIDTH, DEPTH = 1536, 18
TENSOR_MIB = WIDTH * WIDTH * 4 / 2**20
MODEL_MIB = TENSOR_MIB * DEPTH
MARGIN_MIB = 24  # margin for loaded code, process groups, and fragmentation of the allocator


class Deep(nn.Module):
    """Module that initializes its weights a second time, as many models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=0.02)


def resident_mib(field: str) -> float:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[field].split()[0]) / 1024


def peak_growth_mib(how: str, weights: Path | None) -> float:
    ranks = ranks_here()
    plan = plan_for("zero3", ranks.world.size)
    built(nn.Linear(8, 8), plan, ranks)  # excludes memory that the first use of code allocates
    small = small_weights(weights)
    with built_in_parts(plan, ranks, has_weights=small is not None):
        warm = nn.Linear(8, 8)
    built(warm, plan, ranks, small)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # returns freed memory of earlier tests, which would hide allocations
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident_mib("VmRSS")
    network = make(how, weights is not None)
    built(network, plan, ranks, weights)
    peak = resident_mib("VmHWM") - before
    kept = sum(each.to_local().numel() for each in network.parameters()) * 4 / 2**20
    assert kept == pytest.approx(MODEL_MIB / ranks.world.size, rel=0.01)
    return peak


def make(how: str, has_weights: bool) -> nn.Module:
    ranks = ranks_here()
    if how == "meta":
        with torch.device("meta"):
            return Deep()
    if how == "real":
        return Deep()
    with built_in_parts(plan_for("zero3", ranks.world.size), ranks, has_weights=has_weights):
        return Deep()


def small_weights(weights: Path | None) -> Path | None:
    return None if weights is None else weights.with_name("small.safetensors")


def stored(folder: Path) -> Path:
    save_file({"weight": torch.ones(8, 8), "bias": torch.ones(8)}, folder / "small.safetensors")
    for index in range(DEPTH):
        name = f"layers.{index}.weight"
        save_file({name: torch.ones(WIDTH, WIDTH)}, folder / f"part-{index:02}.safetensors")
    weight_map = {f"layers.{index}.weight": f"part-{index:02}.safetensors" for index in range(DEPTH)}
    (folder / "model.safetensors.index.json").write_text(str({"weight_map": weight_map}).replace("'", '"'))
    return folder / "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("how", "num_ranks", "from_file"),
    few([("configure_model", 2, False), ("configure_model", 2, True), ("meta", 3, False), ("meta", 2, True)]),
)
def test_a_rank_holds_its_shards_and_a_few_tensors(
    on_ranks: RankPool, tmp_path: Path, how: str, num_ranks: int, from_file: bool
) -> None:
    weights = stored(tmp_path) if from_file else None
    bound = MODEL_MIB / num_ranks + 2 * TENSOR_MIB + MARGIN_MIB
    assert bound < 0.85 * MODEL_MIB
    peaks = on_ranks(num_ranks, peak_growth_mib, how, weights)
    assert max(peaks) < bound


@pytest.mark.more
def test_the_measurement_includes_a_full_model(on_ranks: RankPool) -> None:
    assert min(on_ranks(2, peak_growth_mib, "real", None)) > MODEL_MIB
