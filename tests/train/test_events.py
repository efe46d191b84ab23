"""``seeding="events"``: dropout masks depend only on the seed, the step, the data rank and the micro-batch."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import roomier
from roomier.core.device.events import Events, install_events
from roomier.core.device.rng import mix_seed
from roomier.core.errors import PlanError
from tests.ranks.pool import RankPool

SEED, LR, MICRO, ACCUMULATE, STEPS = 5, 0.003, 2, 2, 4
BOUND = 1e-12  # 4 steps of sums over at most 32 terms in float64; another mask changes weights by more than 1e-3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        scale = (1 + random.random()) * (1 + np.random.random())
        return x + self.drop(torch.tanh(self.linear(x))) * scale


class RecomputedByModel(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        recomputed: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return recomputed


class Net(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(4, 8)
        self.drop = nn.Dropout(0.5)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.leave = nn.Linear(8, 1)
        self.double()
        self.seen: list[Tensor] = []
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor, call: Callable[[nn.Module, Tensor], Tensor] = lambda block, x: block(x)) -> Tensor:
        h = call(self.drop, call(self.enter, x))
        for block in self.blocks:
            before, h = h, call(block, h)
            self.masks.append((h == before).detach())
        out: Tensor = call(self.leave, h)
        return out

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        self.seen.append(x)
        return nn.functional.mse_loss(self(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR)


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(32, n, generator=generator, dtype=torch.float64) for n in (4, 1))
    return DataLoader(TensorDataset(x, y), batch_size=MICRO)


class Saves(roomier.Callback):
    """Saves in the middle, and draws random numbers between the steps."""

    def __init__(self, path: str, num_draws: int) -> None:
        self.path, self.num_draws = path, num_draws

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        torch.rand(self.num_draws)
        if trainer.global_step == 2 and self.path:
            trainer.save_checkpoint(self.path)


def fit(folder: str, seed: int = SEED, ckpt_path: str | None = None, num_draws: int = 0, **keywords: Any) -> Any:
    """Train, and return the samples that this rank read, and the weights."""
    net = Net()
    roomier.seed_everything(seed)
    trainer = roomier.Trainer(
        **{"accumulate_grad_batches": ACCUMULATE, "precision": "64-true", "seeding": "events", **keywords},
        default_root_dir=folder,
        accelerator="cpu",
        max_steps=STEPS,
        callbacks=Saves("" if ckpt_path else f"{folder}/middle", num_draws),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(net, loader(), ckpt_path=ckpt_path)
    weights = trainer.engine.weights()
    return net.seen, [each.full_tensor() if hasattr(each, "full_tensor") else each for each in weights.values()]


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)


def as_event(unit: nn.Module, x: Tensor) -> Tensor:
    drawn = int(torch.randint(2**62, ()))
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed_all(mix_seed(drawn, 0))
    out: Tensor = unit(x)
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    return out


def plain(
    seen: list[list[Tensor]], windows: Sequence[int] = (ACCUMULATE,) * STEPS, clip: float = math.inf
) -> tuple[Net, list[Tensor]]:
    """Train in a plain loop, from the samples that each rank read, and return the weights.

    Args:
        windows: number of micro-batches of each step.
        clip: limit of the gradient norm.
    """
    net, targets = Net(), loader().dataset.tensors  # type: ignore[attr-defined]
    optimizer = net.configure_optimizers()
    for step, num in enumerate(windows):
        for rank, batches in enumerate(seen):
            for index in range(num):
                x = batches[sum(windows[:step]) + index]
                rows = [int((targets[0] == each).all(1).nonzero()) for each in x]
                seed_all(mix_seed(SEED, step, rank, index))
                loss = nn.functional.mse_loss(net(x, as_event), targets[1][rows])
                (loss / num / len(seen)).backward()
        nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return net, [each.detach() for each in net.parameters()]


def distance(left: list[Tensor], right: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(left, right, strict=True))


Case = dict[str, Any]
MAIN: tuple[list[Case], list[Case]] = (
    [{"activation_checkpointing": "full"}],
    [{"strategy": "ddp"}, {"strategy": "zero3", "activation_checkpointing": "full"}],
)
OTHERS: tuple[list[Case], list[Case]] = (
    [
        {},
        {"activation_checkpointing": "selective", "offload": {"activations": "disk"}},
        {"offload": {"optimizer_states": "disk", "parameters": "disk"}},
    ],
    [
        {"strategy": "zero1"},
        {"strategy": "zero2", "activation_checkpointing": "selective"},
        {"strategy": "zero3", "offload": {"optimizer_states": "disk", "update": "speculative"}},
    ],
)


def fits(folder: str, cases: list[dict[str, Any]]) -> list[Any]:
    return [fit(folder, **case) for case in cases]


@pytest.mark.parametrize("cases", [MAIN, pytest.param(OTHERS, marks=pytest.mark.more)], ids=["main", "others"])
def test_masks_are_those_of_a_plain_loop_on_one_and_two_ranks(
    cases: tuple[list[Case], list[Case]], on_ranks: RankPool, tmp_path: Path
) -> None:
    alone = fits(str(tmp_path), cases[0])
    both = on_ranks(2, fits, str(tmp_path), cases[1])
    for results in ([each] for each in alone), (list(each) for each in zip(*both, strict=True)):
        for by_rank in results:
            net, wanted = plain([seen for seen, _ in by_rank])
            assert distance(by_rank[0][1], wanted) < BOUND
    first = [net.masks[index] for index in range(3 * ACCUMULATE)]  # blocks and micro-batches of a step
    assert not any(torch.equal(a, b) for i, a in enumerate(first) for b in first[:i])


def test_resume_in_the_middle_is_exact_and_does_not_depend_on_earlier_numbers(tmp_path: Path) -> None:
    _, wanted = fit(str(tmp_path))
    _, resumed = fit(str(tmp_path), seed=9, ckpt_path=f"{tmp_path}/middle", num_draws=3)
    assert all(map(torch.equal, wanted, resumed))
    _, other = fit(str(tmp_path), seed=9)
    assert distance(wanted, other) > 1e-3


IN_BACKWARD: Case = {"accumulate_grad_batches": 1, "step_in_backward": "exact"}
WINDOWS: dict[str, tuple[Case, tuple[int, ...], float]] = {
    "unequal windows": ({"limit_train_batches": 5}, (2, 2, 1, 2), math.inf),
    "step in backward": (IN_BACKWARD, (1, 1, 1, 1), math.inf),
    "two backward passes": (
        {**IN_BACKWARD, "gradient_clip_val": 0.05, "activation_checkpointing": "full"},
        (1, 1, 1, 1),
        0.05,
    ),
    "compiled": ({"compile": {"backend": "aot_eager"}, "activation_checkpointing": "full"}, (2,) * STEPS, math.inf),
}


@pytest.mark.more
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("name", WINDOWS)
def test_masks_and_resume_of_other_steps_are_exact(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, windows, clip = WINDOWS[name]
    if name == "compiled":  # the compiler would specialize the blocks for each number that Python or NumPy draws
        monkeypatch.setattr(Block, "forward", forward_of_torch)
    seen, weights = fit(str(tmp_path), **case)
    assert distance(weights, plain([seen], windows, clip)[1]) < BOUND
    _, resumed = fit(str(tmp_path), seed=9, ckpt_path=f"{tmp_path}/middle", num_draws=3, **case)
    assert all(map(torch.equal, weights, resumed))


def forward_of_torch(block: Block, x: Tensor) -> Tensor:
    return x + block.drop(torch.tanh(block.linear(x)))


@pytest.mark.parametrize("mutant", ["equal seeds in blocks", "no seeds of micro-batches"])
def test_mutants_differ(mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if mutant == "equal seeds in blocks":
        monkeypatch.setattr(Events, "seed_of_event", lambda _, **__: 1)
    else:
        monkeypatch.setattr(Events, "begin_micro_batch", lambda _: None)
    seen, weights = fit(str(tmp_path))
    assert distance(weights, plain([seen])[1]) > 1e-3


def test_blocks_that_the_model_recomputes_draw_the_same_masks() -> None:
    gradients = []
    for recomputes in False, True:
        net = Net()
        install_events(net.blocks)
        if recomputes:
            net.blocks = nn.ModuleList(RecomputedByModel(each) for each in net.blocks)
        events = Events(SEED, torch.device("cpu"))
        with events.window(0):
            events.begin_micro_batch()
            net(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
        gradients.append([each.grad for each in net.parameters()])
    assert all(map(torch.equal, *gradients))


def test_ranks_that_share_samples_draw_equal_numbers_outside_of_blocks() -> None:
    inside, outside = [], []
    for coordinate in range(2):
        block = Block().double()
        install_events([block], sliced=[block])
        events = Events(SEED, torch.device("cpu"), data_rank=3, coordinate=coordinate)
        before = random.getstate(), torch.get_rng_state()
        with events.window(7):
            events.begin_micro_batch()
            inside.append(block(torch.ones(64, 8).double()) == 1)
            outside.append((random.random(), float(np.random.random()), float(torch.rand(()))))
        assert before[0] == random.getstate()
        assert torch.equal(before[1], torch.get_rng_state())
    assert outside[0] == outside[1]
    assert not torch.equal(*inside)


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx % 2:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()


def test_manual_optimization_seeds_each_batch(make_trainer: Any) -> None:
    masks = []
    for num_draws in 0, 3:
        net = Manual()
        roomier.seed_everything(SEED)
        make_trainer(seeding="events", max_steps=1, callbacks=Saves("", num_draws), precision="64-true").fit(
            net, loader()
        )
        masks.append(net.masks)
    assert all(map(torch.equal, *masks))
    assert not torch.equal(masks[0][0], masks[0][3])  # the same block in both batches of the step


def test_custom_loops_reject_events() -> None:
    net = Net()
    with pytest.raises(PlanError, match="Use 'stream', or use a Trainer"):
        roomier.prepare(net, net.configure_optimizers(), plan=roomier.Plan.of({"batch": {"seeding": "events"}}))
