"""Offloaded optimizer states in the Trainer: code between two steps sees complete updates, and runs resume exactly."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roomier
from roomier.callbacks import EMAWeightAveraging, ModelCheckpoint
from roomier.plan import OffloadPlan
from tests.covering import few
from tests.engine.test_step_in_backward import make_network

MODES = ["deferred, parameters", "speculative", "deferred", "plain, parameters", "plain"]
CLIP = 15.0
HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_validation_start",
)


class Language(roomier.Module):
    """A small language model with dropout.

    Args:
        hooks: names of hooks that record a sum over all parameters.
        reads: True if the training step reads the parameters of a block.
    """

    def __init__(self, hooks: tuple[str, ...] = (), reads: bool = False) -> None:
        super().__init__()
        self.network, self.reads, self.seen = make_network(), reads, list[tuple[str, float]]()
        for name in hooks:
            setattr(self, name, lambda *_, name=name: self.look(name))

    def look(self, name: str) -> None:
        self.seen.append((name, sum(float(each.detach().double().sum()) for each in self.parameters())))

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.network(batch[:, :-1], batch[:, 1:])[1]
        if self.reads:
            loss = loss + 1e-3 * self.network.blocks[1].attention.out.weight.square().sum()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor) -> None:
        self.log("val_loss", self.network(batch[:, :-1], batch[:, 1:])[1])


def data() -> Any:
    tokens = torch.randint(61, (24, 9), generator=torch.Generator().manual_seed(3))
    return torch.utils.data.DataLoader(tokens, batch_size=2)


def fit(folder: Path, mode: str | None, module: Language | None = None, **options: Any) -> Language:
    module = module or Language()
    tiers = {"optimizer_states": "disk", "folder": str(folder), "update": mode.split(",")[0]} if mode else None
    if mode and "parameters" in mode:
        tiers = {**(tiers or {}), "parameters": "disk"}
    folder.mkdir(exist_ok=True)
    resume = options.pop("ckpt_path", None)
    settings: dict[str, Any] = {
        "max_steps": 12,
        "accelerator": "cpu",
        "gradient_clip_val": CLIP,
        "optimizer": {"name": "adamw", "lr": 3e-3},
        "lr_schedule": "cosine",
        "val_check_interval": 5,
        "default_root_dir": folder / "runs",
        "logger": False,
        "enable_progress_bar": False,
        "offload": tiers,
        **options,
    }
    roomier.seed_everything(1)
    trainer = roomier.Trainer(**settings)
    trainer.fit(module, data(), data(), ckpt_path=resume)
    return module


@functools.cache
def expected_with(hooks: tuple[str, ...] = (), num_steps: int = 12) -> Language:
    """Return the module of a run without offload."""
    with tempfile.TemporaryDirectory() as folder:
        return fit(Path(folder), None, Language(hooks), max_steps=num_steps, limit_train_batches=num_steps)


def check_same(found: nn.Module, expected: nn.Module) -> None:
    torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("mode", few(MODES))
def test_hooks_see_complete_updates(mode: str, tmp_path: Path) -> None:
    for hooks in [(), *((each,) for each in HOOKS)]:
        expected = expected_with(hooks, 6)
        found = fit(tmp_path / "tier", mode, Language(hooks), max_steps=6, limit_train_batches=6)
        check_same(found, expected)
        assert found.seen == expected.seen, hooks
        assert bool(found.seen) == bool(hooks)


@pytest.mark.parametrize("mode", few(MODES))
def test_resuming_is_exact_on_every_tier(mode: str, tmp_path: Path) -> None:
    expected = expected_with()
    saved = ModelCheckpoint(tmp_path / "saved", filename="{step}", every_n_train_steps=1, save_top_k=-1)
    check_same(fit(tmp_path / "tier", mode, callbacks=[saved]), expected)
    others: list[str | None] = [None, *MODES]
    for step, other in zip((1, 3, 5, 6, 8, 11), others, strict=True):
        resumed = fit(tmp_path / "other", other, ckpt_path=tmp_path / "saved" / f"step={step}")
        check_same(resumed, expected)


@pytest.mark.parametrize("mode", few(MODES))
def test_averaged_weights(mode: str, tmp_path: Path) -> None:
    expected = fit(tmp_path / "plain", None, callbacks=[EMAWeightAveraging(decay=0.9)])
    check_same(fit(tmp_path / "tier", mode, callbacks=[EMAWeightAveraging(decay=0.9)]), expected)


@pytest.mark.parametrize("mode", few(MODES))
def test_a_parameter_that_is_read_outside_its_block(mode: str, tmp_path: Path, capsys: Any) -> None:
    expected = fit(tmp_path / "plain", None, Language(reads=True))
    if "parameters" in mode:
        with pytest.raises(roomier.TrainingError, match=r"blocks\.1.*while its module was not running"):
            fit(tmp_path / "tier", mode, Language(reads=True))
        return
    check_same(fit(tmp_path / "tier", mode, Language(reads=True)), expected)
    assert ("read outside the forward pass of its block" in capsys.readouterr().err) == (mode == "deferred")


HOST = {"device": "cpu"}


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "deepspeed_stage_2_offload"},
        {"strategy": "deepspeed_stage_3_offload"},
        {"strategy": "fsdp_cpu_offload"},
        {"strategy": "zero2+offload"},
        {"offload": True},
        {"offload": {"optimizer_states": "cpu", "parameters": "cpu", "share": 0.5, "update": "deferred"}},
        {"deepspeed": {"zero_optimization": {"stage": 3, "offload_optimizer": HOST, "offload_param": HOST}}},
    ],
)
@pytest.mark.parametrize("accelerator", few(["auto", "cpu"]))
def test_offload_to_host_memory_has_no_effect_on_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, Any], accelerator: str
) -> None:
    if accelerator == "auto" and torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    common: dict[str, Any] = {"max_steps": 2, "optimizer": "adamw", "logger": False, "default_root_dir": tmp_path}
    trainer = roomier.Trainer(accelerator=accelerator, **common, **settings)
    assert trainer.plan.offload.optimizer_states == "cpu"
    trained = []
    for each in (trainer, roomier.Trainer(accelerator="cpu", **common)):
        torch.manual_seed(0)
        trained.append(Language())
        each.fit(trained[-1], data())
    assert trainer.plan.offload == OffloadPlan()
    printed = capsys.readouterr().err
    assert "optimizer_states='cpu'" in printed
    assert "on a CPU, these tensors are already in host memory, so they are not offloaded" in printed
    for one, other in zip(trained[0].parameters(), trained[1].parameters(), strict=True):
        torch.testing.assert_close(one.detach(), other.detach())
