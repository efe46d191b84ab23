"""The six models of ``python -m benchmarks seed``, each in three sizes, with synthetic data.

Articles state only some sizes. :data:`MODELS` lists the assumed sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.utils.data import default_collate

from benchmarks.models.bert import Bert, BertConfig
from benchmarks.models.deepspeech import DeepSpeech, DeepSpeechConfig
from benchmarks.models.igpt import SIZES as IGPT_SIZES
from benchmarks.models.igpt import ImageGPT
from benchmarks.models.swav import NUM_LARGE, SwAV, SwAVConfig
from benchmarks.models.transformer_lm import TransformerLM, TransformerLMConfig
from roomier.api.adapt import as_module
from roomier.models.gpt import GPT, GPTConfig
from roomier.planner.workload import Workload

Sample = dict[str, Tensor]
SIZES = ("tiny", "middle", "seed")
"""``tiny`` is for tests, ``middle`` for a machine without a GPU, and ``seed`` is the size of the article."""


@dataclass(frozen=True)
class Training:
    """A model and its data.

    Attributes:
        make_model: function that creates the model with random weights.
        make_sample: function that creates one sample from a generator.
        micro_batch: number of samples per micro-batch on each rank.
        collate: function that combines samples into a batch.
    """

    make_model: Callable[[], nn.Module]
    make_sample: Callable[[Generator], Sample]
    micro_batch: int
    collate: Callable[[list[Sample]], Any] = default_collate

    def samples(self) -> list[Sample]:
        """Return a few samples, which an epoch repeats."""
        generator = torch.Generator().manual_seed(0)
        return [self.make_sample(generator) for _ in range(4 * self.micro_batch)]

    def workload(self, micro_batch: int) -> Workload:
        """Return the model on the meta device and a micro-batch of ``micro_batch`` samples."""
        sample = self.make_sample(torch.Generator().manual_seed(0))
        with torch.device("meta"):
            model = self.make_model()
        return replace(Workload.of(model, self.collate([sample] * micro_batch)), module=as_module(model))


@dataclass(frozen=True)
class SeedModel:
    """A model from an article.

    Attributes:
        sizes: mapping from the names in :data:`SIZES` to the model and its data.
        text: sizes that the article states, and assumptions.
        epoch_samples: number of samples per epoch in the article.
    """

    sizes: Mapping[str, Training]
    text: str
    epoch_samples: int


def _tokens(length: int, vocab_size: int, generator: Generator) -> Tensor:
    return torch.randint(vocab_size, (length,), generator=generator)


def _words(config: GPTConfig | TransformerLMConfig, generator: Generator) -> Sample:
    tokens = _tokens(config.context + 1, config.vocab_size, generator)
    return {"input_ids": tokens[:-1], "targets": tokens[1:].clone()}


def gpt(config: GPTConfig, micro_batch: int) -> Training:
    """Return a GPT and random sequences of the maximum length."""
    return Training(lambda: GPT(config), partial(_words, config), micro_batch)


def minigpt(num_layers: int, num_heads: int, width: int, *, context: int = 128, micro_batch: int = 1) -> Training:
    """Return the GPT of minGPT's benchmark, whose text has 65 different characters."""
    return gpt(GPTConfig(65, context, num_layers, num_heads, width), micro_batch)


def transformer_lm(config: TransformerLMConfig, micro_batch: int) -> Training:
    """Return NeMo's language model and random sequences of the maximum length."""
    return Training(lambda: TransformerLM(config), partial(_words, config), micro_batch)


def bert(config: BertConfig, micro_batch: int) -> Training:
    """Return BERT with a classifier, and random sequences of the maximum length with random labels."""

    def sample(generator: Generator) -> Sample:
        tokens = _tokens(config.context, config.vocab_size, generator)
        return {"input_ids": tokens, "labels": torch.randint(config.num_classes, (), generator=generator)}

    return Training(lambda: Bert(config), sample, micro_batch)


def igpt(config: GPTConfig, side: int, micro_batch: int) -> Training:
    """Return iGPT and random images of ``side`` by ``side`` pixels."""

    def sample(generator: Generator) -> Sample:
        return {"pixels": torch.randint(config.vocab_size, (side, side), generator=generator)}

    return Training(lambda: ImageGPT(config), sample, micro_batch)


def swav(config: SwAVConfig, large: int, small: int, num_small: int, micro_batch: int) -> Training:
    """Return SwAV and random crops: 2 of ``large`` pixels and ``num_small`` of ``small`` pixels."""

    def sample(generator: Generator) -> Sample:
        return {
            "large_crops": torch.randn(NUM_LARGE, 3, large, large, generator=generator),
            "small_crops": torch.randn(num_small, 3, small, small, generator=generator),
        }

    return Training(lambda: SwAV(config), sample, micro_batch)


def deepspeech2(config: DeepSpeechConfig, num_frames: int, num_letters: int, micro_batch: int) -> Training:
    """Return DeepSpeech 2, random spectrograms and random transcripts.

    Within a batch, the lengths decrease from ``num_frames`` to 60 % of ``num_frames``. Every batch has the same
    lengths.
    """

    def sample(generator: Generator) -> Sample:
        return {
            "spectrogram": torch.randn(num_frames, config.num_bands, generator=generator),
            "letters": torch.randint(1, config.num_letters, (num_letters,), generator=generator),
        }

    def collate(samples: list[Sample]) -> Sample:
        batch: Sample = default_collate(samples)
        shares = torch.linspace(1.0, 0.6, len(samples))
        lengths = {"num_frames": (shares * num_frames).long(), "num_letters": (shares * num_letters).long()}
        return {**batch, **lengths}

    return Training(lambda: DeepSpeech(config), sample, micro_batch, collate)


_TINY_TRUNK, _MIDDLE_TRUNK = (1, 1, 1, 1), (2, 2, 2, 2)

MODELS: dict[str, SeedModel] = {
    "minigpt": SeedModel(
        {
            "tiny": minigpt(4, 4, 64, context=32),
            "middle": minigpt(6, 8, 512, micro_batch=2),
            "seed": minigpt(15, 16, 3072),
        },
        "1.7 billion parameters, sequences of 128 characters, batch size 1",
        epoch_samples=8 * 128,
    ),
    "transformer-lm": SeedModel(
        {
            "tiny": transformer_lm(TransformerLMConfig(200, 32, 4, 4, 64, 48), 2),
            "middle": transformer_lm(TransformerLMConfig(8000, 128, 6, 8, 384, 256), 2),
            "seed": transformer_lm(TransformerLMConfig(), 4),
        },
        "1.2 billion parameters; sequences of 256 tokens as in NeMo; batch size 4 is assumed",
        epoch_samples=67_349,
    ),
    "swav": SeedModel(
        {
            "tiny": swav(SwAVConfig(_TINY_TRUNK, 8, 32, 16, 20, 16), 64, 48, 2, 4),
            "middle": swav(SwAVConfig(_MIDDLE_TRUNK, 32, 512, 128, 300, 256), 64, 48, 4, 4),
            "seed": swav(SwAVConfig(channels=128), 96, 48, 6, 32),
        },
        "ResNet-50 of double width, values from the SwAV paper; crops for STL-10 and batch size 32 are assumed",
        epoch_samples=100_000,
    ),
    "deepspeech2": SeedModel(
        {
            "tiny": deepspeech2(DeepSpeechConfig(41, num_layers=2, width=32, channels=4), 48, 6, 4),
            "middle": deepspeech2(DeepSpeechConfig(81, num_layers=3, width=256, channels=16), 160, 20, 4),
            "seed": deepspeech2(DeepSpeechConfig(), 800, 100, 8),
        },
        "5 bidirectional LSTMs of width 1024; 8 sequences of 8 seconds are assumed",
        epoch_samples=28_539,
    ),
    "igpt": SeedModel(
        {
            "tiny": igpt(GPTConfig(16, 64, 4, 2, 32), 8, 4),
            "middle": igpt(GPTConfig(16, 20 * 20, 6, 8, 256), 20, 2),
            "seed": igpt(GPTConfig(16, 28 * 28, *IGPT_SIZES["igpt-s"]), 28, 32),
        },
        "MNIST with 28 x 28 pixels; iGPT-S with 16 colors and batch size 32 are assumed",
        epoch_samples=60_000,
    ),
    "bert-large": SeedModel(
        {
            "tiny": bert(BertConfig(200, 32, 4, 4, 64, fused_attention=False), 4),
            "middle": bert(BertConfig(8000, 128, 4, 8, 384, fused_attention=False), 4),
            "seed": bert(BertConfig(fused_attention=False), 4),
        },
        "sequences of 512 tokens, 4 sequences in each step",
        epoch_samples=512,
    ),
}
"""Mapping from names to models, in the order of the articles."""
