"""The error about an unsupported request names a change, and the changed request runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roomier
from roomier.core.errors import RoomierError
from roomier.models.gpt import GPT, GPTConfig

pytestmark = pytest.mark.more

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_steps": 2,
}


class Language(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = GPT(GPTConfig(vocab_size=64, context=16, num_heads=2, num_layers=2, width=32, dropout=0.0))
        self.losses: list[Tensor] = []

    def training_step(self, batch: Tensor) -> Tensor:
        loss = self.network(batch[:, :-1], batch[:, 1:])[1]
        self.losses.append(loss.detach())
        return loss


class Plain(roomier.Module):
    """No blocks. Module whose last layer is not a plain linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.head = nn.Bilinear(8, 8, 64)
        self.losses: list[Tensor] = []

    def training_step(self, batch: Tensor) -> Tensor:
        x = self.embed(batch)
        loss = self.head(x, x).square().mean()
        self.losses.append(loss.detach())
        return loss


def request(**keywords: Any) -> dict[str, Any]:
    return {"accelerator": "cpu", "optimizer": "adamw", **keywords}


def on_two(**keywords: Any) -> dict[str, Any]:
    return request(**{"devices": 2, **keywords})


# name -> model, request, the changes that the error suggests, as keywords (None removes a keyword)
IMPOSSIBLE: dict[str, tuple[type[roomier.Module], dict[str, Any], dict[str, Any]]] = {
    "several devices for one process": (Language, on_two(strategy="single"), {"strategy": "ddp"}),
    "groups that do not divide the ranks": (
        Language,
        on_two(strategy={"name": "hsdp", "shard_size": 3}),
        {"strategy": {"name": "hsdp", "shard_size": 2}},
    ),
    "groups of a strategy without groups": (
        Language,
        on_two(strategy={"name": "zero3", "shard_size": 2}),
        {"strategy": {"name": "hsdp", "shard_size": 2}},
    ),
    "a strategy that is not built": (Language, on_two(strategy="tensor_parallel"), {"strategy": "zero3"}),
    "a misspelled strategy": (Language, on_two(strategy="zero_3"), {"strategy": "zero3"}),
    "a misspelled optimizer": (Language, request(optimizer="adamW8bits"), {"optimizer": "adamw8bit"}),
    "speculation with a loss scale": (
        Language,
        request(precision="16-mixed", offload={"optimizer_states": "disk", "update": "speculative"}),
        {"offload": {"optimizer_states": "disk", "update": "deferred"}},
    ),
    "updates in the backward with offloaded states": (
        Language,
        request(step_in_backward=True, offload="disk"),
        {"step_in_backward": False, "offload": {"optimizer_states": "disk", "update": "speculative"}},
    ),
    "offloaded parameters that are not sharded": (
        Language,
        on_two(strategy="zero2", offload={"parameters": "disk"}),
        {"strategy": "zero3"},
    ),
    "compression with sharding": (
        Language,
        on_two(strategy={"name": "zero3", "gradient_compression": "powersgd"}),
        {"strategy": {"name": "ddp", "gradient_compression": "powersgd"}},
    ),
    "1-bit Adam with sharding": (Language, on_two(strategy="zero3", optimizer="onebit_adam"), {"strategy": "ddp"}),
    "zero3 on mps": (Language, on_two(strategy="zero3", accelerator="mps"), {"accelerator": "cpu"}),
    "quantized weights with sharding": (
        Language,
        on_two(strategy="zero3", lora={"rank": 2, "base": "nf4"}),
        {"strategy": "ddp"},
    ),
    "updates in the backward with offloaded parameters": (
        Language,
        request(step_in_backward=True, offload={"parameters": "disk"}),
        {"step_in_backward": False},
    ),
    "updates in the backward with unused parameters": (
        Language,
        on_two(strategy={"name": "zero2", "find_unused_parameters": True}, step_in_backward=True),
        {"step_in_backward": False},
    ),
    "speculation with unused parameters": (
        Language,
        on_two(
            strategy={"name": "zero2", "find_unused_parameters": True},
            offload={"optimizer_states": "disk", "update": "speculative"},
        ),
        {"offload": {"optimizer_states": "disk", "update": "plain"}},
    ),
    "buckets with updates in the backward": (
        Language,
        on_two(strategy="ddp", step_in_backward=True),
        {"strategy": "zero2"},
    ),
    "accumulation with updates in the backward": (
        Language,
        request(step_in_backward=True, accumulate_grad_batches=2),
        {"accumulate_grad_batches": None, "activation_checkpointing": "full"},
    ),
    "a loss scale with updates in the backward": (
        Language,
        request(step_in_backward=True, precision="16-mixed"),
        {"precision": "bf16-mixed"},
    ),
    "a stale norm without clipping": (
        Language,
        request(step_in_backward="stale_norm"),
        {"step_in_backward": "exact"},
    ),
    "quantized states with float64": (
        Language,
        request(optimizer="adamw8bit", precision="64-true"),
        {"precision": "32-true"},
    ),
    "float16 weights": (Language, request(precision="16-true"), {"precision": "16-mixed"}),
    "a kernel of another device": (Language, request(attention="cudnn"), {"attention": "math"}),
    "a kernel that the build rejects": (
        Language,
        {"optimizer": "adamw", "attention": "cudnn"},
        {"attention": "auto"},
    ),
    "two backwards of compiled blocks": (
        Language,
        request(step_in_backward=True, compile=True, gradient_clip_val=1.0),
        {"compile": False},
    ),
    "a budget for compiled blocks": (
        Language,
        request(activation_checkpointing=0.5, compile=True),
        {"compile": False},
    ),
    "a budget without effect": (
        Language,
        request(activation_checkpointing=0.5, offload={"activations": "cpu"}),
        {"offload": None},
    ),
    "more blocks than exist": (
        Language,
        request(activation_checkpointing={"policy": "every_n", "every_n": 5}),
        {"activation_checkpointing": "full"},
    ),
    "chunked logits without a linear output layer": (Plain, request(chunked_loss=True), {"chunked_loss": False}),
}
ON_RANKS = ("several devices for one process", "1-bit Adam with sharding", "quantized weights with sharding")  # in CI
SLOW = {
    name
    for name, (_, asked, changes) in IMPOSSIBLE.items()
    if "compile" in changes or (asked.get("devices") == 2 and name not in ON_RANKS)
}


def run(model: type[roomier.Module], keywords: dict[str, Any], root: Path) -> list[float]:
    """Return the losses of two steps."""
    module = model()
    batches = [torch.arange(34).view(2, 17) + number for number in range(8)]
    roomier.Trainer(**QUIET, default_root_dir=root, **keywords).fit(module, batches)
    return torch.stack(module.losses).tolist()  # type: ignore[arg-type]  # both models have them


def advised(keyword: str, asked: Any, value: Any) -> str:
    """Return the text that the advice contains if it suggests ``value`` for ``keyword``."""
    if isinstance(value, dict):
        earlier = asked if isinstance(asked, dict) else {}
        return str([each for key, each in value.items() if earlier.get(key) != each][-1])
    return keyword if value is None else str(value)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.slow] if each in SLOW else []) for each in IMPOSSIBLE]
)
def test_the_change_that_an_error_suggests_runs(name: str, on_ranks: Any, tmp_path: Path) -> None:
    model, asked, changes = IMPOSSIBLE[name]
    with pytest.raises(RoomierError) as caught:
        run(model, asked, tmp_path)
    for keyword, value in changes.items():
        assert advised(keyword, asked.get(keyword), value) in caught.value.action
    changed = {keyword: value for keyword, value in {**asked, **changes}.items() if value is not None}
    num_ranks = changed.get("devices", 1)
    arguments = (run, model, changed, tmp_path)
    [losses, *_] = on_ranks(num_ranks, *arguments) if num_ranks > 1 else [run(model, changed, tmp_path)]
    assert len(losses) == 2 * changed.get("accumulate_grad_batches", 1)
    assert all(map(torch.isfinite, torch.tensor(losses)))
