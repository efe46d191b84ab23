"""Checkpoints of pipelines contain the full model in the usual format, and any layout resumes from them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from roomier import Module, Trainer, checkpoint
from roomier.core.device.rng import seed_everything
from roomier.core.mesh import Mesh
from roomier.core.ranks import Ranks
from roomier.core.sharded import is_sharded
from roomier.core.world import World
from roomier.engine.build import build
from roomier.engine.eager import EagerEngine
from roomier.engine.stage_state import StageState
from roomier.engine.weights_file import WeightsFile
from roomier.plan import plan_from_flags
from roomier.prepared.saving import load_loop, save_loop
from roomier.techniques.optim.configured import Configured
from roomier.train.saving.restore import PlainCheckpoint
from tests.ranks.pool import RankPool
from tests.resume.conftest import differing
from tests.resume.reshard import GLOBAL_BATCH, Classifier, Samples


class Block(nn.Module):
    """Block with a tied weight, an unused weight without optimizer state, and buffers that change."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(7, 7), nn.Linear(7, 7, bias=False)
        self.outer.weight = self.inner.weight
        self.scale, self.unused, self.norm = nn.Parameter(torch.ones(())), nn.Linear(3, 1), nn.BatchNorm1d(7)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.outer(self.inner(x))) * self.scale
        return y


class Layers(Module):
    """Network whose first and last stage share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("shift", torch.arange(7.0))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embedding(batch)
        for block in self.blocks:
            x = block(x)
        return self.head(x).mean()

    def owners(self, num_stages: int) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {"embedding.weight": (0, num_stages - 1)}
        for number, block in enumerate(self.blocks):
            for name, _ in (*block.named_parameters(), *block.named_buffers()):
                found[f"blocks.{number}.{name}"] = (number * num_stages // 4,)
        return found


class Staged(EagerEngine):
    """Engine that stores only the parameters of one stage."""

    def leave_stage(self, owners: Mapping[str, tuple[int, ...]], ranks: Ranks, stage: int) -> None:
        self.stage_state = StageState(self.module, owners, ranks, stage)
        for name, parameter in self.module.named_parameters():
            if stage not in owners[name]:
                torch.utils.swap_tensors(parameter, nn.Parameter(torch.empty_like(parameter, device="meta")))

    def weights(self) -> dict[str, Any]:
        self.stage_state.share_buffers()
        return self.stage_state.full_weights(super().weights())

    def state(self) -> dict[str, Any]:
        state = super().state()
        return {**state, "optimizers": [self.stage_state.full_optimizer(each) for each in state["optimizers"]]}

    def places(self, stored: Sequence[Mapping[str, Any]], **kinds: Any) -> list[dict[str, Any]]:
        return [self.stage_state.own_places(each, kinds["unneeded"]) for each in super().places(stored, **kinds)]

    def load(self, state: dict[str, Any]) -> None:
        super().load({**state, "optimizers": [self.stage_state.own_optimizer(each) for each in state["optimizers"]]})

    def load_weights(self, weights: Mapping[str, Any]) -> None:
        self.module.load_state_dict(self.stage_state.own_weights(weights))


def engine_of(num_stages: int, strategy: str = "single", seed: int = 0) -> tuple[EagerEngine, Ranks]:
    torch.manual_seed(seed)
    module = Layers()
    ranks = Ranks(World(dist.get_rank(), dist.get_world_size())) if dist.is_initialized() else Ranks()
    plan = plan_from_flags(strategy=strategy, devices=ranks.world.size if num_stages == 1 else 1, accelerator="cpu")
    engine_class = EagerEngine if num_stages == 1 else Staged
    made = lambda _: Configured([torch.optim.Adagrad(module.parameters(), lr=0.1)])  # noqa: E731
    engine, _ = build(plan, module, made, engine_class, ranks if num_stages == 1 else Ranks())
    if isinstance(engine, Staged):
        # peers are consecutive ranks here, and consecutive stages in a run
        ranks = ranks.arranged(Mesh(ranks.world, context=num_stages))
        engine.leave_stage(module.owners(num_stages), ranks, num_stages - 1 - ranks.world.rank % num_stages)
    return engine, ranks


@torch.no_grad()
def step(engine: EagerEngine, number: int, num_stages: int, ranks: Ranks) -> None:
    """Update the tensors of this rank as every layout does."""
    for name, each in engine.module.named_parameters():
        if each.is_meta or "unused" in name:
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + number)
        grad = torch.randn(each.shape, generator=generator)
        if is_sharded(each):
            from torch.distributed.tensor import distribute_tensor

            grad = distribute_tensor(grad, each.device_mesh, each.placements)
        each.grad = grad
    engine.step()
    for index, block in enumerate(engine.module.blocks):
        stage = num_stages - 1 - ranks.world.rank % num_stages
        if stage == index * num_stages // 4:
            of_replica = 100 * ranks.data.world.rank if num_stages > 1 else 0  # the values of data rank 0 are saved
            block.norm.running_mean.add_(number * index + of_replica)
            block.norm.num_batches_tracked.add_(1 + of_replica)


def go_on(start: Path | None, end: Path, number: int, num_stages: int, strategy: str) -> list[str]:
    engine, ranks = engine_of(num_stages, strategy, seed=0 if start is None else number)
    if start is not None:
        load_loop(start, [engine], {}, ranks)
        assert not any(parameter.is_meta for parameter in engine.optimizers[0].state)
    step(engine, number, num_stages, ranks)
    save_loop(end, [engine], {}, ranks)
    return [name for name, each in engine.module.named_parameters() if not each.is_meta]


LAYOUTS = [(2, 2, "single"), (1, 1, "single"), (4, 4, "single"), (2, 1, "zero3"), (4, 2, "single")]


def test_every_layout_resumes_from_every_other(on_ranks: RankPool, tmp_path: Path) -> None:
    whole = cut = None
    for number, (num_ranks, num_stages, strategy) in enumerate(LAYOUTS):
        end = tmp_path / f"whole{number}"
        go_on(whole, end, number, 1, "single")
        whole, end = end, tmp_path / f"cut{number}"
        names = on_ranks(num_ranks, go_on, cut, end, number, num_stages, strategy)
        cut = end
        expected, found = checkpoint.load(whole), checkpoint.load(cut)
        for section in ("module0", "optimizers0", "engine0"):
            assert list(differing(expected[section], found[section], section)) == [], (num_ranks, num_stages, strategy)
        checkpoint.verify(cut)
        if num_stages > 1:
            assert len({*map(tuple, names)}) == num_stages
            assert len({path.name.split("-")[1] for path in cut.glob("*.safetensors")}) == num_ranks
    assert expected["module0"].keys() == Layers().state_dict().keys()


def read_weights(path: Path, file: Path, num_stages: int) -> None:
    engine, ranks = engine_of(num_stages, seed=3)
    stored = checkpoint.load(path)["module0"]
    for kind in ("checkpoint", "file", "full"):
        with torch.no_grad():
            for each in engine.module.state_dict().values():
                each.zero_()
        if kind == "full":
            engine.load_weights(stored)
        else:
            source = PlainCheckpoint(path.with_name("module"), ranks) if kind == "checkpoint" else WeightsFile(file)
            source.check(engine.module)
            source.read_into(engine.module)
        for name, each in engine.module.state_dict().items():
            assert each.is_meta or torch.equal(each, stored[name]), name


@pytest.mark.more
def test_initial_weights(on_ranks: RankPool, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    go_on(None, tmp_path / "c", 1, 1, "single")
    stored = checkpoint.load(tmp_path / "c")["module0"]
    checkpoint.save(tmp_path / "module", {"module": stored})
    save_file({name: each.clone() for name, each in stored.items()}, tmp_path / "model.safetensors")
    on_ranks(4, read_weights, tmp_path / "c", tmp_path / "model.safetensors", 2)


def fit(
    path: Path, num_ranks: int, num_stages: int, max_steps: int, start: Path | None, strategy: str = "ddp"
) -> list[str]:
    seed_everything(0)
    staged = {"name": strategy, "pipeline_parallel_size": num_stages}
    trainer = Trainer(
        default_root_dir=path.parent,
        accelerator="cpu",
        devices=num_ranks,
        strategy="single" if num_ranks == 1 else staged,
        seeding="events",
        max_steps=max_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Classifier()
    trainer.fit(module, DataLoader(Samples(), batch_size=GLOBAL_BATCH * num_stages // num_ranks), ckpt_path=start)
    trainer.save_checkpoint(path)
    return [name for name, each in module.named_parameters() if not each.is_meta]


def test_a_fit_resumes_from_the_checkpoint_of_a_pipeline(on_ranks: RankPool, tmp_path: Path) -> None:
    first, middle = tmp_path / "first", tmp_path / "middle"
    on_ranks(1, fit, tmp_path / "whole", 1, 1, 7, None)
    names = on_ranks(2, fit, first, 2, 2, 3, None)
    assert names[0] != names[1]
    on_ranks(1, fit, tmp_path / "one", 1, 1, 7, first)
    on_ranks(4, fit, middle, 4, 2, 5, first, "zero2")
    on_ranks(1, fit, tmp_path / "later", 1, 1, 6, middle)
    on_ranks(4, fit, tmp_path / "shards", 4, 2, 7, tmp_path / "later", "zero3")
    on_ranks(3, fit, tmp_path / "three", 3, 3, 7, middle)
    on_ranks(2, fit, tmp_path / "cut", 2, 2, 7, first)
    on_ranks(2, fit, tmp_path / "uncut", 2, 2, 7, None)
    states = {name: checkpoint.load(tmp_path / name) for name in ("whole", "one", "three", "shards", "cut", "uncut")}
    of_optimizer = {name: state["optimizers"][0]["state"] for name, state in states.items()}
    for name in ("one", "three", "shards", "cut"):
        torch.testing.assert_close(states[name]["module"], states["whole"]["module"], msg=name)
        torch.testing.assert_close(of_optimizer[name], of_optimizer["whole"], msg=name)
    for section in ("module", "optimizers"):
        assert list(differing(states["cut"][section], states["uncut"][section], section)) == []
