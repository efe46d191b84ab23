"""Hugging Face models train as in a bare PyTorch loop, and their exports can be opened with ``from_pretrained``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import roomier
from roomier import Trainer
from roomier.checkpoint.export.hugging_face import export_hugging_face
from roomier.core.errors import RoomierError
from tests.covering import few
from tests.hugging_face.models import KINDS, Batch, logits
from tests.ranks.pool import RankPool
from tests.train.conftest import Rows

MakeTrainer = Callable[..., Trainer]
NEARLY_NOTHING: dict[str, Any] = {"optimizer": {"name": "sgd", "lr": 1e-30}, "max_steps": 1}


def bare_loop(model: Any, batches: list[Batch], *, lr: float = 1e-3) -> list[float]:
    """Return the losses of one step per batch. Parameters with two or more dimensions decay, except tables of
    biases."""
    decays = {name: p.dim() >= 2 and "bias" not in name for name, p in model.named_parameters()}
    groups = [
        {"params": [p for name, p in model.named_parameters() if decays[name]], "weight_decay": 0.01},
        {"params": [p for name, p in model.named_parameters() if not decays[name]], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, fused=True)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def names_in(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return set(file.keys())


@pytest.mark.parametrize("name", few(KINDS, 3))
def test_model_trains_like_a_bare_loop_and_from_pretrained_opens_it(
    make_trainer: MakeTrainer, tmp_path: Path, name: str
) -> None:
    kind = KINDS[name]
    model, bare, batches = kind.model(), kind.model(), kind.batches(4)
    torch.manual_seed(1)
    losses = bare_loop(bare, batches)

    rows = Rows()
    torch.manual_seed(1)
    trainer = make_trainer(optimizer="adamw", learning_rate=1e-3, max_steps=4, logger=rows, log_every_n_steps=1)
    trainer.fit(model, batches)

    assert rows.column("loss") == losses, "bit-identical, including dropout"
    for ours, theirs in zip(model.parameters(), bare.parameters(), strict=True):
        assert torch.equal(ours, theirs)

    trainer.save_checkpoint(tmp_path / "saved")
    export_hugging_face(tmp_path / "saved", tmp_path / "exported")
    opened, info = type(model).from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert not any(info.values()), "missing or unexpected weights, or different shapes"
    assert not opened.training
    assert torch.equal(logits(opened, batches[0]), logits(model, batches[0]))
    model.save_pretrained(tmp_path / "by hand")
    assert names_in(tmp_path / "exported") == names_in(tmp_path / "by hand"), "the names of the hub"
    assert sorted(each.name for each in (tmp_path / "exported").iterdir()) == sorted(
        each.name for each in (tmp_path / "by hand").iterdir()
    )


@pytest.mark.parametrize("name", few(KINDS, 3))
def test_run_starts_with_the_weights_of_a_folder(make_trainer: MakeTrainer, tmp_path: Path, name: str) -> None:
    kind = KINDS[name]
    model, other, [batch] = kind.model(seed=1, dropout=False), kind.model(seed=2, dropout=False), kind.batches(1)
    model.save_pretrained(tmp_path / "folder", max_shard_size="8KB")
    make_trainer(**NEARLY_NOTHING).fit(other, [batch], weights=tmp_path / "folder")
    torch.testing.assert_close(logits(other, batch), logits(model, batch), rtol=0, atol=1e-20)


class Inside(roomier.Module):
    """Module that is built on the meta device, so that each of its values must be read or computed."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def configure_model(self) -> None:
        self.model = KINDS[self.name].model(dropout=False)

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.model(**batch).loss


def begun_with(path: Path, folder: Path, name: str, num_ranks: int) -> list[torch.Tensor]:
    trainer = Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=num_ranks,
        strategy="zero3" if num_ranks > 1 else "single",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **NEARLY_NOTHING,
    )
    module = Inside(name)
    trainer.fit(module, KINDS[name].batches(2), weights=path)
    return [getattr(each, "full_tensor", each.detach)().detach() for each in module.model.parameters()]


@pytest.mark.parametrize("name", ["mixtral", pytest.param("vit", marks=pytest.mark.slow)])
def test_each_rank_reads_its_shard_of_fused_experts(on_ranks: RankPool, tmp_path: Path, name: str) -> None:
    """Files contain a separate tensor for each expert."""
    model = KINDS[name].model(seed=1)
    model.save_pretrained(tmp_path / "folder", max_shard_size="8KB")
    alone = begun_with(tmp_path / "folder", tmp_path, name, 1)
    for found in (alone, *on_ranks(2, begun_with, tmp_path / "folder", tmp_path, name, 2)):
        for ours, theirs in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=1e-20)


def test_weights_of_another_model_are_rejected_with_the_names_in_the_file(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    KINDS["mixtral"].model().save_pretrained(tmp_path / "folder")
    with pytest.raises(RoomierError, match=r"does not match the model: .*unexpected: .*block_sparse_moe"):
        make_trainer(**NEARLY_NOTHING).fit(
            KINDS["llama"].model(), KINDS["llama"].batches(1), weights=tmp_path / "folder"
        )


OLD_NAMES = {
    "bert": lambda name: name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
        "LayerNorm.bias", "LayerNorm.beta"
    ),
    "gpt2": lambda name: name.removeprefix("transformer."),  # the model without its head
}


@pytest.mark.parametrize("name", few(OLD_NAMES))
def test_names_of_old_files_are_supported(make_trainer: MakeTrainer, tmp_path: Path, name: str) -> None:
    kind = KINDS[name]
    model, other, [batch] = kind.model(seed=1, dropout=False), kind.model(seed=2, dropout=False), kind.batches(1)
    tensors = {OLD_NAMES[name](key): each.detach().clone() for key, each in model.named_parameters()}
    save_file(tensors, tmp_path / "old.safetensors")
    make_trainer(**NEARLY_NOTHING).fit(other, [batch], weights=tmp_path / "old.safetensors")
    torch.testing.assert_close(logits(other, batch), logits(model, batch), rtol=0, atol=1e-20)
