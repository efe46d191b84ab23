"""Models of many kinds, each with one micro-batch, to compare forecasts with measurements.

The models are small, but their activations are large compared with rounding errors, and repeated layers occur at least
four times. Hugging Face models are created from a configuration, without downloads.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.deepspeech import DeepSpeech, DeepSpeechConfig
from benchmarks.models.resnet import Classifier
from roomier.api.module import Module
from roomier.models.gpt import GPT, GPTConfig

VOCABULARY = 500
LENGTH = 64
NUM_SEQUENCES = 4
NUM_IMAGES = 4
DEPTH = 4

Batch = Any
Workload = tuple[nn.Module, Batch]


def _tokens(length: int = LENGTH) -> Tensor:
    return torch.arange(NUM_SEQUENCES * length).view(NUM_SEQUENCES, length) * 7 % VOCABULARY


def _images(size: int = 32) -> Tensor:
    return torch.linspace(-1, 1, NUM_IMAGES * 3 * size * size).sin().view(NUM_IMAGES, 3, size, size)


def _hugging_face(config: str, model: str, batch: Batch, **sizes: Any) -> Workload:
    transformers = importlib.import_module("transformers")
    made = getattr(transformers, model)(getattr(transformers, config)(**sizes))
    return made.train(), batch


def gpt(**changes: Any) -> Workload:
    """Return roomier's GPT, by default with dropout."""
    config = GPTConfig(VOCABULARY, LENGTH, num_layers=DEPTH, num_heads=4, width=64, **changes)
    return GPT(config), {"input_ids": _tokens(), "targets": _tokens()}


def gpt_tied() -> Workload:
    """Return roomier's GPT without dropout, with a tied output layer."""
    return gpt(dropout=0.0, tied_head=True)


def gpt2() -> Workload:
    """Return a GPT-2 with a language model head."""
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 64, "n_layer": DEPTH}
    return _hugging_face(
        "GPT2Config", "GPT2LMHeadModel", {"input_ids": _tokens(), "labels": _tokens()}, n_head=4, **sizes
    )


_ENCODER: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 4,
    "intermediate_size": 256,
}


def bert() -> Workload:
    """Return a BERT with a padding mask and dropout in attention."""
    mask = torch.ones(NUM_SEQUENCES, LENGTH, dtype=torch.int64)
    mask[0, LENGTH // 2 :] = 0
    batch = {"input_ids": _tokens(), "attention_mask": mask, "labels": _tokens()}
    return _hugging_face("BertConfig", "BertForMaskedLM", batch, vocab_size=VOCABULARY, **_ENCODER)


def llama() -> Workload:
    """Return a Llama in which two query heads share one key and value head."""
    batch = {"input_ids": _tokens(), "labels": _tokens()}
    sizes = {**_ENCODER, "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH}
    return _hugging_face("LlamaConfig", "LlamaForCausalLM", batch, **sizes)


def mixtral() -> Workload:
    """Return a mixture-of-experts model with four experts, two of which process each token."""
    batch = {"input_ids": _tokens(), "labels": _tokens()}
    sizes = {**_ENCODER, "num_key_value_heads": 2, "vocab_size": VOCABULARY, "num_local_experts": 4}
    return _hugging_face("MixtralConfig", "MixtralForCausalLM", batch, **sizes)


def t5() -> Workload:
    """Return a T5. In its encoder and in its decoder, the first layer computes the position bias of all layers."""
    batch = {"input_ids": _tokens(), "labels": _tokens(LENGTH // 2).contiguous()}
    sizes: dict[str, Any] = {"d_model": 64, "d_kv": 16, "d_ff": 256, "num_layers": DEPTH, "num_heads": 4}
    return _hugging_face(
        "T5Config", "T5ForConditionalGeneration", batch, vocab_size=VOCABULARY, decoder_start_token_id=0, **sizes
    )


def vit() -> Workload:
    """Return a vision Transformer for classification."""
    batch = {"pixel_values": _images(), "labels": torch.arange(NUM_IMAGES)}
    return _hugging_face(
        "ViTConfig", "ViTForImageClassification", batch, image_size=32, patch_size=4, num_labels=10, **_ENCODER
    )


def whisper() -> Workload:
    """Return a speech model: convolutions and an encoder over a spectrogram, and a decoder over tokens."""
    batch = {"input_features": _images(32).reshape(NUM_IMAGES, 24, 128), "labels": _tokens(LENGTH // 2).contiguous()}
    return _hugging_face(
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        batch,
        vocab_size=VOCABULARY,
        num_mel_bins=24,
        d_model=64,
        encoder_layers=DEPTH,
        decoder_layers=DEPTH,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        max_source_positions=64,
        max_target_positions=LENGTH,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )


def clip() -> Workload:
    """Return a model for images and text. The loss of the model compares all pairs of samples in a batch."""
    text: dict[str, Any] = {**_ENCODER, "vocab_size": VOCABULARY, "eos_token_id": 2, "max_position_embeddings": LENGTH}
    vision: dict[str, Any] = {**_ENCODER, "image_size": 32, "patch_size": 4}
    batch = {"input_ids": _tokens(), "pixel_values": _images(), "return_loss": True}
    return _hugging_face("CLIPConfig", "CLIPModel", batch, text_config=text, vision_config=vision, projection_dim=64)


class ConvBlock(nn.Module):
    """Two convolutions with a residual connection, conditioned on a time embedding."""

    def __init__(self, width_in: int, width: int, time_width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, width_in)
        self.first = nn.Conv2d(width_in, width, 3, padding=1)
        self.time = nn.Linear(time_width, width)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.skip = nn.Conv2d(width_in, width, 1) if width_in != width else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.first(F.silu(self.norm(x)))
        y = y + self.time(time)[:, :, None, None]
        result: Tensor = self.skip(x) + self.second(F.silu(y))
        return result


class UNet(Module):
    """A U-Net that predicts the noise in images. The downward path retains its outputs for the upward path."""

    def __init__(self, width: int = 16, time_width: int = 32) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.time_width = time_width
        self.begin = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(ConvBlock(a, b, time_width) for a, b in zip([width, *widths], widths, strict=False))
        self.middle = nn.ModuleList(ConvBlock(widths[-1], widths[-1], time_width) for _ in range(2))
        self.up = nn.ModuleList(
            ConvBlock(2 * a, b, time_width) for a, b in zip(widths[::-1], [*widths[-2::-1], width], strict=True)
        )
        self.end = nn.Conv2d(width, 3, 3, padding=1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images = batch["images"]
        noise = torch.randn_like(images)
        level = torch.rand(len(images), device=images.device)
        time = torch.cos(level[:, None] * torch.arange(self.time_width, device=images.device)).to(images.dtype)
        x = self.begin(images + level[:, None, None, None].to(images.dtype) * noise)
        skips = []
        for block in self.down:
            x = block(x, time)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        for block in self.middle:
            x = block(x, time)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2)
            x = block(torch.cat([x, skips.pop()], dim=1), time)
        return F.mse_loss(self.end(x), noise)


def unet() -> Workload:
    """Return a U-Net of width 16."""
    return UNet(), {"images": _images()}


def resnet() -> Workload:
    """Return a residual network with batch norms and in-place operations, for images of 64 by 64."""
    return Classifier((1, 2, 2), 8, 10), [_images(64), torch.arange(NUM_IMAGES)]


def lstm() -> Workload:
    """Return a speech model and a batch of spectrograms that the model packs."""
    num_frames, num_letters = torch.tensor([48, 32, 40, 48]), torch.tensor([8, 8, 8, 8])
    spectrogram = torch.linspace(-1, 1, NUM_SEQUENCES * 48 * 41).sin().view(NUM_SEQUENCES, 48, 41)
    batch = {"spectrogram": spectrogram, "num_frames": num_frames, "letters": _tokens(8) % 28 + 1}
    config = DeepSpeechConfig(num_bands=41, num_layers=1, width=128, channels=4)
    return DeepSpeech(config), {**batch, "num_letters": num_letters}


class LSTMTagger(Module):
    """An LSTM that predicts a label for each token. Sequences are padded, not packed."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.lstm = nn.LSTM(width, width, num_layers=4, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        y, _ = self.lstm(self.tokens(batch["input_ids"]))
        return F.cross_entropy(self.head(y).flatten(0, 1), batch["labels"].flatten())


def lstm_padded() -> Workload:
    """Return an LSTM tagger and a batch of sequences."""
    return LSTMTagger(), {"input_ids": _tokens(), "labels": _tokens()}


class ConformerBlock(nn.Module):
    """A half-step feed-forward layer, attention, a convolution, and a second half-step feed-forward layer (Gulati et
    al. 2020)."""

    def __init__(self, width: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.before, self.after = (
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.SiLU(),
                nn.Dropout(dropout),
                nn.Linear(4 * width, width),
                nn.Dropout(dropout),
            )
            for _ in range(2)
        )
        self.attention_norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, dropout=dropout, batch_first=True)
        self.conv_norm = nn.LayerNorm(width)
        self.widen = nn.Conv1d(width, 2 * width, 1)
        self.depthwise = nn.Conv1d(width, width, 15, padding=7, groups=width)
        self.batch_norm = nn.BatchNorm1d(width)
        self.narrow = nn.Conv1d(width, width, 1)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.before(x)
        normed = self.attention_norm(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        y = F.glu(self.widen(self.conv_norm(x).transpose(1, 2)), dim=1)
        x = x + self.narrow(F.silu(self.batch_norm(self.depthwise(y)))).transpose(1, 2)
        result: Tensor = self.norm(x + 0.5 * self.after(x))
        return result


class Conformer(Module):
    """Conformer blocks over a spectrogram."""

    def __init__(self, width: int = 64, num_bands: int = 40) -> None:
        super().__init__()
        self.begin = nn.Conv1d(num_bands, width, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(ConformerBlock(width) for _ in range(DEPTH))
        self.head = nn.Linear(width, 29)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.begin(batch["spectrogram"].transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten())


def conformer() -> Workload:
    """Return a Conformer of width 64."""
    spectrogram = torch.linspace(-1, 1, NUM_SEQUENCES * 128 * 40).sin().view(NUM_SEQUENCES, 128, 40)
    return Conformer(), {"spectrogram": spectrogram, "labels": _tokens(64) % 29}


class Recommender(Module):
    """A recommender whose parameters are mostly in the item embedding. A user is represented by the sum of the
    embeddings of the clicked items."""

    def __init__(self, num_items: int = 50_000, width: int = 16) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(num_items, width, mode="sum")
        self.contexts = nn.ModuleList(nn.Embedding(100, width) for _ in range(4))
        self.tower = nn.Sequential(nn.Linear(5 * width, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        contexts = [table(batch["contexts"][:, i]) for i, table in enumerate(self.contexts)]
        scores = self.tower(torch.cat([self.items(batch["clicked"]), *contexts], dim=1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(scores, batch["bought"].to(scores.dtype))


def recommender() -> Workload:
    """Return a recommender with 50,000 items."""
    num_users = 256
    clicked = torch.arange(num_users * 20).view(num_users, 20) * 7919 % 50_000
    contexts = torch.arange(num_users * 4).view(num_users, 4) % 100
    return Recommender(), {"clicked": clicked, "contexts": contexts, "bought": torch.arange(num_users) % 2}


_ALL = (gpt, gpt_tied, gpt2, bert, llama, mixtral, t5, vit, whisper, clip, unet, resnet, lstm, lstm_padded, conformer)
MODELS: dict[str, Callable[[], Workload]] = {make.__name__: make for make in (*_ALL, recommender)}
"""Mapping from names to functions that return the model in training mode and one micro-batch."""
