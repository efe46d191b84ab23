"""Models that no rank can store: the stages build them in ``configure_model``, and each keeps its part."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

import roomier
from tests.context.networks import hugging_face
from tests.engine.test_materialise_memory import resident_mib
from tests.pipeline.test_loop import trainer_of
from tests.ranks.pool import RankPool

WIDTH, NUM_BLOCKS = 1024, 12


class Configured(roomier.Module):
    """A module that builds a Llama with tied weights in ``configure_model``."""

    def __init__(self, how: str = "real") -> None:
        super().__init__()
        self.how = how
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta" if self.how == "meta" else "cpu"):
                options = {"num_key_value_heads": 2, "head_dim": 4, "tie_word_embeddings": True}
                self.model = hugging_face("Qwen3ForCausalLM", config="Qwen3Config", **options).train()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def tokens() -> DataLoader[Any]:
    return DataLoader(torch.randint(16, (12, 8), generator=torch.Generator().manual_seed(1)).unbind(), batch_size=2)


def trained(folder: str, num_stages: int, how: str, weights: str | None) -> tuple[float, dict[str, Tensor]]:
    roomier.seed_everything(3)
    net = Configured("real" if num_stages == 1 and how != "meta" else how)
    trainer = trainer_of(folder, num_stages, max_steps=2, enable_checkpointing=False)
    trainer.fit(net, tokens(), tokens(), weights=weights)
    trainer.validate(net, tokens())
    loss = float(trainer.callback_metrics["val_loss"])
    return loss, {name: each.detach().clone() for name, each in net.named_parameters() if not each.is_meta}


@pytest.mark.parametrize(
    ("how", "num_stages", "from_file"),
    [("real", 2, False), ("real", 2, True), pytest.param("meta", 4, False, marks=pytest.mark.more), ("meta", 2, True)],
)
def test_stages_train_the_values_of_one_process(
    on_ranks: RankPool, tmp_path: Path, how: str, num_stages: int, from_file: bool
) -> None:
    weights = None
    if from_file:
        net = Configured()
        net.configure_model()
        weights = str(tmp_path / "initial.safetensors")
        save_file({name: each.clone() for name, each in net.state_dict().items()}, weights)
    loss, expected = trained(str(tmp_path / "one"), 1, how, weights)
    found: dict[str, Tensor] = {}
    for loss_of_rank, parameters in on_ranks(num_stages, trained, str(tmp_path / "stages"), num_stages, how, weights):
        assert loss_of_rank == pytest.approx(loss, rel=1e-10)
        assert len(parameters) < len(expected)
        found |= parameters
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, rtol=1e-9, atol=1e-11, msg=name)


class Large(roomier.Module):
    """A module whose layers are built where ``how`` says, and that records the peak memory before the first step."""

    def __init__(self, how: str, width: int) -> None:
        super().__init__()
        self.how, self.width, self.peak = how, width, 0.0
        self.blocks = self._built() if how == "__init__" else nn.Sequential()

    def _built(self) -> nn.Sequential:
        return nn.Sequential(
            *(
                nn.Sequential(nn.Linear(self.width, 4 * self.width), nn.Linear(4 * self.width, self.width))
                for _ in range(NUM_BLOCKS)
            )
        )

    def configure_model(self) -> None:
        if not len(self.blocks):
            with torch.device("meta" if self.how == "meta" else "cpu"):
                self.blocks = self._built()

    def on_train_start(self) -> None:
        self.peak = resident_mib("VmHWM")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.blocks(batch[:, :1].expand(-1, self.width)).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def peak_growth_mib(folder: str, num_stages: int, how: str) -> float:
    warm = DataLoader(torch.ones(2, 8).unbind(), batch_size=2)
    for scale in (8, 1):  # a small model first, which excludes memory that the first use of code allocates
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = resident_mib("VmRSS")
        net = Large(how, WIDTH // scale)
        trainer_of(folder, num_stages, max_steps=1, precision="32-true", enable_checkpointing=False).fit(net, warm)
    return net.peak - before


@pytest.mark.more
def test_no_rank_stores_the_full_model(on_ranks: RankPool, tmp_path: Path) -> None:
    model_mib = NUM_BLOCKS * 8 * WIDTH**2 * 4 / 2**20
    for how in ("configure_model", "meta"):
        assert max(on_ranks(2, peak_growth_mib, str(tmp_path), 2, how)) < 0.85 * model_mib, how
    assert min(on_ranks(2, peak_growth_mib, str(tmp_path), 2, "__init__")) > model_mib
