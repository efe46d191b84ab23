"""Adapters with each strategy on two ranks, compared with one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from roomier.core.ranks import Ranks
from roomier.core.world import World
from roomier.engine.build import build
from roomier.engine.eager import EagerEngine
from roomier.engine.optimizers import configure
from roomier.engine.weights_file import WeightsFile
from roomier.plan import plan_from_flags
from roomier.techniques.adapters.layers import InFewBits, is_adapter
from roomier.techniques.adapters.lora import adapter_state
from tests.adapters.models import Adaptable, make_gpt, token_batches
from tests.covering import few
from tests.ranks.pool import RankPool

transformers.PreTrainedModel  # noqa: B018 - imports the code of models once, instead of in each rank

SLOW = pytest.mark.slow
SETTINGS = {"rank": 4, "alpha": 8}
# In bf16, each half of a batch is rounded separately.
TOLERANCE = {"32-true": {"rtol": 1e-4, "atol": 1e-6}, "bf16-mixed": {"rtol": 0.1, "atol": 4e-3}}


class OnMeta(Adaptable):
    def __init__(self, kind: str) -> None:
        with torch.device("meta"):
            super().__init__(kind)


def ranks_here() -> Ranks:
    if not dist.is_initialized():
        return Ranks()
    return Ranks(World(dist.get_rank(), dist.get_world_size(), dist.get_rank(), 0, dist.get_world_size()))


def trained(
    strategy: str,
    kind: str = "gpt",
    precision: str = "32-true",
    base: str = "as_is",
    weights: str | None = None,
    accumulate: int = 1,
    half: bool = False,
) -> dict[str, Tensor]:
    """Return the full state of the model in host memory after three steps."""
    ranks = ranks_here() if strategy != "single" else Ranks()
    name = {"name": "hsdp", "shard_size": 1} if strategy == "hsdp" else strategy
    plan = plan_from_flags(
        strategy=name,
        accelerator="cpu",
        devices=ranks.world.size,
        precision=precision,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.5,
        optimizer={"name": "adamw", "lr": 1e-2, "eps": 1e-3},
        lora={**SETTINGS, "base": base},
    )
    module = Adaptable(kind) if weights is None else OnMeta(kind)
    if half:
        module.bfloat16()
    torch.manual_seed(3)
    file = None if weights is None else WeightsFile(weights)
    engine, _ = build(
        plan, module, lambda blocks: configure(plan, module, lambda: 1.0, blocks), EagerEngine, ranks, file
    )
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    size, rank = ranks.world.size, ranks.world.rank
    for batch in token_batches(3, batch_size=8):
        parts = [{name: each.chunk(2 * accumulate)[n] for name, each in batch.items()} for n in range(2 * accumulate)]
        engine.forward_backward(lambda batch, _: module.training_step(batch), parts[rank::size])
        engine.clip()
        engine.step()
    assert all(each.grad is None for name, each in module.named_parameters() if not is_adapter(name))
    assert any(isinstance(each, InFewBits) for each in module.modules()) == (base != "as_is")
    return {name: _whole(each).clone() for name, each in engine.weights().items()}


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def single(**settings: Any) -> dict[str, Tensor]:
    """Train in one process with the batches of the ranks as micro-batches."""
    return trained("single", **settings)


def check(on_ranks: RankPool, strategy: str, **settings: Any) -> None:
    expected = single(**settings)
    tolerance = TOLERANCE[settings.get("precision", "32-true")]
    for found in on_ranks(2, trained, strategy, **settings):
        assert found.keys() == expected.keys()
        for name, each in expected.items():
            if is_adapter(name):
                torch.testing.assert_close(found[name], each, **tolerance)
            else:
                assert torch.equal(found[name], each), name
    assert max(float(each.abs().max()) for name, each in expected.items() if name.endswith("lora_B")) > 0.01


@pytest.mark.parametrize(
    ("strategy", "precision"),
    few([*((each, "32-true") for each in ("zero3", "ddp", "zero1", "zero2", "hsdp")), ("zero2", "bf16-mixed")]),
)
def test_two_ranks_train_the_same_adapters_as_one_process(on_ranks: RankPool, strategy: str, precision: str) -> None:
    check(on_ranks, strategy, precision=precision)


@pytest.mark.more
@pytest.mark.parametrize("kind", ["gpt2", pytest.param("llama", marks=SLOW), pytest.param("bert", marks=SLOW)])
def test_models_of_transformers(on_ranks: RankPool, kind: str) -> None:
    check(on_ranks, "zero3", kind=kind)


@pytest.mark.more
@pytest.mark.parametrize("strategy", ["zero1", pytest.param("ddp", marks=SLOW), pytest.param("zero2", marks=SLOW)])
def test_with_accumulated_gradients(on_ranks: RankPool, strategy: str) -> None:
    check(on_ranks, strategy, accumulate=2)


@pytest.mark.parametrize("base", [pytest.param("int8", marks=SLOW), "nf4"])
def test_quantized_frozen_weights_with_ddp(on_ranks: RankPool, base: str) -> None:
    check(on_ranks, "ddp", base=base)


@pytest.mark.more
def test_float32_adapters_with_sharded_16_bit_weights(on_ranks: RankPool) -> None:
    check(on_ranks, "zero3", half=True, precision="bf16-mixed")


@pytest.mark.more
@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_a_model_on_meta_with_the_weights_of_a_file(on_ranks: RankPool, strategy: str, tmp_path: Path) -> None:
    plain = make_gpt()
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    check(on_ranks, strategy, weights=str(tmp_path / "model.safetensors"))


def trained_compressed(optimizer: str, compression: str) -> tuple[bool, bool]:
    """Return two values: True if the ranks have the same adapters after training, and True if the adapters changed."""
    ranks = ranks_here()
    plan = plan_from_flags(
        strategy={"name": "ddp", "gradient_compression": compression},
        accelerator="cpu",
        devices=2,
        optimizer={"name": optimizer, "lr": 1e-2},
        lora=SETTINGS,
    )
    module = Adaptable()
    engine, _ = build(plan, module, lambda blocks: configure(plan, module, lambda: 4.0, blocks), EagerEngine, ranks)
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    for batch in token_batches(4, batch_size=8):
        engine.forward_backward(
            lambda batch, _: module.training_step(batch),
            [{name: each.chunk(2)[ranks.world.rank] for name, each in batch.items()}],
        )
        engine.step()
    state = adapter_state(module)
    of_zero = ranks.from_zero(state)
    same = all(torch.equal(each, of_zero[name]) for name, each in state.items())
    return same, all(bool(each.any()) for name, each in state.items() if name.endswith("lora_B"))


@pytest.mark.more
@pytest.mark.parametrize(("optimizer", "compression"), [("adamw", "powersgd"), ("onebit_adam", "none")])
def test_with_compressed_gradients(on_ranks: RankPool, optimizer: str, compression: str) -> None:
    assert on_ranks(2, trained_compressed, optimizer, compression) == [(True, True)] * 2
