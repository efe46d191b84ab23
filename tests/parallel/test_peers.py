"""Peers are ranks that compute parts of the same samples. A run with peers reads, counts and stores the same values as
a run with one rank for each group of peers.

No technique that divides a sample takes part: each peer computes the full sample, so the result must not change.
"""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler
from torch.utils.data.distributed import DistributedSampler
from torchmetrics import SumMetric

import roomier
from roomier import checkpoint
from roomier.callbacks import ModelCheckpoint, PredictionWriter, Throughput
from roomier.core.errors import DataError
from roomier.core.mesh import CONTEXT, INNER, OUTER, REPLICATE, SHARD, STAGE, TENSOR, Mesh
from roomier.core.world import World
from roomier.plan.parts import ParallelPlan
from tests.covering import few
from tests.ranks.pool import RankPool

NUM_SAMPLES = 24


def test_each_rank_has_one_position_in_the_mesh() -> None:
    meshes = [Mesh(World(rank, 24, local_size=8), tensor=2, context=3, shard=2) for rank in range(24)]
    positions = [[mesh.coordinate(each) for each in (REPLICATE, SHARD, CONTEXT, TENSOR)] for mesh in meshes]
    assert positions == sorted(positions)
    assert len({tuple(each) for each in positions}) == 24
    own = meshes[14]
    assert (own.along(TENSOR), own.along(CONTEXT)) == ((14, 15), (12, 14, 16))
    assert (own.along(SHARD), own.along(REPLICATE)) == ((14, 20), (2, 14))
    assert (own.along(*INNER), own.along(*OUTER)) == (tuple(range(12, 18)), (2, 8, 14, 20))
    assert (own.replicate, own.shards, own.data.rank, own.data.size) == (2, World(2, 12), 2, 4)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_groups_partition_the_ranks(stage: int) -> None:
    for tensor, context, shard, replicate in itertools.product((1, 2), (1, 2, 3), (1, 2), (1, 2)):
        num_data, size = shard * replicate, tensor * context * shard * replicate * stage
        sizes = {"tensor": tensor, "context": context, "shard": shard, "stage": stage}
        meshes = [Mesh(World(rank, size, rank, 0, size), **sizes) for rank in range(size)]
        for dimensions in ((TENSOR,), (CONTEXT,), (SHARD,), (REPLICATE,), (STAGE,), INNER, OUTER):
            groups = [mesh.along(*dimensions) for mesh in meshes]
            assert all(groups[other] == groups[rank] for rank in range(size) for other in groups[rank])
            assert all(rank in group and list(group) == sorted(group) for rank, group in enumerate(groups))
            assert {len(group) for group in groups} == {math.prod(getattr(meshes[0], name) for name in dimensions)}
        for mesh in meshes:
            of_peers = {(meshes[rank].data.rank, mesh.representative_of(rank)) for rank in mesh.along(*INNER)}
            assert of_peers == {(mesh.data.rank, mesh.along(*INNER)[0])}
            of_data_ranks = [meshes[rank].data for rank in mesh.along(*OUTER)]  # read each sample once
            assert [each.rank for each in of_data_ranks] == list(range(num_data)) == [*map(place, of_data_ranks)]
            assert [meshes[rank].data.rank for rank in mesh.representatives] == list(range(num_data))
            of_replica = {meshes[rank].shards.rank: rank for rank in mesh.along(TENSOR, CONTEXT, SHARD)}
            assert {meshes[rank].stage_index for rank in of_replica.values()} == {mesh.stage_index}
            assert (sorted(of_replica), mesh.replicate) == (list(range(mesh.shards.size)), replicate)
        assert {meshes[rank].stage_index for rank in meshes[0].representatives} == {stage - 1}
        assert [meshes[rank].stage_index for rank in meshes[0].along(STAGE)] == list(reversed(range(stage)))


def place(world: World) -> int:
    assert 0 <= world.local_rank < world.local_size
    return world.node_rank * world.local_size + world.local_rank


class Reads(roomier.Module):
    """Module with dropout. It records the samples that it reads, and logs their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.read: list[int] = []
        self.losses: list[float] = []
        self.total, self.val_total = SumMetric(), SumMetric()

    def training_step(self, batch, batch_idx):
        self.read += batch.tolist()
        self.total.update(batch)
        self.log("mean", batch.double().mean(), on_step=False, on_epoch=True)
        self.log("largest", batch.max(), on_step=False, on_epoch=True, reduce_fx="max")
        self.log("total", self.total, on_step=False, on_epoch=True)
        return self.net(batch.to(self.net[0].weight.dtype)[:, None] / NUM_SAMPLES).square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))

    def validation_step(self, batch, batch_idx):
        self.val_total.update(batch)
        self.log("val_total", self.val_total)
        self.log("val_sum", batch.sum().float(), reduce_fx="sum")

    def predict_step(self, batch, batch_idx):
        return batch

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Shuffled(Sampler[int]):
    def __init__(self, length: int, generator: torch.Generator) -> None:
        self.length, self.generator = length, generator

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.length, generator=self.generator).tolist())


def loader(kind: str, batch_size: int) -> Any:
    if kind == "list":
        return list(torch.arange(NUM_SAMPLES).split(batch_size))
    data: Any = torch.arange(NUM_SAMPLES)
    if kind == "own generator":  # with a different seed on each rank, except on the first peer of the first group
        generator = torch.Generator().manual_seed(torch.initial_seed())
        return DataLoader(data, batch_size=batch_size, sampler=Shuffled(NUM_SAMPLES, generator))
    return DataLoader(data, batch_size=batch_size, shuffle=kind == "shuffled")


def with_peers(num_peers: int) -> None:
    """Make each group of ``num_peers`` ranks of this process's runs read the same samples."""

    def mesh_on(plan: ParallelPlan, world: World) -> Mesh:
        return Mesh(world, tensor=num_peers, shard=max(1, plan.num_shards // num_peers))

    ParallelPlan.num_peers = property(lambda _: num_peers)  # type: ignore[assignment,method-assign]
    ParallelPlan.mesh_on = mesh_on  # type: ignore[method-assign]


def run(size: int, num_peers: int, strategy: str, kind: str, root: Path, steps: int = 4, resumes: bool = False) -> Any:
    """Fit, validate and predict. Return the values that depend on how the samples are divided."""
    with_peers(num_peers)
    group, peer = divmod(torch.distributed.get_rank() if size > 1 else 0, num_peers)
    torch.manual_seed(group + 100 * peer)  # an unseeded script has a different seed on each rank
    module = Reads()
    throughput = Throughput()
    trainer = roomier.Trainer(
        accelerator="cpu",
        precision="64-true",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_steps=steps,
        max_epochs=2,
        log_every_n_steps=1,
        default_root_dir=root,
        callbacks=[
            ModelCheckpoint(every_n_train_steps=3),
            throughput,
            PredictionWriter(root / "files", overwrite=True),
        ],
        **({"strategy": strategy, "devices": size} if size > 1 else {}),
    )
    trainer.fit(module, loader(kind, 2), loader("in order", 3), ckpt_path="last" if resumes else None)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items() if "per_s" not in name}
    stored = checkpoint.load(trainer.checkpoint_callback.best_model_path or sorted(root.glob("*/*/step*"))[-1])
    predictions = [each.tolist() for each in trainer.predict(module, loader("in order", 5))]
    position = (trainer.data_rank, trainer.num_data_ranks)
    files = sorted(each.name for each in (root / "files").glob("*"))
    kept = {name: stored[name] for name in ("random", "data", "metrics")}
    kept["running"] = [(each["name"], each["total"], each["weight"]) for each in stored["results"]["running"]]
    return position, module.read, module.losses, logged, predictions, files, kept, trainer.world_size


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, torch.Tensor):  # one process stores tensors where several ranks store numbers
        right = torch.as_tensor(right)
        return left.shape == right.shape and bool(torch.allclose(left.double(), right.double(), rtol=1e-12, atol=1e-12))
    right = right.item() if isinstance(right, torch.Tensor) and right.dim() == 0 else right
    return bool(left == pytest.approx(right, rel=1e-12)) if isinstance(left, float) else bool(left == right)


@pytest.mark.parametrize(
    ("size", "num_peers", "strategy", "kind"),
    few(
        [
            (2, 2, "ddp", "shuffled"),
            (4, 2, "zero3", "shuffled"),
            (4, 4, "zero2", "in order"),
            (4, 2, "ddp", "own generator"),
            (2, 2, "ddp", "own generator"),
        ]
    ),
)
def test_peers_read_and_count_like_one_rank(
    on_ranks: RankPool, tmp_path: Path, size: int, num_peers: int, strategy: str, kind: str
) -> None:
    num_groups = size // num_peers
    one_each = on_ranks(num_groups, run, num_groups, 1, strategy, kind, tmp_path / "one", joins=num_groups > 1)
    for rank, found in enumerate(on_ranks(size, run, size, num_peers, strategy, kind, tmp_path / "peers")):
        expected = one_each[rank // num_peers]
        for own, other in zip(found[:-1], expected[:-1], strict=True):
            assert same(own, other), (rank, own, other)
        assert found[-1] == size


Layout = tuple[int, int, str]  # number of ranks, number of peers, strategy
PAIRS: list[tuple[str, Layout, Layout]] = [
    ("list", (1, 1, "single"), (2, 2, "zero3")),
    ("shuffled", (4, 1, "zero1"), (4, 2, "ddp")),
    ("shuffled", (4, 2, "hsdp"), (2, 1, "zero2")),
    ("shuffled", (2, 2, "ddp"), (2, 1, "zero3")),
    ("list", (4, 2, "zero3"), (1, 1, "single")),
    ("list", (4, 2, "zero2"), (4, 4, "ddp")),
    ("in order", (4, 4, "hsdp"), (4, 2, "hsdp")),
    ("shuffled", (2, 2, "zero1"), (4, 2, "hsdp")),
]


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [pytest.param(*pair, marks=pytest.mark.more if i < 3 else pytest.mark.slow) for i, pair in enumerate(PAIRS)],
)
def test_an_epoch_resumes_on_other_groups(
    on_ranks: RankPool, tmp_path: Path, kind: str, before: Layout, after: Layout
) -> None:
    def read(layout: Layout, steps: int, resumes: bool) -> tuple[list[int], dict[str, float]]:
        size, num_peers, _ = layout
        found = on_ranks(size, run, *layout, kind, tmp_path, steps, resumes, joins=size > 1)
        of_groups = [found[rank][1] for rank in range(0, size, num_peers)]
        assert all(found[rank][1] == of_groups[rank // num_peers] for rank in range(size))
        assert len({str(each[3]) for each in found}) == 1  # the logged values
        return [sample for each in of_groups for sample in each], found[0][3]

    first, _ = read(before, steps=3, resumes=False)
    num_left = math.ceil((NUM_SAMPLES - len(first)) / (2 * after[0] // after[1]))
    rest, logged = read(after, steps=3 + num_left, resumes=True)
    assert sorted(first + rest) == list(range(NUM_SAMPLES))
    # The metrics of the epoch include the samples before the resume.
    assert (logged["mean"], logged["largest"], logged["total"]) == (11.5, 23.0, sum(range(NUM_SAMPLES)))


def fit_different(different_at: int | None) -> str:
    """Return the error of a fit in which rank 1 reads other batches than its peer; None: it divides the samples."""
    with_peers(2)
    rank = torch.distributed.get_rank()
    batches: Any = list(torch.arange(NUM_SAMPLES).split(4))
    if different_at is None:
        data: Any = torch.arange(NUM_SAMPLES)
        batches = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, num_replicas=2, rank=rank))
    else:
        batches[different_at] = batches[different_at] + (rank == 1)
    trainer = roomier.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=6, log_every_n_steps=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(DataError) as raised:
        trainer.fit(Reads(), batches)
    return f"{trainer.global_step}: {raised.value}"


@pytest.mark.more
@pytest.mark.parametrize(("different_at", "step"), [(0, 0), (3, 4), (None, 0)])
def test_peers_with_different_batches_are_an_error(on_ranks: RankPool, different_at: int | None, step: int) -> None:
    for error in on_ranks(2, fit_different, different_at):
        assert error.startswith(f"{step}: train_dataloaders=")
        assert "different numbers of batches, on ranks 0 and 1" in error
