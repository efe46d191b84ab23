"""Training with sharded parameters in a tier computes the same bits as training with shards on the device."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from roomier.api.blocks import find_blocks
from roomier.core.mesh import Mesh
from roomier.core.sharded import local_part
from roomier.core.torch_offload import groups_of
from roomier.core.world import World
from roomier.core.wrapped_forward import unwrap
from roomier.models.gpt import GPT, GPTConfig
from roomier.plan.parts import ActivationPlan, OffloadPlan
from roomier.techniques.activation.recompute import apply_recompute
from roomier.techniques.offload.residency import UPDATE, record_sizes
from roomier.techniques.offload.shards import OffloadedShards, sharded_regions
from roomier.techniques.parallel.mesh import make_mesh
from roomier.techniques.parallel.shard import Sharding, Shards
from tests.activation.steps import ALONE, CPU
from tests.covering import few
from tests.offload.checking_tier import CheckingTier
from tests.ranks.pool import RankPool

TOKENS = torch.arange(24).view(2, 12) * 7 % 23


@dataclass
class Result:
    """Losses, and the final shards of this rank."""

    losses: list[float] = field(default_factory=list)
    shards: dict[str, Tensor] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)


def train(offloads: bool, dtype: torch.dtype | None, recompute: str, num_shards: int, num_ranks: int) -> Result:
    torch.manual_seed(0)
    # The number of ranks does not divide these widths, so shards have padding.
    network = GPT(GPTConfig(vocab_size=23, context=12, num_layers=4, num_heads=3, width=15, dropout=0.1))
    blocks = find_blocks(network)
    apply_recompute(blocks, ActivationPlan(policy=recompute), OffloadPlan(), CPU, ALONE)
    sharding = Sharding(
        make_mesh("cpu", Mesh(World(torch.distributed.get_rank(), num_ranks), shard=num_shards)),
        frees_parameters=True,
        reduces_each_micro_batch=True,
        compute_dtype=dtype,
    )
    shards = Shards(network, sharding, blocks)
    shards.begin_run()
    result = Result()
    offloaded: OffloadedShards | None = None
    if offloads:
        groups = groups_of(network)
        regions = sharded_regions(groups)
        tier = CheckingTier(record_sizes(regions))
        offloaded = OffloadedShards(network, groups, regions, tier, CPU)
        offloaded.install()
        result.names = [region.name for region in regions]
    inside = {} if offloaded is None else {each: region for region in regions for each in region.parameters}
    optimizers = {each: torch.optim.AdamW([each], lr=1e-2) for each in network.parameters()}
    rank = torch.distributed.get_rank()
    torch.manual_seed(1 + rank)
    for _ in range(3):
        if offloaded is not None:
            offloaded.gradients.begin_step()
        for index in range(2):
            shards.begin_micro_batch(is_first=index == 0, is_last=index == 1)
            with nullcontext() if dtype is None else torch.autocast("cpu", dtype):
                loss = shards.runner(lambda: network(TOKENS.roll(rank, 1), TOKENS)[1])
            shards.begin_backward()
            loss.backward()
            shards.end_backward()
            if offloaded is not None:
                offloaded.gradients.leave_complete()
            result.losses.append(loss.item())
        for each, optimizer in optimizers.items():
            if each in inside:
                assert offloaded is not None
                assert each.grad is None
                offloaded.use((inside[each],), UPDATE)
                offloaded.gradients.arrive(inside[each])
                optimizer.step()
                offloaded.changed(inside[each])
                offloaded.gradients.leave(inside[each])
            else:
                optimizer.step()
                optimizer.zero_grad()
        if offloaded is not None:
            for region in offloaded.regions:
                offloaded.gradients.forget(region)
            offloaded.gradients.norms.clear()
        shards.end_update()
        with torch.no_grad(), nullcontext() if dtype is None else torch.autocast("cpu", dtype):
            result.losses.append(shards.runner(lambda: network(TOKENS, TOKENS)[1]).item())
        shards.release()
    if offloaded is not None:
        offloaded.close()
    with torch.no_grad():
        result.shards = {name: copy.deepcopy(local_part(each)) for name, each in network.named_parameters()}
        with nullcontext() if dtype is None else torch.autocast("cpu", dtype):
            result.losses.append(shards.runner(lambda: network(TOKENS, TOKENS)[1]).item())
    unwrap(network)
    return result


def compare(dtype: torch.dtype | None, recompute: str, num_shards: int, num_ranks: int) -> list[str]:
    """Return the differences on this rank."""
    expected = train(False, dtype, recompute, num_shards, num_ranks)
    result = train(True, dtype, recompute, num_shards, num_ranks)
    found = [name for name, each in result.shards.items() if not torch.equal(each, expected.shards[name])]
    if result.losses != expected.losses:
        found.append(f"losses {result.losses} {expected.losses}")
    blocks = [f"blocks.{number}" for number in range(4)]
    assert [name for name in result.names if name in blocks] == blocks, result.names
    return found


@pytest.mark.parametrize(
    ("num_ranks", "num_shards"),
    [(2, 2), pytest.param(4, 4, marks=pytest.mark.slow), pytest.param(4, 2, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    ("dtype", "recompute"), few([(torch.bfloat16, "full"), (None, "none"), (None, "full"), (torch.bfloat16, "none")])
)
def test_same_bits_as_shards_on_the_device(
    on_ranks: RankPool, dtype: torch.dtype | None, recompute: str, num_ranks: int, num_shards: int
) -> None:
    assert on_ranks(num_ranks, compare, dtype, recompute, num_shards, num_ranks) == [[]] * num_ranks
