"""Runs on the simulated accelerator that run out of memory, resume, copy batches, and save in the background."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from roomier import Callback, Trainer, checkpoint
from roomier.callbacks import ModelCheckpoint
from roomier.checkpoint import saving
from roomier.core.device.transfer import BatchMover
from roomier.plan import Plan
from roomier.planner.measured import out_of_memory
from roomier.planner.measured.out_of_memory import OutOfMemory
from tests.device.runs import BATCH_SIZE, NUM_STEPS, RELATIVE, Language, difference, loader, trainer_of, weights_of
from tests.ranks.pool import RankFailed
from tests.simulator import simulated
from tests.simulator.gpt import batches
from tests.simulator.workers import SimulatedRanks

DEVICE = simulated.DEVICE
SCHEDULES = ("LATE", "OTHERS_FIRST")
# Number of ranks, and arguments of the Trainer.
STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "zero2": (2, {"strategy": "zero2", "devices": 2}),
    "zero3": (2, {"strategy": "zero3", "devices": 2}),
}

# Memory that runs out ------------------------------------------------------------------------------------------------

WIDTH = 64
LARGE_BATCH = 16


class Peaks(Callback):
    """Callback that records the peak of the allocated bytes after each step."""

    def __init__(self) -> None:
        self.num_bytes: list[int] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.num_bytes.append(torch.accelerator.max_memory_allocated())


def peaks_of_steps(folder: Path, keywords: dict[str, Any]) -> list[int]:
    watch = Peaks()
    trainer = trainer_of(folder, DEVICE, [watch], enable_checkpointing=False, **keywords)
    trainer.fit(Language(WIDTH), loader(batch_size=LARGE_BATCH))
    return watch.num_bytes


def run_out_of_memory(folder: Path, keywords: dict[str, Any]) -> str:
    """Run out of memory, write the plan that the error suggests, and return the text of the error."""
    trainer = trainer_of(folder, DEVICE, [ModelCheckpoint(every_n_train_steps=1)], **keywords)
    with pytest.raises(OutOfMemory) as caught:
        trainer.fit(Language(WIDTH), loader(batch_size=LARGE_BATCH))
    assert caught.value.plan is not None, caught.value
    if trainer.is_global_zero:
        (folder / "plan.yaml").write_text(caught.value.plan.to_yaml())
    return str(caught.value)


def resume_with_plan(folder: Path) -> tuple[int, int]:
    """Resume the run with the written plan, and return the first step and the last step."""
    plan = Plan.from_yaml((folder / "plan.yaml").read_text())
    steps: list[int] = []

    class Start(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            steps.append(trainer.global_step)

    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(plan=plan, max_steps=NUM_STEPS, default_root_dir=folder, callbacks=[Start()], **quiet)
    num_parts = plan.batch.accumulate_grad_batches
    data = loader(NUM_STEPS * num_parts, batch_size=LARGE_BATCH // num_parts)
    trainer.fit(Language(WIDTH), data, ckpt_path="last")
    assert simulated.races() == []
    return steps[0], trainer.global_step


@pytest.mark.parametrize("strategy", ["single", pytest.param("zero2", marks=pytest.mark.slow)])
def test_a_run_that_ran_out_of_memory_resumes_with_the_nearest_plan_that_fits(
    on_simulated: SimulatedRanks, tmp_path: Path, strategy: str
) -> None:
    num_ranks, keywords = STRATEGIES[strategy]
    peaks = on_simulated(num_ranks, peaks_of_steps, tmp_path, keywords)[0]
    assert peaks[0] < peaks[1], "the optimizer has no states during the forward and backward of the first step"
    limit = (peaks[0] + peaks[1]) // 2
    for text in on_simulated(num_ranks, run_out_of_memory, tmp_path, keywords, memory_limit=limit):
        assert "ran out of memory in step 2" in text
        assert "The nearest plan that fits, with a forecast of" in text
        assert "Trainer(" in text
    results = on_simulated(num_ranks, resume_with_plan, tmp_path, memory_limit=limit)
    assert results == [(1, NUM_STEPS)] * num_ranks


def run_out_on_the_last_rank(limit: int) -> None:
    out_of_memory._advice = lambda *args: ("Do this", None)  # type: ignore[assignment]
    if os.environ["RANK"] == "1":
        simulated.set_memory_limit(limit)
    trainer = trainer_of(Path(), DEVICE, enable_checkpointing=False, strategy="zero2", devices=2)
    trainer.fit(Language(WIDTH), loader(batch_size=LARGE_BATCH))


def test_no_rank_hangs_if_one_rank_runs_out_of_memory(on_simulated: SimulatedRanks, tmp_path: Path) -> None:
    _, keywords = STRATEGIES["zero2"]
    peaks = on_simulated(2, peaks_of_steps, tmp_path, keywords)[0]
    with pytest.raises(RankFailed) as caught:
        on_simulated(2, run_out_on_the_last_rank, (peaks[0] + peaks[1]) // 2, timeout_s=60)
    assert caught.value.rank == 1
    assert "ran out of memory in step 2 on rank 1" in caught.value.reports[1]
    assert "did not end in time" not in str(caught.value)


# Killed, stopped and resumed runs ------------------------------------------------------------------------------------


class Interrupt(Callback):
    """Callback that sends a signal to this process before the step after ``step``."""

    def __init__(self, step: int, number: int) -> None:
        self.step = step
        self.number = number

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), self.number)


def train(
    folder: Path,
    accelerator: str,
    keywords: dict[str, Any],
    *,
    dropout: float = 0.1,
    stopped_by: int | None = None,
    ckpt_path: str | None = None,
) -> dict[str, Tensor]:
    """Train with a checkpoint after each step, or resume, and return the weights."""
    callbacks: list[Callback] = [ModelCheckpoint(every_n_train_steps=1)]
    if stopped_by is not None:
        callbacks.append(Interrupt(3, stopped_by))
    trainer = trainer_of(folder, accelerator, callbacks, **keywords)
    module = Language(dropout=dropout)
    torch.manual_seed(1 if ckpt_path is None else 2)  # the random numbers of a resumed run come from its checkpoint
    trainer.fit(module, loader(shuffle=True), ckpt_path=ckpt_path)
    assert trainer.global_step == trainer.max_steps
    assert simulated.races() == []
    return weights_of(module)


@pytest.mark.parametrize(
    ("strategy", "number", "schedule"),
    [
        ("single", signal.SIGKILL, "LATE"),
        ("single", signal.SIGTERM, "OTHERS_FIRST"),
        ("zero3", signal.SIGKILL, "OTHERS_FIRST"),
        pytest.param("single", signal.SIGKILL, "OTHERS_FIRST", marks=pytest.mark.slow),
        pytest.param("single", signal.SIGTERM, "LATE", marks=pytest.mark.slow),
        pytest.param("zero3", signal.SIGKILL, "LATE", marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_run_continues_with_the_same_bits(
    on_simulated: SimulatedRanks, tmp_path: Path, strategy: str, number: int, schedule: str
) -> None:
    num_ranks, keywords = STRATEGIES[strategy]
    whole = on_simulated(num_ranks, train, tmp_path / "whole", DEVICE, keywords, schedule=schedule)[0]
    with pytest.raises(RankFailed, match=r"SIGKILL|SystemExit: 143"):
        on_simulated(num_ranks, train, tmp_path / "cut", DEVICE, keywords, stopped_by=number, schedule=schedule)
    assert checkpoint.find_last(tmp_path / "cut") is not None
    resumed = on_simulated(num_ranks, train, tmp_path / "cut", DEVICE, keywords, ckpt_path="last", schedule=schedule)[0]
    for name, weight in whole.items():
        assert torch.equal(weight, resumed[name]), name


def resume_on_both(folder: Path, keywords: dict[str, Any]) -> list[float]:
    """Return the differences between runs that change their device and a run on the CPU."""
    whole = train(folder / "whole", "cpu", keywords, dropout=0.0)
    differences = []
    for first, second in (("cpu", DEVICE), (DEVICE, "cpu"), (DEVICE, DEVICE)):
        root = folder / f"{first}-{second}"
        train(root, first, {**keywords, "max_steps": 2}, dropout=0.0)
        found = train(root, second, keywords, dropout=0.0, ckpt_path="last")
        differences.append(difference(found, whole))
    return differences


@pytest.mark.parametrize("strategy", ["single", pytest.param("zero3", marks=pytest.mark.slow)])
def test_a_run_can_change_between_device_and_cpu(on_simulated: SimulatedRanks, tmp_path: Path, strategy: str) -> None:
    num_ranks, keywords = STRATEGIES[strategy]
    for differences in on_simulated(num_ranks, resume_on_both, tmp_path, keywords):
        assert max(differences) <= RELATIVE


# Copies of batches ---------------------------------------------------------------------------------------------------


class Graph:
    """Object that moves itself."""

    def __init__(self, nodes: Tensor) -> None:
        self.nodes = nodes

    def to(self, device: torch.device) -> Graph:
        return Graph(self.nodes.to(device, non_blocking=True))


def move_nested_batches(is_pinned: bool) -> tuple[Tensor, dict[str, int], list[str]]:
    """Multiply nested batches, while the host requests the next batches and frees the memory of earlier batches."""
    mover, weight = BatchMover(torch.device(DEVICE, 0)), torch.eye(64).to(DEVICE)
    total = torch.zeros(8, 64, device=DEVICE)
    simulated.clear()
    for step in range(6):
        parts = [torch.full((8, 64), float(10 * step + index)) for index in range(4)]
        parts = [part.pin_memory() for part in parts] if is_pinned else parts
        moved = mover({"a": parts[0], "nested": [parts[1], (parts[2], "text", step)], "graph": Graph(parts[3])})
        del parts
        assert moved["nested"][1][1:] == ("text", step)
        for part in (moved["a"], moved["nested"][0], moved["nested"][1][0], moved["graph"].nodes):
            for _ in range(3):
                part = part @ weight
            total += part
        del moved, part
    waits = simulated.host_waits()
    return total.cpu(), {kind: num for kind, num in waits.items() if num}, simulated.races()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("without", [(), ("pinned_memory",), ("streams",)])
def test_batches_are_copied_on_a_separate_stream(
    on_simulated: SimulatedRanks, without: tuple[str, ...], schedule: str
) -> None:
    expected = sum(10 * step + index for step in range(6) for index in range(4))
    for is_pinned in (True, False) if without != ("pinned_memory",) else (False,):
        (found,) = on_simulated(1, move_nested_batches, is_pinned, schedule=schedule, without=without)
        total, waits, races = found
        assert torch.equal(total, torch.full((8, 64), float(expected)))
        assert races == []
        assert bool(waits) == (not is_pinned)


class Nested(Language):
    """Language model whose batches are nested."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([batch["tokens"] + batch["more"][0]], batch_idx)


def nested(samples: Any) -> dict[str, Any]:
    tokens = torch.stack(list(samples))
    return {"tokens": tokens, "more": [torch.zeros_like(tokens), "text"]}


class Waits(Callback):
    """Callback that counts the waits of the host from the third step to the last step."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2:
            self.before = simulated.host_waits()
        if trainer.global_step == NUM_STEPS - 1:
            counts = simulated.host_waits()
            self.counts = {kind: num - self.before.get(kind, 0) for kind, num in counts.items() if num}
            self.counts = {kind: num for kind, num in self.counts.items() if num}


def fit_nested(folder: Path) -> dict[str, tuple[float, dict[str, int], list[str]]]:
    """For a DataLoader and for a list of batches, return the difference from the CPU, the waits and the races."""
    tokens = torch.cat(batches(NUM_STEPS))
    found = {}
    for kind in ("DataLoader", "list"):
        fits = []
        for accelerator in ("cpu", DEVICE):
            data: Any = torch.utils.data.DataLoader(tokens, batch_size=BATCH_SIZE, collate_fn=nested)
            data = data if kind == "DataLoader" else list(data)
            waits, module = Waits(), Nested()
            callbacks = [waits] if accelerator == DEVICE else []
            simulated.clear()
            trainer_of(folder, accelerator, callbacks, enable_checkpointing=False).fit(module, data)
            fits.append(weights_of(module))
        found[kind] = difference(*fits), waits.counts, simulated.races()
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_data_loader_is_pinned_and_other_batches_are_copied_with_waits(
    on_simulated: SimulatedRanks, tmp_path: Path, schedule: str
) -> None:
    (found,) = on_simulated(1, fit_nested, tmp_path, schedule=schedule)
    for relative, _, races in found.values():
        assert relative <= RELATIVE
        assert races == []
    assert found["DataLoader"][1] == {}
    num_copies = 2 * (NUM_STEPS - 3)
    assert sum(found["list"][1].values()) == num_copies, found


# Background checkpoints ----------------------------------------------------------------------------------------------

SAVED_STEPS = (2, 4)


class Gate(Callback):
    """Callback that blocks the files of a checkpoint until training has modified the weights and states that it
    contains."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.num_open_saves = 0
        write = saving._write_file

        def write_later(*arguments: Any) -> Any:
            assert self.opened.wait(60)
            return write(*arguments)

        saving._write_file = write_later

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step - 1 in SAVED_STEPS:  # one step has run since the save started
            self.num_open_saves += 1
            self.opened.set()
        elif trainer.global_step in SAVED_STEPS:
            self.opened.clear()


def save_twice(folder: Path, keywords: dict[str, Any], is_async: bool) -> int:
    callbacks: list[Callback] = [
        ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1, async_save=is_async, filename="{step}")
    ]
    gate = Gate() if is_async else None
    trainer = trainer_of(folder, DEVICE, [*callbacks, *([gate] if gate else [])], max_steps=6, **keywords)
    trainer.fit(Language(dropout=0.1), loader(6))
    assert simulated.races() == []
    return gate.num_open_saves if gate else 0


@pytest.mark.parametrize(
    ("strategy", "schedule"),
    [("single", "OTHERS_FIRST"), ("zero3", "LATE"), pytest.param("single", "LATE", marks=pytest.mark.slow)],
)
def test_a_background_checkpoint_contains_the_state_of_its_step(
    on_simulated: SimulatedRanks, tmp_path: Path, strategy: str, schedule: str
) -> None:
    num_ranks, keywords = STRATEGIES[strategy]
    for is_async in (False, True):
        folder = tmp_path / str(is_async)
        num_open = on_simulated(num_ranks, save_twice, folder, keywords, is_async, schedule=schedule)
        assert num_open == [2 * is_async] * num_ranks
    for step in SAVED_STEPS:
        states = [checkpoint.load(tmp_path / str(is_async) / f"step={step}") for is_async in (False, True)]
        assert states[1]["progress"]["global_step"] == step
        for part in ("module", "optimizers", "random"):
            leaves, trees = zip(*(torch.utils._pytree.tree_flatten(state[part]) for state in states), strict=True)
            assert trees[0] == trees[1]
            for one, other in zip(*leaves, strict=True):
                assert torch.equal(one, other) if isinstance(one, Tensor) else one == other, part
