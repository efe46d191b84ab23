"""Recomputed blocks whose input and output are packed sequences."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks.models.deepspeech import DeepSpeech, DeepSpeechConfig
from roomier import Trainer


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_recomputed_layers_train_bit_identically(make_trainer: Callable[..., Trainer], policy: str) -> None:
    generator = torch.Generator().manual_seed(1)
    batch = {
        "spectrogram": torch.randn(3, 20, 41, generator=generator),
        "num_frames": torch.tensor([20, 15, 12]),
        "letters": torch.randint(1, 6, (3, 3), generator=generator),
        "num_letters": torch.tensor([3, 2, 3]),
    }

    def trained(**keywords: str) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = DeepSpeech(DeepSpeechConfig(num_bands=41, num_letters=6, num_layers=2, width=7, channels=2))
        make_trainer(max_steps=3, optimizer="adamw", **keywords).fit(model, [batch] * 3)
        return model.state_dict()

    expected, found = trained(), trained(activation_checkpointing=policy)
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
