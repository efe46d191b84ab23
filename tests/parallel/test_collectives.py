"""Tests that the collectives of roomier on gloo match the collectives of torch."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from roomier.core.errors import TrainingError
from roomier.core.mesh import REPLICATE, SHARD, Mesh
from roomier.core.world import World
from roomier.techniques.parallel.collectives import PairwiseAllGather, PairwiseReduceScatter, Reductions, wait_for
from roomier.techniques.parallel.mesh import make_mesh
from tests.covering import few
from tests.ranks.pool import RankPool

SIZES = [1, 7, 64]


def of_rank(num_elements: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(num_elements, generator=generator).to(dtype)


def gather_both() -> None:
    group, gather = dist.group.WORLD, PairwiseAllGather()
    assert group is not None
    for size, dtype in itertools.product(SIZES, (torch.float32, torch.bfloat16, torch.float64, torch.uint8)):
        part = of_rank(size, dtype)
        ours = gather.allocate([size * group.size()], dtype=dtype, device=part.device)
        gather(ours, part, group).wait()
        theirs = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(theirs, part)
        assert torch.equal(ours, torch.cat(theirs))


@pytest.mark.parametrize("num_ranks", few([3, 2, 4]))
def test_all_gather_matches_torch(on_ranks: RankPool, num_ranks: int) -> None:
    on_ranks(num_ranks, gather_both)


def gather_in_place() -> None:
    """The input of a rank may be a view of the output, as in ``fully_shard``."""
    group = dist.group.WORLD
    assert group is not None
    whole = torch.full((3 * group.size(),), -1.0)
    part = whole.chunk(group.size())[group.rank()]
    part.fill_(group.rank())
    PairwiseAllGather()(whole, part, group).wait()
    assert whole.tolist() == [float(rank) for rank in range(group.size()) for _ in range(3)]


def test_all_gather_in_place(on_ranks: RankPool) -> None:
    on_ranks(3, gather_in_place)


def reduce_both(dtype: torch.dtype, may_wait: bool) -> None:
    group, reductions = dist.group.WORLD, Reductions()
    assert group is not None
    units = [PairwiseReduceScatter(reductions, may_wait=may_wait) for _ in SIZES]
    done = []
    for step in range(3):
        reductions.window += 1
        for unit, size in zip(units, SIZES, strict=True):
            sent = of_rank(size * group.size(), dtype, seed=step)
            ours = run(unit, sent, group)
            total = sent.double()
            dist.all_reduce(total)
            done.append((ours, total.chunk(group.size())[group.rank()]))
        reductions.finish()
    for ours, theirs in done:
        # Sums of four numbers of magnitude 1, each rounded once.
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=8 * torch.finfo(ours.dtype).eps)


def run(unit: PairwiseReduceScatter, whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Call ``unit`` as ``fully_shard`` does: allocate the input first, then the result."""
    result_dtype = torch.float64 if whole.dtype == torch.float64 else torch.float32
    sent = unit.allocate([whole.numel()], dtype=result_dtype, device=whole.device)
    sent.copy_(whole)
    result = unit.allocate([whole.numel() // group.size()], dtype=result_dtype, device=whole.device)
    unit(result, sent, group, dist.ReduceOp.SUM)
    return result


@pytest.mark.parametrize("num_ranks", few([3, 2, 4]))
def test_reduce_scatter_matches_torch(on_ranks: RankPool, num_ranks: int) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    on_ranks.each(num_ranks, reduce_both, list(itertools.product(dtypes, (False, True))))


def reduce_in_bf16() -> None:
    group = dist.group.WORLD
    assert group is not None
    unit = PairwiseReduceScatter(Reductions(), may_wait=False, wire_dtype=torch.bfloat16)
    whole = of_rank(8 * group.size(), torch.float32)
    sent = unit.allocate([whole.numel()], dtype=torch.float32, device=whole.device)
    assert sent.dtype == torch.bfloat16
    result = run(unit, whole, group)
    assert result.dtype == torch.float32
    rounded = [torch.empty_like(whole) for _ in range(group.size())]
    dist.all_gather(rounded, whole.bfloat16().float())
    expected = torch.zeros(8)
    for each in rounded:  # sum in the order of the ranks, for bit-identical results
        expected += each.chunk(group.size())[group.rank()]
    assert torch.equal(result, expected)


def test_gradients_sent_in_bf16_are_summed_in_float32(on_ranks: RankPool) -> None:
    on_ranks(4, reduce_in_bf16)


def reduce_twice_in_a_window() -> None:
    """``fully_shard`` adds a later micro-batch to the first result immediately, so the result must be complete."""
    group, reductions = dist.group.WORLD, Reductions()
    assert group is not None
    unit = PairwiseReduceScatter(reductions, may_wait=True)
    for window in range(2):
        reductions.window += 1
        first = run(unit, torch.ones(4 * group.size()), group)
        second = run(unit, torch.ones(4 * group.size()), group)
        assert first.tolist() == [group.size()] * 4, window
        assert second.tolist() == [group.size()] * 4, window


@pytest.mark.more
def test_second_reduction_in_a_step_completes_immediately(on_ranks: RankPool) -> None:
    on_ranks(2, reduce_twice_in_a_window)


def reduce_with_shared_buffers() -> None:
    group, reductions = dist.group.WORLD, Reductions()
    assert group is not None
    inputs, results = [], []
    for size in (4, 4, 6):
        unit = PairwiseReduceScatter(reductions, may_wait=True)
        reductions.window += 1
        inputs.append(unit.allocate([size * group.size()], dtype=torch.float32, device=torch.device("cpu")))
        inputs[-1].fill_(size)
        results.append(unit.allocate([size], dtype=torch.float32, device=torch.device("cpu")))
        unit(results[-1], inputs[-1], group, dist.ReduceOp.SUM)
    assert inputs[1] is inputs[0], "the second reduction reuses the input of the first reduction"
    assert inputs[1].untyped_storage().nbytes() == 0, "the third reduction has another size, so it frees this input"
    reductions.finish_and_free()
    assert inputs[2].untyped_storage().nbytes() == 0
    assert [each.tolist() for each in results] == [[4.0 * group.size()] * 4] * 2 + [[6.0 * group.size()] * 6]


@pytest.mark.parametrize("num_ranks", few([2, 3, 4]))
def test_reductions_of_equal_size_share_their_buffers(on_ranks: RankPool, num_ranks: int) -> None:
    on_ranks(num_ranks, reduce_with_shared_buffers)


def within_replicas() -> tuple[list[float], float]:
    """Gather and reduce within each of two replicas on four ranks."""
    mesh = make_mesh("cpu", Mesh(World(dist.get_rank(), 4), shard=2))
    group, rank = mesh.get_group(SHARD), dist.get_rank()
    gathered = torch.empty(2)
    PairwiseAllGather()(gathered, torch.tensor([float(rank)]), group).wait()
    reduced = run(PairwiseReduceScatter(Reductions(), may_wait=False), torch.tensor([10.0 + rank, 20.0 + rank]), group)
    assert dist.get_process_group_ranks(mesh.get_group(REPLICATE)) == [rank % 2, rank % 2 + 2]
    return gathered.tolist(), reduced.item()


@pytest.mark.more
def test_collectives_within_a_group_of_ranks(on_ranks: RankPool) -> None:
    results = on_ranks(4, within_replicas)
    assert [gathered for gathered, _ in results] == [[0.0, 1.0], [0.0, 1.0], [2.0, 3.0], [2.0, 3.0]]
    assert [reduced for _, reduced in results] == [21.0, 41.0, 25.0, 45.0]


@pytest.mark.parametrize(("num_ranks", "shards"), few([(3, [3]), (2, [2]), (4, [4, 1, 2])]))
def test_consecutive_ranks_share_a_replica(on_ranks: RankPool, num_ranks: int, shards: list[int]) -> None:
    results = on_ranks.each(num_ranks, ranks_of_replica, [(num_ranks, num_shards) for num_shards in shards])
    for num_shards, replicas in zip(shards, results, strict=True):
        expected = [list(range(start, start + num_shards)) for start in range(0, num_ranks, num_shards)]
        assert replicas == list(itertools.chain.from_iterable([ranks] * num_shards for ranks in expected)), num_shards


def ranks_of_replica(num_ranks: int, num_shards: int) -> list[int]:
    ranks: list[int] = dist.get_process_group_ranks(
        make_mesh("cpu", Mesh(World(dist.get_rank(), num_ranks), shard=num_shards)).get_group(SHARD)
    )
    return ranks


@pytest.mark.parametrize(
    "message", ["Timed out waiting 600000ms for recv operation to complete", "Application timeout caused pair closure"]
)
def test_missing_shard_raises_training_error(monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    class Late:
        def wait(self, timeout: Any) -> bool:
            raise RuntimeError(message)

    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    late: Any = Late()
    with pytest.raises(TrainingError, match=r"rank 1.*for a shard from another rank.*find_unused_parameters"):
        wait_for([late])


def test_other_gloo_errors_are_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost:
        def wait(self, timeout: Any) -> bool:
            raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    lost: Any = Lost()
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        wait_for([lost])
