"""1-bit Adam in training: a comparison with AdamW, runs with the engine and the Trainer, and rejected inputs."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import roomier
from roomier.core.errors import PlanError, TrainingError
from roomier.core.ranks import Ranks
from roomier.core.world import World
from roomier.engine.build import build
from roomier.engine.eager import EagerEngine
from roomier.engine.optimizers import configure
from roomier.models.gpt import GPT, GPTConfig
from roomier.plan import Plan, plan_from_flags
from roomier.plan.choices import Kind, choice_of
from roomier.techniques.optim.onebit_adam import OneBitAdam, onebit_options
from tests.covering import covering, few
from tests.parallel.parity import OPTIMIZERS, Setup, batches_of, train_bare, whole_weights
from tests.parallel.tasks import Language
from tests.ranks.pool import RankPool

CONTEXT, VOCABULARY = 24, 64


@cache
def successors() -> Tensor:
    """Return the ``[VOCABULARY, 4]`` successors of each token."""
    generator, frequency = torch.Generator().manual_seed(99), 1 / torch.arange(1, VOCABULARY + 1)
    return torch.stack([torch.multinomial(frequency, 4, generator=generator) for _ in range(VOCABULARY)])


def sentences(num: int, seed: int) -> Tensor:
    """Return ``[num, CONTEXT + 1]`` tokens. Each token is one of four successors of the previous token, or random."""
    draws, followers = torch.Generator().manual_seed(seed), successors()
    frequency = 1 / torch.arange(1, VOCABULARY + 1)
    tokens = [torch.multinomial(frequency, num, replacement=True, generator=draws)]
    for _ in range(CONTEXT):
        follower = followers[tokens[-1], torch.randint(4, (num,), generator=draws)]
        anything = torch.multinomial(frequency, num, replacement=True, generator=draws)
        tokens.append(torch.where(torch.rand(num, generator=draws) < 0.1, anything, follower))
    return torch.stack(tokens, 1)


class Speaker(roomier.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = GPTConfig(vocab_size=VOCABULARY, context=CONTEXT, num_layers=2, num_heads=2, width=width, dropout=0.0)
        self.network = GPT(config)

    def training_step(self, tokens: Tensor) -> Tensor:
        logits = self.network(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def engine_of(module: roomier.Module, plan: Plan, num_steps: int) -> tuple[EagerEngine, Any, Ranks]:
    ranks = Ranks(World(dist.get_rank(), dist.get_world_size(), dist.get_rank(), 0, dist.get_world_size()))
    engine, configured = build(
        plan, module, lambda blocks: configure(plan, module, lambda: num_steps, blocks), EagerEngine, ranks
    )
    return engine, configured.schedulers[0].scheduler if configured.schedulers else None, ranks


def learn(strategy: str, optimizer: dict[str, Any], num_steps: int, width: int, precision: str) -> list[float]:
    """Return the loss of each step on the global batch of 8 sentences."""
    plan = plan_from_flags(
        strategy=strategy,
        accelerator="cpu",
        devices=dist.get_world_size(),
        precision=precision,
        optimizer={"lr": 3e-3, **optimizer},
        lr_schedule={"name": "cosine", "warmup_steps": 20, "min_lr_ratio": 0.1},
    )
    module = Speaker(width)
    engine, schedule, ranks = engine_of(module, plan, num_steps)
    losses = []
    for step in range(num_steps):
        loss = engine.forward_backward(
            lambda batch, _: module.training_step(batch),
            [sentences(8, seed=step)[ranks.world.rank :: ranks.world.size]],
        )
        assert loss is not None
        engine.step()
        schedule.step()
        losses.append(ranks.sum(loss).item())
    return losses


def last(losses: list[float]) -> float:
    return sum(losses[-20:]) / 20


@pytest.mark.parametrize(("strategy", "precision"), few([("ddp", "32-true"), ("zero1", "bf16-mixed")]))
def test_a_gpt_learns_as_with_adamw(on_ranks: RankPool, strategy: str, precision: str) -> None:
    plain = ("ddp", {"name": "adamw"}, 80, 32, precision)
    frozen = (strategy, {"name": "onebit_adam", "freeze_step": 40}, 80, 32, precision)
    [adamw, *_], [onebit, *_] = on_ranks.each(2, learn, [plain, frozen])
    # Until the second moment is frozen, both optimizers compute the same losses. bf16 amplifies differences in the
    # order of sums.
    assert onebit[:40] == pytest.approx(adamw[:40], rel=1e-4 if precision == "32-true" else 0.02)
    assert onebit[41:] != pytest.approx(adamw[41:], rel=1e-6)
    assert last(adamw) < 0.8 * adamw[0]
    assert last(onebit) == pytest.approx(last(adamw), rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_a_gpt_learns_as_with_adamw_in_a_longer_run(on_ranks: RankPool, num_ranks: int, strategy: str) -> None:
    adamw = on_ranks(num_ranks, learn, "ddp", {"name": "adamw"}, 400, 64, "32-true", timeout_s=280)[0]
    onebit = {"name": "onebit_adam", "freeze_step": 80}
    losses = on_ranks(num_ranks, learn, strategy, onebit, 400, 64, "32-true", timeout_s=280)[0]
    assert last(losses) == pytest.approx(last(adamw), rel=0.02)


# ---- gradients ---------------------------------------------------------------------------------------------------


def train_in_full_precision(setup: Setup, strategy: str) -> dict[str, Tensor]:
    task = Language()
    plan = plan_from_flags(
        strategy=strategy,
        accelerator="cpu",
        devices=setup.num_ranks,
        accumulate_grad_batches=setup.accumulate,
        optimizer={**OPTIMIZERS["adamw"], "name": "onebit_adam", "freeze_step": 1000},
    )
    engine, _, ranks = engine_of(task, plan, 2000)
    for parts_of_ranks in batches_of(task, setup):
        engine.forward_backward(lambda batch, _: task.training_step(batch), parts_of_ranks[ranks.world.rank])
        engine.step()
    return whole_weights(task)


@pytest.mark.more
@pytest.mark.parametrize(
    ("window", "strategy"), covering([(1, "all"), (2, "some"), (2, "none on one")], ["ddp", "zero1"])
)
def test_the_averaged_gradient_equals_the_gradient_of_the_global_batch(
    on_ranks: RankPool, window: tuple[int, str], strategy: str
) -> None:
    accumulate, terms = window
    setup = Setup(strategy="ddp", accumulate=accumulate, terms=terms, optimizer="adamw", num_steps=12)
    bare = train_bare(Language, setup)
    for weights in on_ranks(2, train_in_full_precision, setup, strategy):
        for name, weight in bare.weights.items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-5)


def begin_apart() -> list[float]:
    """Train ranks with different initial weights. Return the first loss and the running mean of each rank."""
    module = Normed(dist.get_rank())
    plan = plan_from_flags(strategy="ddp", accelerator="cpu", devices=2, optimizer="onebit_adam")
    engine, _, ranks = engine_of(module, plan, 20)
    for step in range(6):
        generator = torch.Generator().manual_seed(2 * step + ranks.world.rank)
        engine.forward_backward(lambda batch, _: module.training_step(batch), [torch.randn(8, 4, generator=generator)])
        engine.step()
    return [each.double().sum().item() for each in module.network.state_dict().values()]


class Normed(roomier.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.network = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1))

    def training_step(self, x: Tensor) -> Tensor:
        loss: Tensor = self.network(x).square().mean()
        return loss


@pytest.mark.more
def test_ranks_start_and_stay_equal(on_ranks: RankPool) -> None:
    first, second = on_ranks(2, begin_apart)
    assert first == second


# ---- through the Trainer -----------------------------------------------------------------------------------------


class Sentences(Dataset[Tensor]):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Tensor:
        return sentences(1, seed=index)[0]


def fit(
    folder: Path, strategy: str, num_ranks: int, max_steps: int, ckpt_path: str | None = None
) -> tuple[dict[str, Tensor], int]:
    module = Speaker()
    trainer = roomier.Trainer(
        strategy=strategy,
        devices=num_ranks,
        accelerator="cpu",
        optimizer={"name": "onebit_adam", "lr": 3e-3, "freeze_step": 6},
        max_steps=max_steps,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(Sentences(), batch_size=2), ckpt_path=ckpt_path)
    if ckpt_path is None:
        trainer.save_checkpoint(folder / f"step{max_steps}")
    optimizer = trainer.optimizers[0]
    assert isinstance(optimizer, OneBitAdam)
    return {name: each.detach().clone() for name, each in module.named_parameters()}, optimizer.bytes_sent


@pytest.mark.more
@pytest.mark.parametrize(("strategy", "stops"), [("ddp", [10]), ("zero1", [4, 10])])
def test_a_resumed_run_equals_an_uninterrupted_run(
    on_ranks: RankPool, tmp_path: Path, strategy: str, stops: list[int]
) -> None:
    [(whole, _), _], *_ = on_ranks.each(2, fit, [(tmp_path, strategy, 2, steps) for steps in (14, *stops)])
    resumed = [(tmp_path, strategy, 2, 14, str(tmp_path / f"step{stop}")) for stop in stops]
    for stop, by_rank in zip(stops, on_ranks.each(2, fit, resumed), strict=True):
        for weights, _ in by_rank:
            for name, weight in whole.items():
                assert torch.equal(weights[name], weight), (stop, name)


@pytest.mark.more
def test_a_run_resumes_with_the_other_strategy_and_other_ranks(on_ranks: RankPool, tmp_path: Path) -> None:
    on_ranks(2, fit, tmp_path, "ddp", 2, 10)
    first, second = on_ranks(2, fit, tmp_path, "zero1", 2, 14, ckpt_path=str(tmp_path / "step10"))
    assert all(torch.equal(weight, second[0][name]) for name, weight in first[0].items())
    assert len(on_ranks(4, fit, tmp_path, "zero1", 4, 14, ckpt_path=str(tmp_path / "step10"))) == 4
    assert len(on_ranks(1, fit, tmp_path, "ddp", 1, 14, ckpt_path=str(tmp_path / "step10"))) == 1


# ---- combinations ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["onebit_adam", "onebitadam", "1bit_adam", "one_bit_adam", "OneBitAdam"])
def test_accepted_spellings(name: str) -> None:
    plan = plan_from_flags(strategy="ddp", optimizer=name)
    assert plan.optimizer.name == "onebit_adam"
    assert choice_of("optimizer.name", "onebit_adam").kind is Kind.APPROXIMATE
    assert "onebit_adam" in plan.table()


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"strategy": "single"}, "strategy.*'single'.*is not supported with.*Use strategy='ddp' or 'zero1'"),
        ({"strategy": "zero2", "devices": 2}, "strategy.*'zero2'"),
        ({"strategy": "zero3", "devices": 2}, "strategy.*'zero3'"),
        ({"strategy": "hsdp", "devices": 2}, "strategy.*'hsdp'"),
        ({"gradient_clip_val": 1.0}, "gradient_clip_val.*no rank has the gradient of the full batch"),
        ({"precision": "16-mixed"}, "precision.*Use precision='bf16-mixed'"),
        ({"strategy": {"name": "ddp", "reduce_dtype": "bf16"}}, "reduce_dtype.*Set reduce_dtype='32'"),
        ({"strategy": {"name": "ddp", "gradient_compression": "powersgd"}}, "gradient_compression.*sends signs"),
    ],
)
def test_unsupported_combinations_are_rejected(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=f"(?s){message}"):
        plan_from_flags(**{"strategy": "ddp", "optimizer": "onebit_adam", **keywords})


def clip_by_hand() -> None:
    module = Speaker()
    plan = plan_from_flags(strategy="ddp", accelerator="cpu", devices=2, optimizer="onebit_adam")
    engine, _, _ = engine_of(module, plan, 20)
    engine.forward_backward(lambda batch, _: module.training_step(batch), [sentences(2, 0)])
    for algorithm in ("norm", "value"):
        with pytest.raises(TrainingError, match="never has the full gradient"):
            engine.clip(1.0, algorithm)


@pytest.mark.more
def test_clipping_in_a_custom_loop_is_rejected(on_ranks: RankPool) -> None:
    on_ranks(2, clip_by_hand)


def test_the_step_at_which_the_variance_is_frozen(capsys: pytest.CaptureFixture[str]) -> None:
    def freeze_step(given: int | None, length: float, warmup: int = 0) -> int:
        options = {} if given is None else {"freeze_step": given}
        return int(onebit_options(options, lambda: length, warmup, cuts=False)["freeze_step"])

    assert freeze_step(None, 1000) == 200
    assert freeze_step(None, 1000, warmup=300) == 300
    assert freeze_step(50, math.inf) == 50
    assert capsys.readouterr().err == ""
    assert freeze_step(1000, 1000) == 1000
    assert "no step is compressed, because the run has 1000 steps, and freeze_step is 1000" in capsys.readouterr().err
    assert freeze_step(50, 1000, warmup=100) == 50
    assert "before the end of the learning rate warm-up" in capsys.readouterr().err
    with pytest.raises(PlanError, match=r"freeze_step.*required if the length of the run is unknown"):
        freeze_step(None, math.inf)


@pytest.mark.parametrize("given", [0, -3, 2.5, True, "many"])
def test_an_invalid_freeze_step_is_rejected(given: Any) -> None:
    with pytest.raises(PlanError, match=r"freeze_step.*must be a positive integer"):
        onebit_options({"freeze_step": given}, lambda: 100, 0, cuts=False)


@pytest.mark.parametrize("cuts", [True, False])
def test_zero1_rounds_the_frozen_variance(cuts: bool) -> None:
    assert onebit_options({"freeze_step": 3}, lambda: 100, 0, cuts=cuts)["rounds_variance"] is cuts
    assert (
        onebit_options({"freeze_step": 3, "rounds_variance": False}, lambda: 9, 0, cuts=cuts)["rounds_variance"]
        is False
    )
