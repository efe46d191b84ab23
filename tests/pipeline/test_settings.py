"""Tests of plans with stages, and of the ranks, the loss weights and the forecasts of these plans."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from roomier import Module
from roomier.core.errors import RoomierError
from roomier.core.mesh import STAGE
from roomier.core.ranks import Ranks
from roomier.core.world import World
from roomier.engine.losses import term_weights
from roomier.engine.prepared import loop_errors
from roomier.plan import Plan, plan_from_flags
from roomier.train.settling.checks import check_call
from tests.ranks.pool import RankPool

PIPELINE = {"name": "ddp", "pipeline_parallel_size": 2}
INTERLEAVED = {"schedule": "interleaved_1f1b", "stages_per_rank": 2}


def pipeline(**flags: object) -> Plan:
    return plan_from_flags(strategy=PIPELINE, devices=4, accelerator="cpu", **flags)  # type: ignore[arg-type]


def test_a_pipeline_implies_seeding_by_events() -> None:
    plan = pipeline()
    assert (plan.batch.seeding, plan.parallel.num_peers, plan.parallel.num_data_ranks) == ("events", 2, 2)
    assert Plan.from_dict(plan.to_dict()) == plan
    assert "2 stages, 1f1b" in str(plan)
    gpipe = plan_from_flags(strategy=PIPELINE | {"schedule": "GPipe"}, devices=2)
    assert "2 stages, gpipe" in str(gpipe)
    assert "4 stages, interleaved_1f1b" in str(plan_from_flags(strategy=PIPELINE | INTERLEAVED, devices=2))


@pytest.mark.parametrize(
    ("strategy", "flags", "message"),
    [
        ({"name": "hsdp", "shard_size": 2}, {}, "only with 'ddp', 'zero1', 'zero2' and 'zero3', not 'hsdp'"),
        ({"pipeline_parallel_size": 3}, {}, "Use pipeline_parallel_size=2"),
        ({"pipeline_parallel_size": 0}, {}, "must be at least 1"),
        ({"pipeline_parallel_size": 1, "schedule": "gpipe"}, {}, "Set pipeline_parallel_size, or remove it"),
        ({"schedule": "1f2b"}, {}, "Did you mean '1f1b'"),
        ({"pipeline_parallel_size": 1, "split": ["blocks.1"]}, {}, "Set pipeline_parallel_size, or remove it"),
        ({"split": "blocks.1,blocks.2"}, {}, "has 2 names, .* Use pipeline_parallel_size=3, or name 1 modules"),
        ({"schedule": "interleaved_1f1b"}, {}, "stages_per_rank=1: .* Use schedule='1f1b', or stages_per_rank=2"),
        ({"stages_per_rank": 2}, {}, "stages_per_rank=2: .* Use schedule='interleaved_1f1b'"),
        ({"stages_per_rank": 2, "schedule": "gpipe"}, {}, "Use schedule='interleaved_1f1b'"),
        ({"stages_per_rank": 0}, {}, "must be at least 1"),
        ({"pipeline_parallel_size": 1, "stages_per_rank": 2}, {}, "Set pipeline_parallel_size, or remove it"),
        (INTERLEAVED | {"split": "blocks.1"}, {}, "has 1 names, .* of the 4 stages after the first. Name 3 modules"),
        ({"context_parallel_size": 2}, {}, "Use context_parallel_size=1"),
        ({"gradient_compression": "powersgd"}, {}, "Set gradient_compression='none'"),
        ({}, {"compile": True}, "Set compile=False"),
        ({}, {"offload": True}, "Remove it, or pipeline"),
        ({}, {"offload": {"parameters": "disk"}}, "Remove it, or pipeline"),
        ({}, {"offload": {"activations": "cpu"}}, "Remove it, or pipeline"),
        ({}, {"precision": "16-mixed"}, "Use precision='bf16-mixed'"),
        ({}, {"activation_checkpointing": 0.5}, "Use activation_checkpointing='full'"),
        ({}, {"optimizer": "onebit_adam"}, "Use optimizer='adamw'"),
        ({}, {"step_in_backward": True}, "Set step_in_backward=False"),
        ({}, {"seeding": "stream"}, "Set seeding='events'"),
    ],
)
def test_plans_that_are_rejected(strategy: dict[str, object], flags: dict[str, object], message: str) -> None:
    with pytest.raises(RoomierError, match=message):
        plan_from_flags(strategy=PIPELINE | strategy, devices=4, accelerator="cpu", **flags)  # type: ignore[arg-type]


class Line(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).square().mean()


def test_manual_optimization_and_custom_loops_are_rejected() -> None:
    module, plan = Line(), pipeline(optimizer="adamw")
    assert [error.field for error in loop_errors(plan)] == ["pipeline_parallel_size"]
    module.automatic_optimization = False
    request = SimpleNamespace(
        stage="fit", module=module, plan=plan, datamodule=None, trainer=None, state=SimpleNamespace(stage=None)
    )
    with pytest.raises(RoomierError, match="a schedule determines the backward passes"):
        check_call(request)  # type: ignore[arg-type]


def weigh(strategy: dict[str, object], num_devices: int) -> tuple[int, int, list[float]]:
    """Return the stage, the data rank and the weights of two micro-batches with ``data rank + 1`` and 3 terms."""
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank, size, rank, 0, size)
    ranks = Ranks(world)
    mesh = plan_from_flags(strategy=strategy, devices=num_devices).parallel.mesh_on(world)
    ranks = ranks.arranged(mesh)
    stages = ranks.along(STAGE)
    assert stages.gather(mesh.stage_index) == list(reversed(range(mesh.stage)))
    assert ranks.peers.gather(mesh.data.rank) == [mesh.data.rank] * mesh.num_peers
    assert ranks.data.gather(mesh.data.rank) == list(range(mesh.data.size))
    assert ranks.data.from_zero(rank) == 0
    weights = term_weights(lambda batch: batch, [mesh.data.rank + 1, torch.tensor(3)], ranks)
    return mesh.stage_index, mesh.data.rank, [float(each) for each in weights]


@pytest.mark.parametrize(("size", "num_stages"), [(2, 2), (4, 2)])
def test_the_weights_of_the_last_stage_add_up_to_one(on_ranks: RankPool, size: int, num_stages: int) -> None:
    found = on_ranks(size, weigh, PIPELINE | {"pipeline_parallel_size": num_stages}, size)
    num_data = size // num_stages
    total = sum(rank + 1 + 3 for rank in range(num_data))
    for rank, (stage, data_rank, weights) in enumerate(found):
        assert (stage, data_rank) == (num_stages - 1 - rank // num_data, rank % num_data)
        assert weights == [(data_rank + 1) / total, 3 / total]
    assert sum(sum(weights) for stage, _, weights in found if stage == num_stages - 1) == pytest.approx(1)
