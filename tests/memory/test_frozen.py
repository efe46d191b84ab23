"""Predicted and measured model states of frozen and adapted models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from roomier.core.ranks import Ranks
from roomier.core.world import World
from roomier.engine.build import build
from roomier.engine.eager import EagerEngine
from roomier.engine.optimizers import configure
from roomier.models.gpt import GPT, GPTConfig
from roomier.plan import Plan, plan_from_flags
from roomier.planner.memory.kinds import MODEL_STATES, Kind
from roomier.planner.memory.predict import predict, predict_built
from roomier.planner.memory.tracker import MemoryTracker, tracking
from roomier.techniques.adapters.layers import is_adapter
from tests.adapters.models import VOCABULARY, Adaptable
from tests.covering import few
from tests.ranks.pool import RankPool

TOLERANCE = 0.03
TOKENS = 16


class Model(Adaptable):
    """Model with 101 rows, a prime number. The embeddings and the first ``num_frozen_blocks`` blocks are frozen."""

    def __init__(self, num_frozen_blocks: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net: GPT = GPT(GPTConfig(101, context=TOKENS, num_layers=4, num_heads=2, width=32, dropout=0.0))
        if num_frozen_blocks:
            for part in (self.net.tokens, self.net.positions, *self.net.blocks[:num_frozen_blocks]):
                part.requires_grad_(False)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int = 0) -> Tensor:
        loss: Tensor = self.net(batch["input_ids"], batch["labels"])[1]
        return loss


def make_plan(strategy: str, num_ranks: int, precision: str = "32-true", base: str | None = None) -> Plan:
    lora = None if base is None else {"rank": 4, "base": base}
    return plan_from_flags(
        strategy=strategy, accelerator="cpu", devices=num_ranks, precision=precision, optimizer="adamw", lora=lora
    )


def tracked(plan: Plan, module: Model, ranks: Ranks) -> tuple[EagerEngine, MemoryTracker]:
    engine, _ = build(plan, module, lambda blocks: configure(plan, module, lambda: 1.0, blocks), EagerEngine, ranks)
    tokens = torch.randint(VOCABULARY, (1, TOKENS))
    batch = {"input_ids": tokens, "labels": tokens}

    def step() -> None:
        engine.forward_backward(lambda batch, _: module.training_step(batch), [batch])
        engine.step()

    step()
    step()
    with tracking(engine) as tracker:
        step()
        tracker.restart()
        tracker.enter("forward")
        step()
    return engine, tracker


def found(strategy: str, precision: str, base: str | None, num_frozen_blocks: int = 0) -> dict[str, Any]:
    ranks = Ranks()
    if strategy != "single":
        ranks = Ranks(World(dist.get_rank(), dist.get_world_size(), dist.get_rank(), 0, dist.get_world_size()))
    plan, module = make_plan(strategy, ranks.world.size, precision, base), Model(num_frozen_blocks)
    before = predict(module, plan, rank=ranks.world.rank)
    engine, tracker = tracked(plan, module, ranks)
    engine.settle()
    return {
        "measured": tracker.now().num_bytes,
        "formula": before.between_steps.num_bytes,
        "measured_peak": tracker.peak(MODEL_STATES).total(MODEL_STATES),
        "formula_peak": before.peak.total(),
        "is_the_same_when_built": before == predict_built(engine, plan, ranks.world.rank),
    }


def check(case: dict[str, Any], call: tuple[Any, ...]) -> None:
    for kind in MODEL_STATES:
        assert case["measured"][kind] == pytest.approx(case["formula"][kind], rel=TOLERANCE), (call, kind)
    assert case["measured_peak"] == pytest.approx(case["formula_peak"], rel=TOLERANCE), call
    assert case["is_the_same_when_built"], call


@pytest.mark.parametrize("base", ["as_is", "int8", "nf4"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_adapters_on_one_rank(base: str, precision: str) -> None:
    check(found("single", precision, base), ("single", precision, base))


@pytest.mark.more
@pytest.mark.parametrize(
    "calls",
    few(
        [
            [("zero3", "bf16-mixed", "as_is"), ("zero2", "32-true", None, 2)],
            [
                ("zero2", "32-true", "as_is"),
                ("zero3", "32-true", "as_is"),
                ("ddp", "32-true", "nf4"),
                ("zero3", "32-true", None, 2),
            ],
        ]
    ),
)
def test_adapters_and_frozen_blocks_on_two_ranks(on_ranks: RankPool, calls: list[tuple[Any, ...]]) -> None:
    for call, cases in zip(calls, on_ranks.each(2, found, calls), strict=True):
        for case in cases:
            check(case, call)


def test_frozen_parameter_has_only_its_weight() -> None:
    module = Model()
    states = {base: predict(module, make_plan("single", 1, base=base)) for base in (None, "as_is", "int8", "nf4")}
    num_all = sum(each.numel() for each in module.parameters())
    in_blocks = [each for name, each in module.named_parameters() if "blocks" in name]
    num_coded = sum(each.numel() for each in in_blocks if each.dim() == 2)
    num_adapters = 4 * 4 * (32 + 96 + 32 + 32 + 32 + 128 + 128 + 32)
    assert states[None].peak.total() >= 16 * num_all
    kinds = states["as_is"].peak.num_bytes
    assert kinds[Kind.PARAMETER] == 4 * (num_all + num_adapters)
    assert kinds[Kind.GRADIENT] == 4 * num_adapters
    assert kinds[Kind.OPTIMIZER_STATE] == 8 * num_adapters + 4 * 2 * 16
    for base, num_bytes in (("int8", 1.0625), ("nf4", 0.5625)):
        saved = kinds[Kind.PARAMETER] - states[base].peak.num_bytes[Kind.PARAMETER]
        assert saved == (4 - num_bytes) * num_coded


def test_measured_peak_decreases_with_fewer_bits() -> None:
    peaks = {}
    for base in (None, "as_is", "int8", "nf4"):
        module = Model()
        module.net = GPT(GPTConfig(101, context=TOKENS, num_layers=4, num_heads=2, width=128, dropout=0.0))
        _, tracker = tracked(make_plan("single", 1, base=base), module, Ranks())
        peaks[base] = tracker.peak().total()
    assert peaks["as_is"] < 0.45 * peaks[None]
    assert peaks["int8"] < 0.75 * peaks["as_is"]
    assert peaks["nf4"] < 0.75 * peaks["as_is"]


def test_frozen_first_blocks_save_no_activations() -> None:
    def kept(num_frozen_blocks: int) -> int:
        module = Model(num_frozen_blocks)
        num_bytes: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            if not any(tensor is each for each in module.parameters()):
                num_bytes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        tokens = torch.randint(VOCABULARY, (4, TOKENS))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
            loss = module.training_step({"input_ids": tokens, "labels": tokens})
        loss.backward()
        assert all((each.grad is None) != each.requires_grad for each in module.parameters())
        return sum(num_bytes.values())

    assert kept(4) < kept(2) < kept(0)
    assert kept(2) < 0.7 * kept(0)


@pytest.mark.more
def test_only_adapters_have_states(on_ranks: RankPool) -> None:
    plan, module = make_plan("single", 1, base="as_is"), Model()
    engine, _ = tracked(plan, module, Ranks())
    names = {parameter: name for name, parameter in module.named_parameters()}
    assert all(is_adapter(names[each]) for each in engine.optimizers[0].state)
