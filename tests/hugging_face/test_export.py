"""``export_hugging_face``: additional files, sources, and rejected requests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import roomier
from roomier import Trainer, checkpoint
from roomier.adapters import merge_lora
from roomier.checkpoint.export.adapter import export_adapter
from roomier.checkpoint.export.hugging_face import export_hugging_face
from roomier.cli.main import main
from roomier.core.errors import RoomierError
from tests.hugging_face.models import KINDS, logits

MakeTrainer = Callable[..., Trainer]


def saved(make_trainer: MakeTrainer, model: Any, name: str, path: Path, **keywords: Any) -> Path:
    trainer = make_trainer(**{"optimizer": {"name": "sgd", "lr": 0.1}, "max_steps": 2, **keywords})
    trainer.fit(model, KINDS[name].batches(2))
    trainer.save_checkpoint(path)
    return path


def reading(path: Path) -> Any:
    return json.loads(path.read_text())


def test_fused_experts_are_written_to_several_tensors(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    model = KINDS["mixtral"].model()
    path = saved(make_trainer, model, "mixtral", tmp_path / "c")
    done = export_hugging_face(path, tmp_path / "out", max_shard_bytes=6000, dtype="bf16")
    assert len(done.files) > 2
    index = reading(tmp_path / "out" / "model.safetensors.index.json")
    assert index["metadata"]["total_size"] == done.num_bytes
    held = {name: file for file in done.files for name in load_file(tmp_path / "out" / file)}
    assert held == index["weight_map"]
    assert "model.layers.1.block_sparse_moe.experts.2.w3.weight" in held
    opened = type(model).from_pretrained(tmp_path / "out")
    assert opened.dtype is torch.bfloat16
    for ours, theirs in zip(model.parameters(), opened.parameters(), strict=True):
        assert torch.equal(ours.bfloat16(), theirs)


def test_model_keeps_its_dtype_and_generation_config(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """The configuration contains the original dtype, although training may have converted the model."""
    model = KINDS["llama"].model()
    model.generation_config.top_k = 7
    model.generation_config.do_sample = True
    path = saved(make_trainer, model, "llama", tmp_path / "c", precision="bf16-true", optimizer="adamw")
    export_hugging_face(path, tmp_path / "out")
    assert reading(tmp_path / "out" / "config.json")["dtype"] == "bfloat16"
    opened = type(model).from_pretrained(tmp_path / "out")
    assert opened.dtype is torch.bfloat16
    assert (opened.generation_config.top_k, opened.generation_config.do_sample) == (7, True)


class Inside(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = KINDS["t5"].model()
        self.extra = torch.nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch).loss + 0 * self.extra.weight.sum()


def test_model_inside_a_module_is_exported_without_a_prefix(
    make_trainer: MakeTrainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = Inside()
    path = saved(make_trainer, module, "t5", tmp_path / "c")
    export_hugging_face(path, tmp_path / "out")
    assert "2 entries are omitted" in capsys.readouterr().err
    opened = type(module.model).from_pretrained(tmp_path / "out")
    [batch] = KINDS["t5"].batches(1)
    assert torch.equal(logits(opened, batch), logits(module.model, batch))


@pytest.mark.parametrize("base", ["as_is", "nf4"])
def test_adapters_are_merged_or_exported_separately(make_trainer: MakeTrainer, tmp_path: Path, base: str) -> None:
    model = KINDS["llama"].model()
    lora = {"rank": 2, "alpha": 6, "dropout": 0.1, "base": base, "trained": ["lm_head"]}
    path = saved(make_trainer, model, "llama", tmp_path / "c", lora=lora)
    export_adapter(model, tmp_path / "of the model")
    export_hugging_face(path, tmp_path / "alone", adapters="alone")
    assert sorted(each.name for each in (tmp_path / "alone").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    config = reading(tmp_path / "alone" / "adapter_config.json")
    assert config == reading(tmp_path / "of the model" / "adapter_config.json")
    found = load_file(tmp_path / "alone" / "adapter_model.safetensors")
    expected = load_file(tmp_path / "of the model" / "adapter_model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], each) for name, each in expected.items())
    assert "base_model.model.lm_head.weight" in found

    export_hugging_face(path, tmp_path / "merged")
    opened = type(model).from_pretrained(tmp_path / "merged")
    merge_lora(model)
    [batch] = KINDS["llama"].batches(1)
    torch.testing.assert_close(logits(opened, batch), logits(model, batch), rtol=1e-5, atol=1e-6)


class Processor:
    def save_pretrained(self, folder: Path) -> None:
        (Path(folder) / "tokenizer.json").write_text("made")


def test_tokenizer_is_exported(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    path = saved(make_trainer, KINDS["vit"].model(), "vit", tmp_path / "c")
    (tmp_path / "from").mkdir()
    for name in ("tokenizer.json", "vocab.txt", "preprocessor_config.json", "config.json", "pytorch_model.bin"):
        (tmp_path / "from" / name).write_text("copied")
    export_hugging_face(path, tmp_path / "out", processor=tmp_path / "from")
    copied = {each.name for each in (tmp_path / "out").iterdir() if each.read_bytes() == b"copied"}
    assert copied == {"tokenizer.json", "vocab.txt", "preprocessor_config.json"}
    export_hugging_face(path, tmp_path / "other", processor=Processor())
    assert (tmp_path / "other" / "tokenizer.json").read_text() == "made"


def test_invalid_requests_are_rejected_and_write_nothing(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    path = saved(make_trainer, KINDS["vit"].model(), "vit", tmp_path / "c")
    checkpoint.save(tmp_path / "plain", {"module": {"w": torch.ones(2)}})
    (tmp_path / "empty").mkdir()
    for source, arguments, words in (
        (tmp_path / "plain", {}, "contains no Hugging Face model"),
        (path, {"adapters": "alone"}, "has no adapters"),
        (path, {"adapters": "both"}, "is unknown"),
        (path, {"dtype": "int4"}, "is unknown"),
        (path, {"processor": tmp_path / "empty"}, "contains no file of a tokenizer"),
        (path, {"processor": 3}, "must be a folder or have a method save_pretrained"),
    ):
        with pytest.raises(RoomierError, match=words):
            export_hugging_face(source, tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()


def test_export_command(make_trainer: MakeTrainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(saved(make_trainer, KINDS["gpt2"].model(), "gpt2", tmp_path / "c"))
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "merges.txt").write_text("a b")
    arguments = ["--to", "hugging-face", "--dtype", "bf16", "--processor", str(tmp_path / "words")]
    assert main(["export", path, *arguments]) == 0
    assert "model.safetensors" in capsys.readouterr().out
    names = {each.name for each in (tmp_path / "c-hugging-face").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors", "merges.txt"}
    for wrong, words in (
        (["--to", "hugging-face", "--prefix", "transformer."], "--prefix"),
        (["--to", "safetensors", "--adapters", "alone"], "is not supported with --to safetensors"),
        (["--to", "hugging-face", "--adapters", "alone"], "has no adapters"),
    ):
        assert main(["export", path, *wrong, "--output", str(tmp_path / "other")]) == 2
        assert words in capsys.readouterr().err
