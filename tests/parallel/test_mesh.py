"""Several runs in one process group use the same mesh, so that all ranks communicate in the same process groups."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from roomier import Trainer
from roomier.core.mesh import Mesh
from roomier.core.world import World
from roomier.planner.dry_runs.confirm import confirm
from roomier.planner.hardware.this_machine import this_machine
from roomier.planner.workload import Workload
from roomier.techniques.parallel.mesh import make_mesh
from tests.parallel.parity import Setup, whole_weights
from tests.parallel.test_trainer import Fitted, Samples
from tests.ranks.pool import RankPool


def two_fits() -> list[dict[str, Tensor]]:
    """Fit twice. Between the fits, rank 0 runs a dry run, which clears the cache of operators of this rank."""
    weights = []
    for _ in range(2):
        module = Fitted()
        trainer = Trainer(
            strategy={"name": "hsdp", "shard_size": 2},
            devices=4,
            accelerator="cpu",
            optimizer={"name": "muon", "lr": 1e-3},  # Muon gathers each matrix with operators on DTensors
            max_steps=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(Samples(Setup(num_steps=2)), batch_size=2))
        weights.append(whole_weights(module))
        if dist.get_rank() == 0:
            batch = Fitted().make_batch(2, torch.Generator())
            confirm(Workload.of(Fitted(), batch), trainer.plan, this_machine(4, 1, "cpu"))
    return weights


@pytest.mark.more
def test_ranks_agree_on_the_groups_after_a_dry_run_on_one_rank(on_ranks: RankPool) -> None:
    for first, second in on_ranks(4, two_fits, timeout_s=90):
        assert all(torch.equal(weight, second[name]) for name, weight in first.items())


def meshes() -> list[bool]:
    two, four = (Mesh(World(dist.get_rank(), 4), shard=size) for size in (2, 4))
    mesh = make_mesh("cpu", two)
    return [make_mesh("cpu", two) is mesh, make_mesh("cpu", four) is mesh]


@pytest.mark.more
def test_a_mesh_is_created_one_time(on_ranks: RankPool) -> None:
    assert on_ranks(4, meshes) == [[True, False]] * 4
