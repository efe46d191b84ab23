"""Configurations of transformers whose settings or batches have unusual forms."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from roomier.core.errors import RoomierError

transformers = pytest.importorskip("transformers")
from roomier.planner.hugging_face import read_config, workload_of_config  # noqa: E402 - transformers is optional

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
DECODER = {f"decoder_{name}": value for name, value in SMALL.items()}


def config(folder: Path, **values: Any) -> Any:
    (folder / "config.json").write_text(json.dumps(values))
    return read_config(folder)


def test_infinity_in_a_configuration_is_a_number(tmp_path: Path) -> None:
    written = transformers.Mamba2Config(num_heads=4, head_dim=16, hidden_size=32, expand=2)
    written.save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    assert read_config(tmp_path).time_step_limit[1] == math.inf


def test_a_masked_autoencoder_has_a_batch_of_images(tmp_path: Path) -> None:
    found = config(tmp_path, model_type="vit_mae", architectures=["ViTMAEForPreTraining"], **SMALL, **DECODER)
    workload = workload_of_config(found, 2)
    assert type(workload.module.network) is transformers.ViTMAEForPreTraining
    assert {name: tuple(each.shape) for name, each in workload.batch.items()} == {"pixel_values": (2, 3, 224, 224)}


def test_a_transcript_is_at_most_as_long_as_the_decoder(tmp_path: Path) -> None:
    small = {"d_model": 12, "encoder_layers": 1, "decoder_layers": 1, "max_target_positions": 16}
    found = config(tmp_path, model_type="whisper", architectures=["WhisperForConditionalGeneration"], **small)
    assert workload_of_config(found, 2, num_tokens=16).batch["labels"].shape == (2, 16)
    with pytest.raises(RoomierError, match="seq_len=17: must be at most 16"):
        workload_of_config(found, 2, num_tokens=17)


@pytest.mark.parametrize(
    ("kind", "name", "inputs"),
    [
        ("wav2vec2", "Wav2Vec2ForPreTraining", "input_values, attention_mask, mask_time_indices"),
        ("videomae", "VideoMAEForPreTraining", "pixel_values, bool_masked_pos"),
    ],
)
def test_a_class_without_labels_is_answered_with_its_inputs(tmp_path: Path, kind: str, name: str, inputs: str) -> None:
    with pytest.raises(RoomierError) as caught:
        workload_of_config(config(tmp_path, model_type=kind, architectures=[name]), 2)
    assert inputs in str(caught.value)
    assert f"--model transformers.{name}" in str(caught.value)
    assert "Set" not in caught.value.action
