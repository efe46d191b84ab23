"""Reports of inefficient sizes, compared with manual calculations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from roomier import Trainer
from roomier.models.gpt import GPT, GPTConfig
from roomier.techniques.precision.policy import precision_of
from roomier.techniques.precision.sizes import Liked, liked_by, size_warnings, unliked_sizes

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16 = Liked("bfloat16", aligned=8, tile=64)


@pytest.fixture
def gpt2() -> GPT:
    """GPT-2 with the original vocabulary of 50257 tokens."""
    with torch.device("meta"):
        return GPT(GPTConfig.named("gpt2"))


def test_the_vocabulary_of_gpt2_is_reported_with_the_next_size(gpt2: GPT) -> None:
    (line,) = unliked_sizes(gpt2, BF16)
    # 50257 x 768 of the 85 M + 38.6 M weights of matmuls
    assert line == (
        "size 50257 (output of head; 31 % of the multiplications) is not a multiple of 8, "
        "which is inefficient in bfloat16: "
        "0.093 % of the computation in tiles of 64 is wasted. 50304 is a multiple of 64"
    )


def test_efficient_sizes_are_not_reported() -> None:
    with torch.device("meta"):
        assert unliked_sizes(GPT(GPTConfig.named("gpt2", vocab_size=50304)), BF16) == []


def test_a_size_of_several_layers_is_reported_in_one_line() -> None:
    with torch.device("meta"):
        layers = nn.Sequential(*(nn.Linear(1000, 1000) for _ in range(3)))
    (line,) = unliked_sizes(layers, BF16)
    assert line.startswith("size 1000 (input of 0 and 5 more; 100 % of the multiplications) is not a multiple of 64")
    assert "2.3 % of the computation in tiles of 64 is wasted. 1024 is" in line  # 24 of 1024


def test_sizes_of_small_layers_are_not_reported() -> None:
    with torch.device("meta"):
        large, small = nn.Linear(8192, 8192), nn.Linear(8192, 9)
        thin, odd = nn.Linear(64, 63), nn.Linear(4096, 4090)
    assert unliked_sizes(nn.Sequential(large, small), BF16) == [], "0.1 % of the work"
    assert unliked_sizes(thin, BF16) == [], "too small to take time"
    assert len(unliked_sizes(odd, BF16)) == 1
    assert unliked_sizes(nn.Linear(4096, 4088, device="meta"), BF16) == [], "aligned, and 0.2 % of the tiles are empty"


def test_a_frozen_layer_counts_two_of_three_matmuls() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1024, 1001), nn.Linear(1024, 1001))
    model[0].requires_grad_(False)
    model.append(nn.Linear(1024, 1003, device="meta"))
    shares = [line.partition("; ")[2].partition(" %")[0] for line in unliked_sizes(model, BF16)]
    assert shares == ["62", "38"]  # (2 + 3) / 8 and 3 / 8


def test_linear_layers_of_hugging_face_gpt2() -> None:
    from transformers.pytorch_utils import Conv1D

    (line,) = unliked_sizes(Conv1D(1001, 1024), BF16)
    assert "output of the model" in line


@pytest.mark.parametrize(
    ("device", "dtype", "matmul", "liked"),
    [
        (CUDA, torch.bfloat16, "highest", (8, 64)),
        (CUDA, torch.float16, "highest", (8, 64)),
        (CUDA, torch.float32, "high", (4, 32)),
        (CUDA, torch.float32, "highest", None),
        (CUDA, torch.float64, "high", None),
        (CPU, torch.float32, "high", None),
        (CPU, torch.bfloat16, "highest", (16, 32)),
        (torch.device("mps"), torch.float16, "highest", None),
    ],
)
def test_efficient_sizes_of_devices(
    device: torch.device,
    dtype: torch.dtype,
    matmul: str,
    liked: tuple[int, int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("roomier.core.torch_private.has_amx", lambda: True)
    monkeypatch.setattr("torch.get_float32_matmul_precision", lambda: matmul)
    found = liked_by(device, dtype)
    assert (None if found is None else (found.aligned, found.tile)) == liked


def test_all_sizes_are_efficient_on_a_cpu_without_matrix_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roomier.core.torch_private.has_amx", lambda: False)
    assert liked_by(CPU, torch.bfloat16) is None


def test_the_dtype_is_the_dtype_of_the_matmuls(gpt2: GPT) -> None:
    assert size_warnings(gpt2, precision_of("32-true", CUDA), CUDA) == []
    for mode in ("bf16-mixed", "16-mixed", "bf16-true"):
        assert len(size_warnings(gpt2, precision_of(mode, CUDA), CUDA)) == 1


def test_a_run_reports_sizes_one_time(
    make_trainer: Callable[..., Trainer], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roomier.core.torch_private.has_amx", lambda: True)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(512, 301)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.layer(batch).square().mean()

    trainer = make_trainer(precision="bf16-mixed", optimizer="sgd", learning_rate=0.1, max_steps=2)
    trainer.fit(Model(), [torch.ones(2, 512)] * 2)
    assert capsys.readouterr().err.count("roomier: size 301 (output of layer; 100 %") == 1
