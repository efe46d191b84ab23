"""Tests that sharded gradients are clipped by the norm of the full gradient."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from roomier.core.mesh import Mesh
from roomier.core.world import World
from roomier.engine.updates import Updates
from roomier.techniques.parallel.mesh import make_mesh
from roomier.techniques.parallel.shard import Sharding, Shards
from tests.covering import few
from tests.ranks.pool import RankPool


class Uneven(nn.Module):
    """Network with sizes for which some ranks have empty shards."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(4, 3), nn.Linear(3, 5), nn.Linear(5, 1)])
        self.whole = nn.Linear(1, 2)  # not sharded
        self.unused = nn.Linear(2, 2)


def with_gradients(seed: int) -> Uneven:
    torch.manual_seed(seed)
    model = Uneven()
    for name, each in model.named_parameters():
        if "unused" not in name:
            each.grad = torch.randn_like(each)
    return model


class Joined(Shards):
    """Shards of a model that the test itself sharded."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.sharding = Sharding(mesh, frees_parameters=False, reduces_each_micro_batch=False)


def clip(model: nn.Module, limit: float, mesh: DeviceMesh, algorithm: str = "norm") -> torch.Tensor | None:
    return Updates(Joined(mesh)).clip(list(model.parameters()), limit, algorithm)  # type: ignore[arg-type]


def clip_both(num_ranks: int, num_shards: int, limit: float, by_value: bool) -> None:
    bare = with_gradients(0)
    model = copy.deepcopy(bare)
    gradients = {name: each.grad for name, each in bare.named_parameters()}
    mesh = make_mesh("cpu", Mesh(World(dist.get_rank(), num_ranks), shard=num_shards))
    for each in (*model.inner, model.unused):
        fully_shard(each, mesh=mesh)
    for name, each in model.named_parameters():
        gradient = gradients[name]
        if isinstance(each, DTensor) and gradient is not None:
            each.grad = distributed_like(gradient, each)
        else:
            each.grad = None if gradient is None else gradient.clone()

    norm = clip(model, limit, mesh, "value" if by_value else "norm")
    if by_value:
        nn.utils.clip_grad_value_(bare.parameters(), limit)
    else:
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(bare.parameters(), limit), rtol=1e-6, atol=0)
    for (name, ours), theirs in zip(model.named_parameters(), bare.parameters(), strict=True):
        if theirs.grad is None:
            assert ours.grad is None, name
        else:
            whole = ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad
            torch.testing.assert_close(whole, theirs.grad, rtol=1e-6, atol=0, msg=name)


def distributed_like(whole: torch.Tensor, parameter: DTensor) -> DTensor:
    dim = next(index for index, placement in enumerate(parameter.placements) if placement.is_shard())
    group_size = parameter.device_mesh.size(dim)
    parts = whole.chunk(group_size)
    index = parameter.device_mesh.get_local_rank(dim)
    local = parts[index] if index < len(parts) else whole[:0]
    return DTensor.from_local(
        local.clone(),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


@pytest.mark.parametrize(("num_ranks", "shards"), few([(2, [2]), (4, [4, 2])]))
def test_clipping_by_norm_and_by_value_matches_torch(on_ranks: RankPool, num_ranks: int, shards: list[int]) -> None:
    ways = [(0.1, False), (100.0, False), (0.1, True)]
    on_ranks.each(num_ranks, clip_both, [(num_ranks, num_shards, *way) for num_shards in shards for way in ways])


def clip_infinite() -> list[float]:
    torch.manual_seed(0)
    layer = nn.Linear(2, 4, bias=False)
    mesh = make_mesh("cpu", Mesh(World(dist.get_rank(), 2), shard=2))
    fully_shard(layer, mesh=mesh)
    gradient = torch.ones(4, 2)
    gradient[3, 1] = float("nan")
    layer.weight.grad = distributed_like(gradient, layer.weight)
    norm = clip(layer, 1.0, mesh)
    assert norm is not None
    return [norm.item(), *layer.weight.grad.full_tensor().flatten().tolist()]


def test_nonfinite_gradient_on_one_rank_affects_all_ranks(on_ranks: RankPool) -> None:
    for found in on_ranks(2, clip_infinite):
        assert all(each != each for each in found)
