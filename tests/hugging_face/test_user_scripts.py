"""Batches of tokenizers, options of models, and hooks that call the models, as in scripts of users."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from roomier import Callback, Trainer
from roomier.core.errors import RoomierError
from tests.activation.steps import use_no_cache
from tests.hugging_face.models import KINDS, VOCABULARY, transformers
from tests.ranks.pool import RankPool

pytestmark = pytest.mark.more

MakeTrainer = Callable[..., Trainer]
ADAMW = {"name": "adamw", "lr": 1e-3}


def tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]"}
    words = [*special.values(), *(f"w{index}" for index in range(VOCABULARY - len(special)))]
    model = tokenizers.models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)


def rows(words: Any) -> list[dict[str, Any]]:
    """Return rows of different lengths, 3 to 6."""
    return [dict(words(" ".join(f"w{index * j % 15}" for j in range(3 + index % 4)))) for index in range(8)]


def with_targets(row: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": row["input_ids"], "labels": row["input_ids"][:-1]}


def input_ids(row: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": row["input_ids"]}


def unchanged(row: dict[str, Any]) -> dict[str, Any]:
    return row


COLLATORS = {
    "masked": (
        "bert",
        unchanged,
        lambda words: transformers.DataCollatorForLanguageModeling(words, mlm_probability=0.5),
    ),
    "causal": ("gpt2", unchanged, lambda words: transformers.DataCollatorForLanguageModeling(words, mlm=False)),
    "seq2seq": ("t5", with_targets, transformers.DataCollatorForSeq2Seq),
    "flattening": ("llama", input_ids, lambda words: transformers.DataCollatorWithFlattening()),
}


@pytest.mark.parametrize("name", COLLATORS)
def test_batches_of_a_collator(make_trainer: MakeTrainer, name: str) -> None:
    kind, changed, collator = COLLATORS[name]
    words = tokenizer()
    loader = DataLoader([changed(row) for row in rows(words)], batch_size=2, collate_fn=collator(words))
    trainer = make_trainer(optimizer=ADAMW, max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(KINDS[kind].model(), loader, loader)
    assert trainer.global_step == 2
    assert {"train_loss", "val_loss"} <= trainer.callback_metrics.keys()


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_features_of_a_processor_are_converted(make_trainer: MakeTrainer, precision: str) -> None:
    batches = [transformers.BatchFeature(batch) for batch in KINDS["whisper"].batches(2)]
    trainer = make_trainer(optimizer=ADAMW, max_steps=2, precision=precision)
    model = KINDS["whisper"].model()
    trainer.fit(model, batches)
    assert model.dtype is {"bf16-true": torch.bfloat16, "64-true": torch.float64}[precision]
    assert batches[0]["input_features"].dtype is torch.float32


def test_batch_without_labels_is_rejected(make_trainer: MakeTrainer) -> None:
    [batch] = KINDS["llama"].batches(1)
    del batch["labels"]
    with pytest.raises(RoomierError, match=r"without a scalar loss.*pass `labels` to Hugging Face models"):
        make_trainer(optimizer=ADAMW, max_steps=1).fit(KINDS["llama"].model(), [batch])


@pytest.mark.parametrize("name", ["llama", "t5", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_recomputation_of_the_model_and_of_the_trainer(make_trainer: MakeTrainer, name: str) -> None:
    """Used separately and together, both yield weights that are bit-identical to those of a run without a cache,
    including dropout."""
    found = []
    for by_model, by_trainer in ((False, None), (True, None), (False, "full"), (True, "full")):
        model = KINDS[name].model()
        if by_model:
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        elif by_trainer is None:
            use_no_cache(model)
        torch.manual_seed(1)
        make_trainer(optimizer=ADAMW, max_steps=2, activation_checkpointing=by_trainer).fit(
            model, KINDS[name].batches(2)
        )
        found.append([each.detach() for each in model.parameters()])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("name", ["gpt2", "whisper", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_chunked_loss(make_trainer: MakeTrainer, name: str) -> None:
    found = []
    for chunked in (False, 4):
        model = KINDS[name].model(dropout=False)
        trainer = make_trainer(optimizer={"name": "sgd", "lr": 0.5}, max_steps=2, chunked_loss=chunked)
        trainer.fit(model, KINDS[name].batches(2))
        found.append([each.detach() for each in model.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_bfloat16_model_loses_no_updates(make_trainer: MakeTrainer) -> None:
    model = KINDS["llama"].model().bfloat16()
    trainer = make_trainer(optimizer=ADAMW, max_steps=2)
    trainer.fit(model, KINDS["llama"].batches(2))
    assert model.dtype is torch.bfloat16
    for weight in model.parameters():
        states = trainer.optimizers[0].state[weight].values()
        assert any(torch.is_tensor(each) and each.dtype is torch.int16 for each in states), "16 additional bits"


class Generates(Callback):
    """Callback that generates from two tokens after each validation."""

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        prompt = torch.full((1, 2), 3)
        self.found.append(pl_module.network.generate(prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False))


def generate_and_predict(folder: Path, name: str, strategy: str, num_ranks: int) -> tuple[torch.Tensor, list[Any]]:
    callback = Generates()
    trainer = Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=num_ranks,
        strategy=strategy,
        optimizer=ADAMW,
        max_epochs=1,
        num_sanity_val_steps=0,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = KINDS[name].model(dropout=False)
    trainer.fit(model, KINDS[name].batches(4), KINDS[name].batches(2))
    predicted = trainer.predict(model, KINDS[name].batches(3))
    assert predicted is not None
    assert model.training
    return callback.found[0], [each.logits for each in predicted]


def test_generate_in_a_validation_and_predict(tmp_path: Path) -> None:
    tokens, logits = generate_and_predict(tmp_path, "gpt2", "single", 1)
    assert tokens.shape == (1, 5)
    assert [each.shape for each in logits] == [(2, 8, VOCABULARY)] * 3


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_generate_and_predict_on_ranks(on_ranks: RankPool, tmp_path: Path, name: str, strategy: str) -> None:
    first, second = on_ranks(2, generate_and_predict, tmp_path, name, strategy, 2)
    assert torch.equal(first[0], second[0])
    assert len(first[1]) == len(second[1]) == 3
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))


def test_mode_is_kept_and_reported(
    make_trainer: MakeTrainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``from_pretrained`` returns a model with disabled dropout. Bare loops train without dropout unless they call
    ``train()``."""
    KINDS["vit"].model().save_pretrained(tmp_path / "folder")
    opened = transformers.ViTForImageClassification.from_pretrained(tmp_path / "folder")
    trainer = make_trainer(optimizer=ADAMW, max_steps=1)
    trainer.fit(opened, KINDS["vit"].batches(1))
    assert "modules are in evaluation mode and stay in this mode" in capsys.readouterr().err
    trainer.fit(opened.train(), KINDS["vit"].batches(1))
    assert "evaluation mode" not in capsys.readouterr().err
