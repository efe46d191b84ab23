"""Optimizer states of a checkpoint are read into their tier, without memory for them on the device or the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from roomier import Trainer
from roomier.callbacks import ModelCheckpoint
from roomier.core.errors import CheckpointError
from roomier.core.sharded import local_part
from roomier.techniques.offload.states import OffloadedStates
from tests.covering import few
from tests.device.fits import Language, weights_of
from tests.ranks.pool import RankPool
from tests.simulator import simulated
from tests.simulator.gpt import batches
from tests.simulator.workers import SimulatedRanks

NUM_STEPS = 4


def train(accelerator: str, keywords: dict[str, Any], *, saves: Path | None = None, resumes: Path | None = None) -> Any:
    module = Language()
    callbacks = [] if saves is None else [ModelCheckpoint(saves, every_n_train_steps=2, save_top_k=-1)]
    trainer = Trainer(
        **{
            "accelerator": accelerator,
            "max_steps": NUM_STEPS,
            "logger": False,
            "enable_progress_bar": False,
            **keywords,
        },
        callbacks=callbacks,
        enable_checkpointing=saves is not None,
        enable_model_summary=False,
    )
    data = TensorDataset(torch.cat(batches(NUM_STEPS * trainer.world_size, 2)))
    trainer.fit(module, DataLoader(data, batch_size=2), ckpt_path=resumes)
    return weights_of(module)


def resume(accelerator: str, keywords: dict[str, Any], folder: Path) -> list[str]:
    """Return the differences between a resumed run and the run that saved, and the way in which the states were
    loaded."""
    expected = train(accelerator, keywords, saves=folder / "saved")
    saved = min((folder / "saved").iterdir(), key=lambda each: each.stat().st_mtime)
    problems: list[str] = []
    take_loaded = OffloadedStates.take_loaded

    def watched(self: OffloadedStates) -> None:
        found = [state for each in self.away for state in self._of(each).values()]
        states = [each for each in found if isinstance(each, Tensor) and each.dim() > 0]
        problems.extend(f"on {local_part(each).device}" for each in states if local_part(each).device.type != "cpu")
        problems.extend([] if states else ["no states"])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(OffloadedStates, "leave", lambda *_: problems.append("copied"))
            take_loaded(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OffloadedStates, "take_loaded", watched)
        found = train(accelerator, keywords, resumes=saved)
    problems += [f"{name} differs" for name in expected if not torch.equal(found[name], expected[name])]
    return problems + (simulated.races() if accelerator != "cpu" else [])


ON_RANKS = {
    "single": (1, {}),
    "share": (1, {"share": 0.5}),
    "zero2": (2, {"strategy": "zero2"}),
    "zero3": (2, {"strategy": "zero3"}),
    "zero3, 8 bits": (2, {"strategy": "zero3", "optimizer": "adamw_8bit"}),
    "parameters": (1, {"parameters": True}),
    "zero3, parameters": (2, {"strategy": "zero3", "parameters": True}),
}


def keywords_of(case: str, tier: str, folder: Path, mode: str) -> tuple[int, dict[str, Any]]:
    num_ranks, options = ON_RANKS[case]
    keywords = {"optimizer": {"name": "adamw", "lr": 3e-3}, "devices": num_ranks, **options}
    offload = {"optimizer_states": tier, "update": mode, "share": keywords.pop("share", 1.0)}
    if keywords.pop("parameters", False):
        offload["parameters"], offload["update"] = tier, "deferred"
    if tier == "disk":
        offload["folder"] = str(folder)
    return num_ranks, {**keywords, "offload": offload, "default_root_dir": folder}


@pytest.mark.parametrize("case", few(ON_RANKS))
def test_on_the_cpu(on_ranks: RankPool, case: str, tmp_path: Path) -> None:
    num_ranks, keywords = keywords_of(case, "disk", tmp_path, "speculative")
    assert on_ranks(num_ranks, resume, "cpu", keywords, tmp_path) == [[]] * num_ranks


@pytest.mark.parametrize("case", ["single", "zero3", "parameters", "zero3, parameters"])
@pytest.mark.parametrize("tier", ["cpu", "disk"])
def test_on_an_accelerator(on_simulated: SimulatedRanks, case: str, tier: str, tmp_path: Path) -> None:
    num_ranks, keywords = keywords_of(case, tier, tmp_path, "deferred")
    assert on_simulated(num_ranks, resume, simulated.DEVICE, keywords, tmp_path) == [[]] * num_ranks


def test_states_that_are_larger_than_planned_are_rejected(tmp_path: Path) -> None:
    _, keywords = keywords_of("single", "disk", tmp_path, "plain")
    larger = {**keywords, "optimizer": {"name": "adamw", "lr": 3e-3, "amsgrad": True}}
    train("cpu", {**larger, "offload": {}}, saves=tmp_path / "saved")
    saved = min((tmp_path / "saved").iterdir(), key=lambda each: each.stat().st_mtime)
    with pytest.raises(CheckpointError, match=r"the checkpoint has \d+ bytes for a block"):
        train("cpu", keywords, resumes=saved)
