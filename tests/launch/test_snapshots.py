"""PeerSnapshots: a job that loses ranks or nodes resumes from the memory of the others."""

import os
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import roomier
from roomier.api.callback import kept_by
from roomier.callbacks import ModelCheckpoint, PeerSnapshots
from roomier.callbacks import peer_snapshots as module_of_callback
from roomier.core.errors import RoomierError
from roomier.plan import plan_from_flags
from roomier.planner.formula.estimate import Estimator
from roomier.planner.hardware.spec import machine_of
from roomier.planner.workload import Workload
from tests.covering import few
from tests.launch.test_restarted_job import Model, Numbered, samples_of
from tests.ranks.pool import RankFailed, RankPool

NUM_STEPS = 12
Make = Callable[..., roomier.Trainer]


class Waits(roomier.Callback):
    """Callback that waits until the background save of the previous step is complete on this rank."""

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        background = trainer.run.saves.background
        while background is not None and background.num_ended < background.num_started:
            time.sleep(0.001)


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
        callbacks=[Waits(), ModelCheckpoint(every_n_train_steps=4), PeerSnapshots(1, place)],
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
        assert step in (9, 10)
        assert "interrupted-step=" in printed
    assert samples_of(root) == samples_of(tmp_path / "undisturbed")
    for name, expected in undisturbed.items():
        torch.testing.assert_close(weights[name], expected, rtol=1e-5, atol=1e-6)
    assert not list(root.glob("memory-*/*/*/*"))  # the memory is free after the fit
    assert not list(disk.glob("interrupted-*"))  # a newer checkpoint replaces it


class Line(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 4, bias=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.1)


class Looks(Waits):
    """Callback that notes the snapshots at each step, and fails at step 6."""

    def __init__(self, place: Path, *, fails: bool) -> None:
        self.place, self.fails, self.seen = place, fails, set[str]()

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        super().on_train_batch_end(trainer)
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
            assert {"interrupted-step=1", "interrupted-step=3"} <= looks.seen
            left = {path.name for path in place.glob("*/*/*/[!.]*")}
        else:
            trainer.fit(Line(), [torch.ones(2, 8)] * 9, ckpt_path="last")
            assert trainer.run is not None
            assert trainer.run.settled.start.checkpoint is not None
            assert trainer.run.settled.start.checkpoint.name in left
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
    for enable_checkpointing, problem in ((True, "does not exist"), (False, "requires a run folder")):
        callback = PeerSnapshots(1, tmp_path / "none")
        trainer = make_trainer(max_steps=1, enable_checkpointing=enable_checkpointing, callbacks=[callback])
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
        assert found[1].host_bytes - found[0].host_bytes == num_copies * (3 * 32 * 4 + 4)
        assert found[1].peak_bytes == found[0].peak_bytes
