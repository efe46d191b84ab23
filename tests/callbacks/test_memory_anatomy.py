"""Memory of a step by kind: hand-computed sizes, and unchanged training."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from roomier import Module
from roomier.callbacks import Callback, MemoryAnatomy, MemoryForecast
from roomier.core.errors import RoomierError
from roomier.memory import anatomy
from roomier.models.gpt import GPT, GPTConfig
from roomier.trainer import Trainer

Make = Callable[..., Trainer]
TOKENS = torch.arange(64).view(4, 16) % 100
BATCH = {"input_ids": TOKENS, "targets": TOKENS}


class Language(Module):
    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gpt = GPT(GPTConfig(vocab_size=100, context=16, num_layers=2, num_heads=2, width=32, dropout=dropout))

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.gpt(**batch)[1]

    def validation_step(self, batch: dict[str, torch.Tensor]) -> None:
        torch.ones(10**6).sum()  # larger than all tensors of training
        self.log("val_loss", self.gpt(**batch)[1])


@pytest.fixture
def fit(make_trainer: Make) -> Callable[..., Trainer]:
    def run(*callbacks: Callback, module: nn.Module | None = None, **keywords: Any) -> Trainer:
        given = {"optimizer": "adamw", "learning_rate": 1e-3, "max_steps": 4, "logger": False}
        trainer = make_trainer(*callbacks, enable_checkpointing=False, **{**given, **keywords})
        torch.manual_seed(1)
        trainer.fit(module or Language(), [BATCH] * 8)
        return trainer

    return run


def test_bytes_of_a_small_gpt_match_a_hand_computation(fit: Callable[..., Trainer]) -> None:
    found = anatomy(fit(MemoryAnatomy()))
    parameters = list(GPT(GPTConfig(vocab_size=100, context=16, num_layers=2, num_heads=2, width=32)).parameters())
    count = 2 * 100 * 32 + 16 * 32 + 2 * (12 * 32**2 + 13 * 32) + 2 * 32
    assert found.num_parameters == found.num_trained == sum(each.numel() for each in parameters) == count
    (rank,) = found.ranks
    counters_bytes = 4 * len(parameters)  # one step counter per tensor
    assert rank.now == {
        "weights": 4 * count,
        "gradients": 0,  # freed after the update
        "optimizer_states": 8 * count + counters_bytes,
        "activations": 0,
        "temporaries": 0,
        "other": 0,
    }
    assert rank.peak is not None
    assert rank.peak.step == 2
    assert {row: rank.peak.states[row] for row in ("weights", "gradients", "optimizer_states")} == {
        "weights": rank.now["weights"],
        "gradients": 4 * count,
        "optimizer_states": rank.now["optimizer_states"],
    }
    assert sum(rank.peak.whole.values()) >= sum(rank.now.values())
    assert rank.peak.whole["activations"] > 0


def test_fp32_adamw_takes_4_and_4_and_8_bytes_per_parameter(fit: Callable[..., Trainer]) -> None:
    found = anatomy(fit(MemoryAnatomy()))
    own, rule = found.bytes_per_parameter(), found.rule_per_parameter()
    assert own == rule
    assert rule is not None
    assert (rule["weights"], rule["gradients"]) == (4.0, 4.0)
    assert rule["optimizer_states"] == pytest.approx(8, rel=0.01)


@pytest.mark.parametrize(
    ("keywords", "weights", "gradients", "states"),
    [
        ({"precision": "bf16-mixed"}, 4, 4, 8),
        ({"precision": "bf16-true", "optimizer": {"name": "adamw", "weight_rounding": "nearest"}}, 2, 2, 4),
        ({"optimizer": {"name": "sgd", "momentum": 0.9}}, 4, 4, 4),
        ({"optimizer": {"name": "sgd"}}, 4, 4, 0),
        ({"accumulate_grad_batches": 2}, 4, 4, 8),
    ],
    ids=str,
)
def test_bytes_per_parameter(
    fit: Callable[..., Trainer], keywords: dict[str, Any], weights: int, gradients: int, states: int
) -> None:
    found = anatomy(fit(MemoryAnatomy(), **keywords))
    assert found.bytes_per_parameter() == found.rule_per_parameter()
    own = found.bytes_per_parameter()
    assert (own["weights"], own["gradients"]) == (weights, gradients)
    assert own["optimizer_states"] == pytest.approx(states, rel=0.02)


@pytest.mark.more
@pytest.mark.parametrize(
    "keywords",
    [
        {"optimizer": "adamw8bit"},
        {"optimizer": "adafactor"},
        {"optimizer": "muon"},
        {"lora": 2},
        {"lora": {"rank": 2, "base": "nf4"}},
        {"step_in_backward": True},
        {"activation_checkpointing": "full", "chunked_loss": 8},
    ],
    ids=str,
)
def test_formula_matches_each_memory_option(fit: Callable[..., Trainer], keywords: dict[str, Any]) -> None:
    found = anatomy(fit(MemoryAnatomy(at_step=3), **keywords))
    assert found.bytes_per_parameter() == pytest.approx(found.rule_per_parameter(), rel=0.01)


def test_frozen_parameters_have_no_gradients_and_no_states(fit: Callable[..., Trainer]) -> None:
    module = Language()
    module.gpt.blocks.requires_grad_(False)
    num_trained = sum(each.numel() for each in module.parameters() if each.requires_grad)
    found = anatomy(fit(MemoryAnatomy(), module=module))
    assert found.num_trained == num_trained < found.num_parameters
    assert found.ranks[0].now["gradients"] == 0
    assert found.ranks[0].peak is not None
    assert found.ranks[0].peak.states["gradients"] == 4 * num_trained
    assert found.bytes_per_parameter() == found.rule_per_parameter()
    assert "trained" in str(found)


def test_recomputation_reduces_activations(fit: Callable[..., Trainer]) -> None:
    peaks = {}
    for recompute in ("none", "full"):
        peak = anatomy(fit(MemoryAnatomy(), activation_checkpointing=recompute)).ranks[0].peak
        assert peak is not None
        peaks[recompute] = peak.whole["activations"]
    assert peaks["full"] < 0.7 * peaks["none"]


def test_tracked_step_of_a_budget_uses_the_chosen_blocks(fit: Callable[..., Trainer]) -> None:
    peaks = []
    for budget in ("none", 1.0):
        peak = anatomy(fit(MemoryAnatomy(), activation_checkpointing=budget)).ranks[0].peak
        assert peak is not None
        peaks.append(peak.whole["activations"])
    assert peaks[0] == peaks[1]


def test_tracked_step_of_deferred_updates_is_after_the_first_update(
    fit: Callable[..., Trainer], tmp_path: Path
) -> None:
    steps = []

    class Notes(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
            steps.append(tracked.next_step)

    for update in ("plain", "deferred"):
        tracked = MemoryAnatomy()
        fit(tracked, Notes(), offload={"optimizer_states": "disk", "update": update, "folder": str(tmp_path)})
        assert tracked.anatomy is not None
    assert steps == [2, 3]


def test_deferred_updates_remain_pending_when_a_batch_starts(fit: Callable[..., Trainer], tmp_path: Path) -> None:
    pending = []

    class Notes(Callback):
        reads_parameters = False

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            pending.append(bool(trainer.engine._updates._pending))

    offload = {"optimizer_states": "disk", "update": "deferred", "folder": str(tmp_path)}
    fit(MemoryAnatomy(), MemoryForecast(), Notes(), offload=offload)
    assert pending[:3] == [False, True, True]  # the third step is tracked, and its end completes the updates


@pytest.mark.parametrize("step", [2, 3])
def test_step_in_which_a_budget_measures_is_rejected(fit: Callable[..., Trainer], step: int) -> None:
    with pytest.raises(RoomierError, match=f"at_step={step}: must be at least 4"):
        fit(MemoryAnatomy(at_step=step), activation_checkpointing=0.5)


def test_memory_between_steps_is_excluded(make_trainer: Make) -> None:
    trainer = make_trainer(MemoryAnatomy(at_step=3), optimizer="sgd", max_steps=4, logger=False, val_check_interval=1)
    trainer.fit(Language(), [BATCH] * 4, [BATCH])
    peak = anatomy(trainer).ranks[0].peak
    assert peak is not None
    assert sum(peak.whole.values()) < 4 * 10**6, "the validation between steps 2 and 3 needs more"


def test_other_steps_are_not_tracked(fit: Callable[..., Trainer]) -> None:
    seen = []

    class Watching(Callback):
        def on_before_backward(self, trainer: Trainer, pl_module: Any, loss: Any) -> None:
            from torch.utils._python_dispatch import _get_current_dispatch_mode

            seen.append((_get_current_dispatch_mode() is not None, len(trainer.engine.hooks.after_backward)))

    fit(MemoryAnatomy(at_step=3), Watching(), max_steps=6)
    # the previous step identifies the kinds of the tensors
    assert seen == [(False, 0), (True, 1), (True, 1), (False, 0), (False, 0), (False, 0)]


def test_anatomy_is_printed_and_logged(
    make_trainer: Make, capsys: pytest.CaptureFixture[str], batches: Any, scripted: Any
) -> None:
    callback = MemoryAnatomy(at_step=2, every_n_steps=3)
    trainer = make_trainer(callback, max_steps=8)
    trainer.fit(scripted(), batches)
    lines = (Path(trainer.log_dir) / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "anatomy/peak/weights" in row]
    assert [row["step"] for row in rows] == [2, 5, 8]
    assert rows[0]["anatomy/peak/weights"] == 12.0  # a layer of 2 weights and a bias
    out, err = capsys.readouterr()
    assert out == ""
    assert len(re.findall(r"optimizer states\W+\d", err)) == 3
    assert callback.anatomy is not None
    assert callback.anatomy.as_dict()["ranks"][0]["peak"]["step"] == 8
    json.dumps(callback.anatomy.as_dict())


def test_anatomy_without_callback_explains_how_to_get_the_peak(fit: Callable[..., Trainer]) -> None:
    trainer = fit()
    found = anatomy(trainer)
    assert found.ranks[0].peak is None
    assert found.ranks[0].now["optimizer_states"] > 0
    assert "MemoryAnatomy()" in str(found)


def test_anatomy_during_fit_reports_current_memory(fit: Callable[..., Trainer]) -> None:
    found = []

    class Asking(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
            found.append(anatomy(trainer).ranks[0].now)

        def on_save_point(self, trainer: Trainer, pl_module: Any) -> None:
            found.append(anatomy(trainer).ranks[0].now)

    fit(Asking(), max_steps=1)
    assert found[0]["gradients"] == found[0]["optimizer_states"] == 0
    assert found[1]["optimizer_states"] > 2 * found[1]["gradients"] == 2 * found[1]["weights"]


def test_invalid_step_is_rejected() -> None:
    with pytest.raises(RoomierError, match="at_step=1") as error:
        MemoryAnatomy(at_step=1)
    assert "no states during the first step" in error.value.action
    with pytest.raises(RoomierError, match="every_n_steps=1"):
        MemoryAnatomy(every_n_steps=1)
    with pytest.raises(RoomierError, match="has not run anything"):
        anatomy(Trainer(accelerator="cpu", logger=False))
