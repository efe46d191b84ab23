"""Budgets with offloading to host memory, tested with copies outside the memory that torch measures."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from roomier import Trainer
from roomier.core.errors import RoomierError
from roomier.core.torch_private import seen_as_saved
from roomier.engine.eager import EagerEngine
from roomier.techniques.activation import budget, recompute
from roomier.techniques.activation.block_forward import Keep
from roomier.techniques.activation.budget import MOVED, WAYS, moved_ns
from roomier.techniques.activation.budget_choice import (
    SavingOption,
    Stage,
    choose,
    least_peak_bytes,
    peak_bytes,
    total_lost_ns,
)
from roomier.techniques.activation.copies import Copies, CopyTimes, Offload, StreamCopies
from roomier.techniques.activation.disk_copies import DiskCopies
from roomier.techniques.activation.profile import Call
from tests.activation.budgets import (
    Language,
    Net,
    Taken,
    assert_same_training,
    engine_for,
    measured_peak,
    recompute_of,
    take_step,
    tokens,
    train,
)
from tests.activation.test_budget import Trained
from tests.activation.test_budget_models import Bert, HalfFrozen, Repeated, UNet, pictures, sequences
from tests.activation.test_budget_ranks import NUM_RANKS, make_ranks
from tests.covering import few
from tests.ranks.pool import RankPool

TOLERANCE = 1.03
OFFLOAD = {"activations": "cpu"}
HIDDEN = CopyTimes(1e-4, 1e-4)  # copies at 10 TB/s, which any computation hides
SLOW = CopyTimes(1e3, 1e3)
NUM_CHOICES = 3  # for each shape
WINDOWS = [[tokens(seed=seed)] for seed in range(4)]


class NumpyCopies(Copies):
    """Copies to NumPy arrays, which do not count as tensors."""

    def __init__(self, times: CopyTimes) -> None:
        super().__init__(torch.device("cpu"))
        self.saves = True
        self._times = times

    def to_host(self, tensor: Tensor) -> Any:
        return tensor.numpy().copy()

    def to_device(self, host: Any) -> Tensor:
        made = torch.empty(len(host), dtype=torch.uint8)
        made.numpy()[:] = host
        return made

    def times(self) -> CopyTimes:
        return self._times


def move_by(patch: pytest.MonkeyPatch, times: CopyTimes, min_bytes: int = 4096) -> None:
    """Replace the copies of an engine with copies that take the given ``times``."""
    patch.setattr(recompute, "Offload", partial(Offload, min_bytes=min_bytes, copies=NumpyCopies(times)))


def train_moving(
    make: Callable[[], nn.Module], within: float | int, windows: Sequence[Any]
) -> tuple[Taken, list[bool]]:
    """Measurements of a training run, and the blocks that are offloaded."""
    network = make()
    moved: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recompute.BlockForward, "__call__", note_moves(recompute.BlockForward.__call__, moved))
        taken = train(network, within, windows, offload=OFFLOAD)
    return taken, moved[-len(taken.keeps) :]


def note_moves(call: Any, moved: list[bool]) -> Any:
    def noted(block: Any, *args: Any, **kwargs: Any) -> Any:
        moved.append(block.offloads)
        return call(block, *args, **kwargs)

    return noted


@pytest.fixture(scope="module")
def bounds() -> tuple[int, int]:
    return tuple(train(Language(), fraction, WINDOWS).peak_bytes for fraction in (0.0, 1.0))  # type: ignore[return-value]


@pytest.mark.more
def test_budgets_are_met_and_used_if_copies_overlap(monkeypatch: pytest.MonkeyPatch, bounds: tuple[int, int]) -> None:
    move_by(monkeypatch, HIDDEN)
    plain = train(Language(), "none", WINDOWS)
    least, most = bounds
    found = {}
    for part in (0.0, 0.4, 0.8, 1.0):
        budget_bytes = least + round((most - least) * part)
        taken, moved = train_moving(Language, budget_bytes, WINDOWS)
        assert taken.peak_bytes <= TOLERANCE * budget_bytes
        assert taken.predicted_bytes is not None
        assert taken.predicted_bytes <= budget_bytes
        assert taken.peak_bytes <= 1.005 * taken.predicted_bytes
        assert_same_training(taken, plain)
        found[part] = sum(moved), taken
    assert found[1.0][0] == 0  # everything fits, so no block is offloaded
    for part in (0.4, 0.8):
        num_moved, taken = found[part]
        assert num_moved >= 3
        assert taken.keeps == [Keep.ALL] * 8
        assert taken.flops == plain.flops  # no recomputation
    assert found[0.4][0] > found[0.8][0]  # no more blocks are offloaded than necessary


@pytest.mark.more
def test_budgets_are_met_with_activations_on_disk(
    monkeypatch: pytest.MonkeyPatch, bounds: tuple[int, int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(recompute, "Offload", partial(Offload, min_bytes=4096))
    monkeypatch.setattr(DiskCopies, "times", lambda _: HIDDEN)
    budget_bytes = bounds[0] + round((bounds[1] - bounds[0]) * 0.4)
    taken = train(Language(), budget_bytes, WINDOWS, offload={"activations": "disk", "folder": str(tmp_path)})
    assert taken.keeps == [Keep.ALL] * 8
    assert taken.peak_bytes <= TOLERANCE * budget_bytes
    assert_same_training(taken, train(Language(), "none", WINDOWS))
    assert "save all activations on disk; predicted peak" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.more
def test_slow_copies_are_not_chosen(monkeypatch: pytest.MonkeyPatch, bounds: tuple[int, int]) -> None:
    move_by(monkeypatch, SLOW)
    taken, moved = train_moving(Language, (bounds[0] + bounds[1]) // 2, WINDOWS)
    assert not any(moved)
    assert Keep.ALL in taken.keeps
    assert set(taken.keeps) != {Keep.ALL}


@pytest.mark.more
def test_a_fraction_has_the_same_meaning_as_without_offloading(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = train(Language(), 0.5, WINDOWS)
    move_by(monkeypatch, HIDDEN)
    taken, moved = train_moving(Language, 0.5, WINDOWS)
    assert any(moved)
    assert taken.peak_bytes <= TOLERANCE * (alone.predicted_bytes or 0) * 1.1
    nothing, _ = train_moving(Language, 0.0, WINDOWS)
    assert nothing.peak_bytes <= 1.005 * (nothing.predicted_bytes or 0)


SHAPES: dict[str, tuple[Callable[[], nn.Module], list[Any]]] = {
    "equal": (lambda: Language(num_layers=6), [tokens()]),
    "unequal": (UNet, [pictures()]),
    "repeated": (Repeated, [sequences()]),
    "half frozen": (HalfFrozen, [tokens()]),
    "bert": (Bert, [tokens()]),
    "micro-batches": (lambda: Language(num_layers=4), [tokens(4), tokens(16), tokens(8)]),
}


@pytest.mark.parametrize("shape", few(SHAPES))
def test_no_choice_needs_more_memory_than_predicted(monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    """Test random choices, including bad ones. The gradients equal the gradients of a run that saves all
    activations."""
    make, window = SHAPES[shape]
    draw = random.Random(shape)
    seen: list[Sequence[Stage]] = []

    def all_moved(stages: Sequence[Stage], budget_bytes: int) -> list[int]:
        seen.append(stages)
        return [0, *(WAYS.index(MOVED) for _ in stages[1:])]

    plain, ours = Net(make()), Net(make())
    plain_engine = engine_for(plain, "none")
    move_by(monkeypatch, HIDDEN)
    monkeypatch.setattr(budget, "choose", all_moved)
    engine = engine_for(ours, 1.0, offload=OFFLOAD)

    def losses_of(engine: EagerEngine, module: Net, num_steps: int) -> list[float]:
        torch.manual_seed(1)
        return [take_step(engine, module, window) for _ in range(num_steps)]

    assert losses_of(engine, ours, 4) == losses_of(plain_engine, plain, 4)
    [stages] = seen
    chosen = recompute_of(engine)
    for number in range(NUM_CHOICES):
        weights = draw.choice([[1, 1, 1, 3], [0, 0, 1, 1], [1, 0, 0, 3], [0, 0, 0, 1]])
        choice = [0, *(draw.choices(range(len(WAYS)), weights)[0] for _ in stages[1:])]
        for block, index in zip(chosen._profile.order, choice[1:], strict=True):
            chosen.blocks[block].keep, chosen.blocks[block].offloads = WAYS[index]
        torch.manual_seed(number)
        taken_bytes, predicted_bytes = measured_peak(engine, ours, window), peak_bytes(stages, choice)
        assert 0.4 * predicted_bytes <= taken_bytes <= 1.005 * predicted_bytes, choice
        torch.manual_seed(number)
        for _ in range(2):
            take_step(plain_engine, plain, window)
        assert losses_of(engine, ours, 1) == losses_of(plain_engine, plain, 1)


def train_on_rank(strategy: str) -> dict[str, Any]:
    """Train with batches that are twice as large on rank 1."""
    ranks = make_ranks()
    own = 1 + ranks.world.rank
    windows = [[tokens(8 * own, seed=10 * step + own)] for step in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        move_by(patch, HIDDEN)
        found = []
        for policy, keywords in (("none", {}), (0.5, {"offload": OFFLOAD})):
            module = Net(Language(num_layers=6))
            engine = engine_for(module, policy, ranks, strategy=strategy, devices=NUM_RANKS, **keywords)
            torch.manual_seed(own)
            found.append([take_step(engine, module, window) for window in windows])
        chosen = recompute_of(engine)
        return {
            "ways": [(str(block.keep), block.offloads) for block in chosen.blocks],
            "peak_bytes": measured_peak(engine, module, windows[0]),
            "predicted_bytes": chosen.predicted_bytes,
            "losses": found,
        }


@pytest.mark.more
def test_ranks_offload_the_same_blocks(on_ranks: RankPool) -> None:
    strategies = ["ddp", "zero3"]
    results = on_ranks.each(NUM_RANKS, train_on_rank, [(each,) for each in strategies])
    for strategy, (first, second) in zip(strategies, results, strict=True):
        assert first["ways"] == second["ways"], strategy
        assert any(offloads for _, offloads in first["ways"]), strategy
        assert first["predicted_bytes"] == second["predicted_bytes"], strategy
        for each in (first, second):
            assert each["peak_bytes"] <= TOLERANCE * first["predicted_bytes"], strategy
            plain, ours = each["losses"]
            assert ours == plain, strategy


def test_under_the_trainer(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    move_by(monkeypatch, HIDDEN)

    def fit(**keywords: Any) -> dict[str, Tensor]:
        module = Trained()
        torch.manual_seed(1)
        make_trainer(max_epochs=1, **keywords).fit(module)
        return module.state_dict()

    plain = fit()
    for name, each in fit(activation_checkpointing=0.6, offload=OFFLOAD).items():
        assert torch.equal(each, plain[name]), name
    assert "4 save all activations in host memory; predicted peak" in capsys.readouterr().err


def test_a_device_that_uses_host_memory_is_rejected(make_trainer: Callable[..., Trainer]) -> None:
    trainer = make_trainer(activation_checkpointing="6GiB", offload=OFFLOAD, accelerator="cpu")
    with pytest.raises(RoomierError, match=r"offload.activations='cpu'.*device 'cpu'.*Remove offload") as caught:
        trainer.fit(Net(Language(num_layers=2)), [tokens()])
    assert "budget" in caught.value.problem


def moved_stages(draw: random.Random, sizes: Sequence[int]) -> list[Stage]:
    stages = [Stage((SavingOption(0, draw.randrange(50, 150), 0),), draw.randrange(50, 150))]
    for _ in range(draw.randrange(1, 6)):
        size, given = draw.choice(sizes), draw.randrange(0, 5)
        kept, rise = max(size - given, 0), draw.randrange(90, 160)
        options = (
            SavingOption(0, rise, draw.randrange(20, 40)),
            SavingOption(draw.randrange(0, 20), rise, draw.randrange(5, 25)),
            SavingOption(kept, rise, 0),
            SavingOption(draw.randrange(0, 3), rise + given, draw.randrange(1, 30), size, draw.choice([1, 1, 1, 2])),
        )
        stages.append(Stage(options, draw.randrange(80, 160)))
    return stages


@pytest.mark.parametrize("are_equal", [True, False])
@pytest.mark.parametrize("seed", few(range(30), 10))
def test_the_choice_compared_with_all_choices(seed: int, are_equal: bool) -> None:
    draw = random.Random(seed)
    stages = moved_stages(draw, [30] if are_equal else range(5, 60))
    every = [list(each) for each in itertools.product(*(range(len(stage.options)) for stage in stages))]
    peaks = {tuple(each): peak_bytes(stages, each) for each in every}
    unmoved = [each for each in every if not any(s.options[i].moved_bytes for s, i in zip(stages, each, strict=True))]
    least = least_peak_bytes(stages)
    assert min(peaks.values()) <= least <= min(peaks[tuple(each)] for each in unmoved)
    for budget_bytes in {least, max(peaks.values()), *(draw.randrange(least, least + 200) for _ in range(10))}:
        choice = choose(stages, budget_bytes)
        assert choice is not None
        assert peaks[tuple(choice)] <= budget_bytes
        best_ns = min(total_lost_ns(stages, each) for each in every if peaks[tuple(each)] <= budget_bytes)
        unmoved_ns = [total_lost_ns(stages, each) for each in unmoved if peaks[tuple(each)] <= budget_bytes]
        assert best_ns <= total_lost_ns(stages, choice) <= min(unmoved_ns, default=10**9)
        if are_equal:
            assert total_lost_ns(stages, choice) == best_ns


@pytest.mark.parametrize("seed", range(60))
def test_two_calls_on_the_device_never_exceed_the_bound(seed: int) -> None:
    """Simulate a step that runs blocks in any order and backward in reverse. The tensors of two calls are on the
    device."""
    draw = random.Random(seed)
    num_blocks = draw.randrange(1, 6)
    order = [*range(num_blocks), *(draw.randrange(num_blocks) for _ in range(draw.choice([0, 0, 3])))]
    sizes = [draw.choice([0, draw.randrange(1, 50)]) for _ in range(num_blocks)]
    num_calls = [order.count(block) for block in range(num_blocks)]

    def counted(last: int) -> int:
        options = [
            SavingOption(0, 0, 0, sizes[each], num_calls[each] if sizes[each] else 0) for each in range(last + 1)
        ]
        return peak_bytes([Stage((option,), 0) for option in options], [0] * len(options))

    moved: list[int] = []  # positions of the offloaded calls in ``order``
    for place, block in enumerate(order):
        moved += [place] if sizes[block] else []
        assert sum(sizes[order[each]] for each in moved[-2:]) <= counted(max(order[: place + 1]))
    for place in reversed(range(len(order))):
        present = [each for each in moved if each <= place][-2:]
        assert sum(sizes[order[each]] for each in present) <= counted(max(order[: place + 1]))


def test_the_choice_for_a_hundred_unequal_blocks_takes_seconds() -> None:
    draw, mib = random.Random(0), 2**20
    stages = []
    for _ in range(100):
        kept, block_ns = draw.randrange(2000, 4000) * mib, draw.randrange(10**7, 10**8)
        options = (
            SavingOption(0, 10**10, block_ns),
            SavingOption(kept // 3, 10**10, block_ns // 3),
            SavingOption(kept, 10**10, 0),
            SavingOption(0, 10**10, block_ns // 5, kept, 1),
        )
        stages.append(Stage(options, 12 * 10**9))
    start_s = time.process_time()
    choice = choose(stages, 100 * 10**9)
    elapsed_s = time.process_time() - start_s
    assert choice is not None
    assert peak_bytes(stages, choice) <= 100 * 10**9
    assert choice.count(3) > 10
    assert elapsed_s < 5  # about 0.7 s on an idle core


def test_copies_that_do_not_overlap_count_as_lost_time() -> None:
    call, after = Call(0, moved_bytes=1000), Call(1, spans=[(0, 300)], backward_spans=[(0, 700)])
    assert moved_ns(call, after, CopyTimes(0.3, 0.7)) == 20  # the copies overlap, but have a small cost
    assert moved_ns(call, after, CopyTimes(0.4, 0.7)) == 100 + 22
    assert moved_ns(call, after, CopyTimes(1.0, 1.0)) == 700 + 300 + 40


def test_the_times_of_copies_are_measured() -> None:
    times = Copies(torch.device("cpu")).times()
    assert 0.001 < times.out_ns < 100
    assert 0.001 < times.back_ns < 100


def test_observing_saved_tensors_does_not_change_other_hooks() -> None:
    x, seen, packed = torch.ones(3, requires_grad=True), [], []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor * 2

    for hooks in (nullcontext(), saved_tensors_hooks(pack, lambda tensor: tensor)):
        with hooks, seen_as_saved(seen.append):
            y = x * x
        y.sum().backward()
    assert len(seen) == 4
    assert len(packed) == 2
    assert x.grad is not None
    assert x.grad.tolist() == [2 + 4] * 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    times = StreamCopies(torch.device("cuda")).times()
    assert 0.001 < times.out_ns < 1
    assert 0.001 < times.back_ns < 1
    windows = [[tuple(each.cuda() for each in tokens(256, seed=seed))] for seed in range(4)]
    found = {}
    for policy, keywords in (("none", {}), (0.5, {"offload": OFFLOAD})):
        module = Net(Language(width=256))
        engine = engine_for(module, policy, accelerator="gpu", **keywords)
        torch.manual_seed(1)
        found[policy] = [take_step(engine, module, window) for window in windows]
    assert found[0.5] == found["none"]
    chosen = recompute_of(engine)
    for block in chosen.blocks:
        block.keep, block.offloads = MOVED  # replaces the choice
    take_step(engine, module, windows[0])
    torch.cuda.reset_peak_memory_stats()
    take_step(engine, module, windows[0])
    assert chosen._profile is not None
    predicted_bytes = peak_bytes(chosen._profile.stages, [0, *(WAYS.index(MOVED) for _ in chosen._profile.order)])
    assert torch.cuda.max_memory_allocated() <= TOLERANCE * predicted_bytes
