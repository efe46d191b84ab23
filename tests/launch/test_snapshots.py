"""PeerSnapshots: a job that loses ranks or nodes resumes from the memory of the others."""

import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import roomier
from roomier.api.callback import kept_by
from roomier.callbacks import ModelCheckpoint, PeerSnapshots
from roomier.callbacks import peer_snapshots as module_of_callback
from roomier.checkpoint import background
from roomier.checkpoint.agree import all_ranks
from roomier.checkpoint.record import StoredFile
from roomier.checkpoint.snapshots import copy_to_next_node
from roomier.core.errors import RoomierError
from roomier.models.gpt import GPT, GPTConfig
from roomier.plan import plan_from_flags
from roomier.planner.formula.estimate import Estimator
from roomier.planner.hardware.spec import machine_of
from roomier.planner.workload import Workload
from tests.covering import few
from tests.launch.test_restarted_job import Model, Numbered, samples_of
from tests.ranks.pool import RankFailed, RankPool

NUM_STEPS = 12
Make = Callable[..., roomier.Trainer]


def train(root: Path, strategy: str, num_nodes: int, killed_at: tuple[int, int] | None) -> dict[str, Tensor]:
    """Train on ranks that are divided among ``num_nodes`` nodes, each with its own memory, and return the weights."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    per_node = size // num_nodes
    os.environ.update(LOCAL_WORLD_SIZE=str(per_node), LOCAL_RANK=str(rank % per_node), GROUP_RANK=str(rank // per_node))
    os.environ["TORCHELASTIC_RUN_ID"] = "job"
    notes, place = root / "notes", root / f"memory-{rank // per_node}"
    for folder in (notes, place):
        folder.mkdir(exist_ok=True, parents=True)
    roomier.seed_everything(7)
    trainer = roomier.Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        callbacks=[ModelCheckpoint(every_n_train_steps=4), PeerSnapshots(1, place)],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root / "runs",
    )
    trainer.fit(Model(notes, killed_at), DataLoader(Numbered(), batch_size=8 // size, shuffle=True))
    assert trainer.global_step == NUM_STEPS
    named = trainer.engine.weights()
    return {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in named.items()}


@pytest.mark.parametrize(
    ("strategy", "num_nodes", "lost", "resumes_on"),
    few(
        [
            ("zero2", 4, (1,), 4),
            ("zero3", 2, (1,), 1),
            ("ddp", 2, (0,), 2),
            ("zero2", 1, (), 1),
            ("zero2", 4, (1, 2), 4),
        ]
    ),
    ids=["one of four", "fewer nodes", "ddp, node 0", "only a process", "two neighbors"],
)
def test_a_lost_node_costs_no_more_than_the_steps_since_the_last_snapshot(
    on_ranks: RankPool,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    strategy: str,
    num_nodes: int,
    lost: tuple[int, ...],
    resumes_on: int,
) -> None:
    undisturbed = on_ranks(4, train, tmp_path / "undisturbed", strategy, num_nodes, None)[0]
    root = tmp_path / "killed"
    with pytest.raises(RankFailed):
        on_ranks(4, train, root, strategy, num_nodes, (3, 11))
    disk = root / "runs" / "version_0" / "checkpoints"
    assert [path.name for path in disk.iterdir()] == ["epoch=1-step=8"]
    for node in lost:
        shutil.rmtree(root / f"memory-{node}")
    capfd.readouterr()
    weights = on_ranks(4 * resumes_on // num_nodes, train, root, strategy, resumes_on, None)[0]
    printed = capfd.readouterr().out
    if len(lost) > 1:
        assert "is not used, because" in printed
        assert "resumes from" in printed
        assert "epoch=1-step=8" in printed
    else:
        [step] = {int(line.rpartition("=")[2]) for line in printed.splitlines() if "resumes from" in line}
        assert step in (10, 11)
        assert "interrupted-step=" in printed
    assert samples_of(root) == samples_of(tmp_path / "undisturbed")
    for name, expected in undisturbed.items():
        torch.testing.assert_close(weights[name], expected, rtol=1e-5, atol=1e-6)
    assert not list(root.glob("memory-*/*/*/*"))  # the memory is free after the fit
    assert not list(disk.glob("interrupted-*"))  # a newer checkpoint replaces it


class Ended(roomier.Callback):
    """Callback that notes each completed step, and kills its process at a step in a hook."""

    def __init__(self, notes: Path, killed_at: tuple[int, str] | None) -> None:
        self.notes, self.killed_at = notes, killed_at

    def _reach(self, trainer: Any, hook: str) -> None:
        if self.killed_at == (trainer.global_step, hook):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_start(self, trainer: Any, *_: Any, **__: Any) -> None:
        self._reach(trainer, "on_train_batch_start")

    def on_before_backward(self, trainer: Any, *_: Any, **__: Any) -> None:
        self._reach(trainer, "on_before_backward")

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        with self.notes.open("a") as file:
            file.write(f"{trainer.global_step}\n")
        self._reach(trainer, "on_train_batch_end")

    def on_save_point(self, trainer: Any, *_: Any, **__: Any) -> None:
        self._reach(trainer, "on_save_point")


class Tokens(Model):
    """Module with blocks, for meshes."""

    def __init__(self) -> None:
        roomier.Module.__init__(self)
        self.net = GPT(GPTConfig(32, context=8, num_layers=2, num_heads=2, width=16, dropout=0.0))  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch).flatten(0, 1), batch.flatten())


def train_slowly_saved(
    root: Path, every_n_steps: int, killed_at: tuple[int, int, str] | None, strategy: dict[str, Any] | None = None
) -> dict[str, Tensor]:
    """Train on ranks whose snapshots take longer than a step, and return the weights.

    Args:
        killed_at: a rank, and the step and the hook in which it is killed.
        strategy: strategy for a model with blocks; None for zero2.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ.update(LOCAL_WORLD_SIZE="1", LOCAL_RANK="0", GROUP_RANK=str(rank), TORCHELASTIC_RUN_ID="job")
    place = root / f"memory-{rank}"
    place.mkdir(exist_ok=True, parents=True)
    write = background.write

    def slowly(*args: Any) -> None:
        time.sleep(0.05)
        write(*args)

    background.write = slowly  # type: ignore[assignment]
    roomier.seed_everything(7)
    ended = Ended(root / f"steps-{rank}", killed_at[1:] if killed_at is not None and killed_at[0] == rank else None)
    trainer = roomier.Trainer(
        strategy=strategy or "zero2",
        accelerator="cpu",
        max_steps=NUM_STEPS,
        logger=False,
        callbacks=[PeerSnapshots(every_n_steps, place), ended],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root / "runs",
    )
    data = Numbered() if strategy is None else [(7 * index + torch.arange(8)) % 32 for index in range(len(Numbered()))]
    trainer.fit(Model(root, None) if strategy is None else Tokens(), DataLoader(data, 8 // size, shuffle=True))  # type: ignore[arg-type]
    named = trainer.engine.weights()
    return {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in named.items()}


@pytest.fixture(scope="module")
def expected(on_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    found: dict[str, Tensor] = on_ranks(2, train_slowly_saved, tmp_path_factory.mktemp("undisturbed"), 5, None)[0]
    return found


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.more) for seed in range(1, 6))])
@pytest.mark.parametrize("every_n_steps", [1, 2, 3, 5])
def test_a_killed_run_repeats_at_most_the_steps_between_two_snapshots(
    on_ranks: RankPool, tmp_path: Path, expected: dict[str, Tensor], every_n_steps: int, seed: int
) -> None:
    random = Random(f"{every_n_steps} {seed}")
    hook = random.choice(["on_train_batch_start", "on_before_backward", "on_train_batch_end", "on_save_point"])
    with pytest.raises(RankFailed):
        on_ranks(2, train_slowly_saved, tmp_path, every_n_steps, (random.randrange(2), random.randint(6, 10), hook))

    def steps_of(rank: int) -> list[int]:
        return [int(line) for line in (tmp_path / f"steps-{rank}").read_text().splitlines()]

    completed = [steps_of(rank) for rank in (0, 1)]
    lost = random.choice([None, 0, 1])
    if lost is not None:
        shutil.rmtree(tmp_path / f"memory-{lost}")
    weights = on_ranks(2, train_slowly_saved, tmp_path, every_n_steps, None)[0]
    for rank, before in enumerate(completed):
        after = steps_of(rank)[len(before) :]
        assert after == list(range(after[0], NUM_STEPS + 1))
        assert 0 <= max(*completed[0], *completed[1]) + 1 - after[0] <= every_n_steps
    for name, each in expected.items():
        assert torch.equal(weights[name], each), name


@pytest.mark.parametrize(
    "strategy",
    few(
        [
            {"name": "ddp", "pipeline_parallel_size": 2},
            {"name": "hsdp", "shard_size": 2},
            {"name": "zero2", "context_parallel_size": 2},
        ]
    ),
    ids=["pipeline", "hsdp", "context"],
)
def test_a_lost_node_of_a_mesh_costs_no_more_steps(
    on_ranks: RankPool, tmp_path: Path, strategy: dict[str, Any]
) -> None:
    num_ranks = 4 if "shard_size" in strategy else 2
    undisturbed = on_ranks(num_ranks, train_slowly_saved, tmp_path / "undisturbed", 1, None, strategy)
    root = tmp_path / "killed"
    with pytest.raises(RankFailed):
        on_ranks(num_ranks, train_slowly_saved, root, 1, (1, 8, "on_before_backward"), strategy)
    shutil.rmtree(root / "memory-1")
    before = (root / "steps-0").read_text().splitlines()
    resumed = on_ranks(num_ranks, train_slowly_saved, root, 1, None, strategy)
    after = (root / "steps-0").read_text().splitlines()[len(before) :]
    assert int(before[-1]) + 1 - int(after[0]) <= 1
    for expected, found in zip(undisturbed, resumed, strict=True):
        assert expected.keys() == found.keys()
        for name, each in expected.items():
            assert torch.equal(found[name], each), name


def copy(root: Path, nodes: list[int], lost: int) -> bool:
    """Copy files to the next node, and return whether all files exist on other nodes than ``lost``."""
    ranks = all_ranks()
    own, folder = ranks.world.rank, root / f"node-{nodes[ranks.world.rank]}"
    folder.mkdir(exist_ok=True)
    files = [[StoredFile(f"{rank}-{part}", 1000 + rank, 0, ()) for part in range(2)] for rank in range(len(nodes))]
    for file in files[own]:
        (folder / file.name).write_bytes(file.name.encode() * 333 + bytes(file.size_bytes - 999))
    ranks.barrier()
    copy_to_next_node(folder, files, nodes, ranks)
    ranks.barrier()
    rest = {path.name: path for node in {*nodes} - {lost} for path in (root / f"node-{node}").iterdir()}
    return rest.keys() == {file.name for each in files for file in each} and all(
        path.read_bytes()[:999] == name.encode() * 333 for name, path in rest.items()
    )


@pytest.mark.parametrize("nodes", few([[0, 0, 0, 1, 1], [0, 1, 1, 1, 2], [0, 0, 1]]))
def test_nodes_may_have_different_numbers_of_ranks(on_ranks: RankPool, tmp_path: Path, nodes: list[int]) -> None:
    for lost in {*nodes}:
        (tmp_path / str(lost)).mkdir()
        assert all(on_ranks(len(nodes), copy, tmp_path / str(lost), nodes, lost))


class Line(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 4, bias=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.1)


class Looks(roomier.Callback):
    """Callback that notes the snapshots at each step, and fails at step 6."""

    def __init__(self, place: Path, *, fails: bool) -> None:
        self.place, self.fails, self.seen = place, fails, set[str]()

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        self.seen |= {path.name for path in self.place.glob("*/*/*/[!.]*")}
        assert len(list(self.place.glob("*/*/*/[!.]*"))) <= 2
        if self.fails and trainer.global_step == 6:
            raise KeyError("fails")


def test_a_second_fit_of_a_process_finds_the_snapshots_of_the_first(make_trainer: Make, tmp_path: Path) -> None:
    place = tmp_path / "memory"
    place.mkdir()
    for fails in (True, False):
        looks = Looks(place, fails=fails)
        trainer = make_trainer(max_steps=9, enable_checkpointing=True, callbacks=[looks, PeerSnapshots(1, place)])
        if fails:
            with pytest.raises(KeyError):
                trainer.fit(Line(), [torch.ones(2, 8)] * 9)
            assert {f"interrupted-step={step}" for step in range(1, 5)} <= looks.seen
            left = {path.name for path in place.glob("*/*/*/[!.]*")}
        else:
            trainer.fit(Line(), [torch.ones(2, 8)] * 9, ckpt_path="last")
            assert trainer.run is not None
            assert trainer.run.settled.start.checkpoint is not None
            assert trainer.run.settled.start.checkpoint.name in left
    assert not list(place.glob("*/*/*"))


def test_snapshots_of_another_root_are_deleted_only_if_they_are_replaced(make_trainer: Make, tmp_path: Path) -> None:
    place = tmp_path / "memory"
    place.mkdir()

    def fit(root: str, *, fails: bool) -> None:
        callbacks = [*([Looks(place, fails=True)] if fails else []), PeerSnapshots(1, place)]
        make_trainer(max_steps=7, enable_checkpointing=True, callbacks=callbacks, default_root_dir=tmp_path / root).fit(
            Line(), [torch.ones(2, 8)] * 9
        )

    for is_deleted in (False, True):
        with pytest.raises(KeyError):
            fit("first", fails=True)
        [left] = place.glob("*/*/*/interrupted-*")
        fit("second", fails=False)
        assert left.is_dir()  # the only copy
        run = (left.parent / ".run").readlink()
        assert run.parent == tmp_path / "first"
        if is_deleted:
            shutil.rmtree(run)
        else:
            shutil.copytree(left, run / "checkpoints" / left.name)
        fit("second", fails=False)
        assert not list(place.glob("*/*/*"))


def test_too_little_memory_is_an_error_before_the_first_step(
    make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Line()
    steps: list[int] = []
    model.on_train_batch_start = lambda *_: steps.append(1)  # type: ignore[method-assign]
    # two snapshots of 32 weights with two moments in float32, and a step counter
    for free, problem in ((2 * (3 * 32 * 4 + 4) - 1, "is too small. Space"), (2 * (3 * 32 * 4 + 4), "")):
        monkeypatch.setattr(module_of_callback, "free_bytes", lambda _, free=free: free)
        trainer = make_trainer(max_steps=1, enable_checkpointing=True, callbacks=[PeerSnapshots(1, tmp_path)])
        with pytest.raises(RoomierError, match=problem) if problem else nullcontext():
            trainer.fit(model, [torch.ones(2, 8)])
        assert len(steps) == (0 if problem else 1)
    for keywords, problem in (
        ({"enable_checkpointing": True}, "does not exist"),
        ({"enable_checkpointing": False}, "requires a run folder"),
        ({"enable_checkpointing": True, "default_root_dir": "memory://snapshots"}, "requires a run folder on a local"),
    ):
        trainer = make_trainer(max_steps=1, callbacks=[PeerSnapshots(1, tmp_path / "none")], **keywords)
        with pytest.raises(RoomierError, match=problem):
            trainer.fit(model, [torch.ones(2, 8)])
    with pytest.raises(RoomierError, match=r"PeerSnapshots\(every_n_steps\)"):
        PeerSnapshots(0)


def test_forecasts_count_the_snapshots(tmp_path: Path) -> None:
    workload = Workload.of(Line(), torch.empty(2, 8))
    with_snapshots = replace(workload, copies=kept_by([PeerSnapshots(1, tmp_path)]))
    for num_nodes, num_copies in ((1, 3), (2, 5), (3, 5)):
        plan = plan_from_flags(strategy="ddp", devices=2, num_nodes=num_nodes, accelerator="cuda")
        found = [Estimator(each, machine_of("a100:2")).estimate(plan, 2) for each in (workload, with_snapshots)]
        assert (
            found[1].host_bytes - found[0].host_bytes == num_copies * (3 * 32 * 4 + 4) // 2
        )  # rank 0 writes for both ranks of its node
        assert found[1].peak_bytes == found[0].peak_bytes


class Wide(Line):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 256))  # type: ignore[assignment]


def measured_and_forecast(root: Path, strategy: str) -> tuple[int, int]:
    """Return the bytes of a snapshot of two ranks on one node, in files and according to the forecast."""
    seen: list[int] = []

    class Measures(roomier.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
            if trainer.global_step == 3:
                seen.append(sum(path.stat().st_size for path in root.glob("memory/*/*/*/[!.]*/*")))

    (root / "memory").mkdir(exist_ok=True)
    snapshots = PeerSnapshots(2, root / "memory")
    trainer = roomier.Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_steps=4,
        logger=False,
        callbacks=[snapshots, Measures()],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root / "runs",
    )
    trainer.fit(Wide(), [torch.ones(2, 256)] * 4)
    workload, machine = Workload.of(Wide(), torch.empty(2, 256)), machine_of("a100:2")
    plan = plan_from_flags(strategy=strategy, devices=2, accelerator="cuda")
    without, with_snapshots = (
        Estimator(replace(workload, copies=copies), machine).estimate(plan, 2).host_bytes
        for copies in ((), kept_by([snapshots]))
    )
    return seen[0], (with_snapshots - without) * 2 // 3


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_the_forecast_of_snapshots_is_the_size_of_their_files(
    on_ranks: RankPool, tmp_path: Path, strategy: str
) -> None:
    for measured, forecast in on_ranks(2, measured_and_forecast, tmp_path, strategy):
        assert forecast == pytest.approx(measured, rel=0.02), (measured, forecast)
