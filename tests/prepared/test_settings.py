"""Under each setting of the Plan that they accept, custom loops compute the same weights as a loop in plain torch."""

from __future__ import annotations

import functools
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import roomier
from roomier.core.sharded import is_sharded
from tests.covering import few
from tests.prepared.scripts import largest_difference
from tests.ranks.pool import RankPool

NUM_STEPS, NUM_SEQUENCES, LENGTH, VOCABULARY, WIDTH = 3, 4, 6, 24, 16
FOLDER = tempfile.gettempdir()

SETTINGS: dict[str, dict[str, Any]] = {
    "compile": {"compile": {"enabled": True, "backend": "aot_eager"}},
    "chunked_loss": {"loss": {"chunked": True, "chunk_tokens": 5}},
    "bf16-true": {"precision": {"mode": "bf16-true"}},
    "full": {"activation": {"policy": "full"}},
    "every_n": {"activation": {"policy": "every_n"}},
    "selective": {"activation": {"policy": "selective"}},
    "states on disk": {"offload": {"optimizer_states": "disk", "folder": FOLDER}},
    "activations on disk": {"offload": {"activations": "disk", "folder": FOLDER}},
    "all": {
        "compile": {"enabled": True, "backend": "aot_eager"},
        "loss": {"chunked": True},
        "activation": {"policy": "full"},
        "offload": {"optimizer_states": "disk", "folder": FOLDER},
    },
}
ONLY_IN_ONE_CALL = {
    "parameters on disk": {"offload": {"parameters": "disk", "folder": FOLDER}},
    "budget": {"activation": {"policy": "budget", "budget_fraction": 0.5}},
    "step_in_backward": {"optimizer": {"step_in_backward": "exact"}},
}
"""Settings of ``roomier.prepare`` that an Accelerator rejects."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Language(nn.Module):
    """Language model whose loss the loop computes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.embedding(tokens)))
        return logits


def begun() -> tuple[Language, torch.optim.Optimizer, list[Tensor]]:
    """Return a model, its optimizer and the tokens of each step."""
    torch.manual_seed(1)
    model = Language()
    tokens = torch.randint(VOCABULARY, (NUM_STEPS, NUM_SEQUENCES, LENGTH + 1))
    # With this eps, Adam does not amplify the rounding of gradients that are almost zero.
    return model, torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3), list(tokens)


def loss_of(model: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.view(-1, VOCABULARY), tokens[:, 1:].flatten())


@functools.cache
def in_plain_torch(dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the weights after training on all sequences in one process."""
    model, optimizer, data = begun()
    model.to(dtype)
    for tokens in data:
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    full = {name: each.full_tensor() if is_sharded(each) else each for name, each in model.state_dict().items()}
    return {name: each.detach().float() for name, each in full.items()}


def plan_of(setting: dict[str, Any], strategy: str, num_ranks: int) -> roomier.Plan:
    parallel: dict[str, Any] = {"strategy": strategy, "devices": num_ranks, "accelerator": "cpu"}
    if strategy == "hsdp":
        parallel["shard_size"] = num_ranks // 2
    sections = {name: dict(section) for name, section in setting.items()}
    return roomier.Plan.of({"parallel": parallel, **sections})


def with_accelerator(plan: roomier.Plan) -> dict[str, Tensor]:
    model, optimizer, data = begun()
    accelerator = roomier.Accelerator(plan=plan)
    model, optimizer = accelerator.prepare(model, optimizer)
    for tokens in data:
        own = tokens[accelerator.process_index :: accelerator.num_processes]
        accelerator.backward(loss_of(model, own))
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        logits = accelerator.gather_for_metrics(model(own[:, :-1]))
    assert logits.shape == (NUM_SEQUENCES, LENGTH, VOCABULARY)
    assert bool(logits.isfinite().all())
    return weights_of(accelerator.unwrap_model(model))


def with_engine(plan: roomier.Plan) -> dict[str, Tensor]:
    model, optimizer, data = begun()
    engine = roomier.prepare(model, optimizer, plan=plan)
    world = engine.ranks.world
    for tokens in data:
        engine.forward_backward(lambda own: loss_of(model, own), [tokens[world.rank :: world.size]])
        engine.step()
    engine.settle()
    return weights_of(model)


LOOPS = {"Accelerator": with_accelerator, "prepare": with_engine}


def difference(loop: str, setting: dict[str, Any], strategy: str, num_ranks: int) -> float:
    """Return the difference from plain torch, relative to the largest weight."""
    warnings.simplefilter("ignore")  # warnings of the compiler
    found = LOOPS[loop](plan_of(setting, strategy, num_ranks))
    dtype = torch.bfloat16 if "precision" in setting else torch.float32
    return largest_difference(found, in_plain_torch(dtype))


def bound_of(name: str, num_ranks: int) -> float:
    """Return the upper bound for the difference.

    One process computes the same operations, except for compiled code and chunks of a loss. In 3 steps of AdamW, an
    error of a few eps in the gradients causes relative errors of the weights below 1e-5 in float32, and below 0.05 in
    bfloat16.
    """
    if num_ranks == 1 and name not in ("compile", "chunked_loss", "all"):
        return 0.0
    return 0.05 if name == "bf16-true" else 1e-5


def settings_of(loop: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield from SETTINGS.items()
    if loop == "prepare":
        yield from ONLY_IN_ONE_CALL.items()


@pytest.mark.parametrize(
    ("loop", "name", "setting"), few([(loop, name, each) for loop in LOOPS for name, each in settings_of(loop)], 12)
)
def test_one_process(loop: str, name: str, setting: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    assert difference(loop, setting, "single", 1) <= bound_of(name, 1)
    assert "no memory is saved" not in capfd.readouterr().err


def check_ranks(on_ranks: RankPool, strategy: str, num_ranks: int, names: Iterable[str]) -> None:
    rows = [(loop, name) for loop in LOOPS for name in names]
    calls = [(loop, SETTINGS[name], strategy, num_ranks) for loop, name in rows]
    for (loop, name), by_rank in zip(rows, on_ranks.each(num_ranks, difference, calls), strict=True):
        assert max(by_rank) <= bound_of(name, num_ranks), (loop, name)


@pytest.mark.more
@pytest.mark.parametrize(
    ("strategy", "num_ranks", "names"),
    [
        ("ddp", 2, ["chunked_loss", "all"]),
        ("zero3", 2, ["bf16-true", "chunked_loss", "activations on disk"]),
        ("hsdp", 4, ["chunked_loss", "full"]),
    ],
    ids=["ddp", "zero3", "hsdp"],
)
def test_several_ranks(on_ranks: RankPool, strategy: str, num_ranks: int, names: list[str]) -> None:
    check_ranks(on_ranks, strategy, num_ranks, names)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "num_ranks"), [("ddp", 2), ("zero1", 2), ("zero3", 2), ("hsdp", 4)])
def test_each_setting_on_several_ranks(on_ranks: RankPool, strategy: str, num_ranks: int) -> None:
    check_ranks(on_ranks, strategy, num_ranks, SETTINGS)


def test_a_loss_that_is_not_chunked_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer, data = begun()
    accelerator = roomier.Accelerator(plan=plan_of(SETTINGS["chunked_loss"], "single", 1))
    model, optimizer = accelerator.prepare(model, optimizer)
    for tokens in data:
        accelerator.backward(model(tokens[:, :-1]).log_softmax(-1).square().mean())
        optimizer.step()
    assert capsys.readouterr().err.count("no memory is saved") == 1


REJECTED = [
    ({"parallel": {"strategy": "auto"}}, "strategy='auto'.*'single'.*trainer.plan"),
    ({"parallel": {"strategy": "auto", "devices": 2}}, "strategy='auto'.*'zero3'"),
    (ONLY_IN_ONE_CALL["parameters on disk"], "offload.parameters='disk'.*'optimizer_states': 'disk'"),
    (ONLY_IN_ONE_CALL["budget"], "activation.policy='budget'.*'selective'"),
    (
        {"parallel": {"strategy": "ddp", "devices": 2, "find_unused_parameters": True}, "loss": {"chunked": True}},
        r"find_unused_parameters=True.*Remove chunked_loss.*engine\.forward_backward",
    ),
    (ONLY_IN_ONE_CALL["step_in_backward"], r"step_in_backward=True.*engine\.forward_backward"),
]


@pytest.mark.parametrize(
    ("sections", "message"), REJECTED, ids=lambda each: "-".join(each) if type(each) is dict else ""
)
def test_a_plan_that_a_loop_cannot_run_is_rejected(sections: dict[str, Any], message: str) -> None:
    plan = {name: dict(section) for name, section in sections.items()}
    plan.setdefault("parallel", {})["accelerator"] = "cpu"
    with pytest.raises(roomier.PlanError, match=f"(?s){message}"):
        roomier.Accelerator(plan=plan)
    if plan["parallel"].get("strategy") == "auto":
        with pytest.raises(roomier.PlanError, match=f"(?s){message}"):
            roomier.prepare(*begun()[:2], plan=plan)


def test_a_memory_budget_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    plan = {"parallel": {"accelerator": "cpu"}, "choice": {"memory_budget_bytes": 2**30}}
    roomier.Accelerator(plan=plan).prepare(Language())
    assert "memory_budget: the memory of a custom loop is not forecast" in capsys.readouterr().err
